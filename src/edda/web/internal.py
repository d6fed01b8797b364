"""What is below `/_edda`: probes, metrics, the control API, logging in and out, and pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from edda.control.operations import BULK_TIMEOUT
from edda.web.api import Control, ControlEndpoint
from edda.web.health import Readiness, liveness
from edda.web.metrics import Metrics
from edda.web.options import WebOptions
from edda.web.request import Request
from edda.web.security.access import SAFE, AccessPolicy
from edda.web.security.callers import Authenticator, Principal, check_origin
from edda.web.security.login import LoginSessions
from edda.web.security.tokens import TokenScope

from .request import BodyReader
from .responses import HTTPError, Response, http_error, method_not_allowed
from .service import ServiceGate
from .sse import ASGIResponse, EventStreams

__all__ = ["Control", "InternalRoutes", "Viewer"]

_READ_ONLY = "GET, HEAD"
# Under "no-referrer" a browser says `Origin: null` of our own forms, and by plain http nothing else of their origin.
_REFERRER_POLICY = (b"referrer-policy", b"same-origin")


class Viewer(Protocol):
    """What people see."""

    async def answer(self, request: Request, caller: Principal | None, body: bytes = b"") -> Response | None:
        """None if there is no such page. Without a caller there is a form to log in with, and nothing else."""

    def error_page(self, request: Request, caller: Principal | None, refusal: Response) -> Response:
        """The same refusal as a page."""
        ...


class InternalRoutes:
    def __init__(
        self,
        options: WebOptions,
        door: AccessPolicy,
        intake: BodyReader,
        backing: ServiceGate,
        streams: EventStreams,
        metrics: Metrics,
        control: Control | None,
        pages: Viewer | None,
    ) -> None:
        self._door = door
        self._intake = intake
        self._backing = backing
        self._streams = streams
        self._metrics = metrics
        self._control = control
        self._pages = pages
        self._readiness = Readiness(backing)
        self._api: ControlEndpoint | None = None
        self._sessions = LoginSessions(options)
        self._callers = Authenticator(options, door, self._sessions)
        if control is not None:
            self._api = ControlEndpoint(options, self._callers, intake, backing, streams, control)

    async def answer(self, request: Request) -> ASGIResponse:
        self._door.check_probe_access(request)
        path = request.path
        if path in {"/_edda/livez", "/_edda/readyz"}:
            _check_safe(request)
            return liveness() if path == "/_edda/livez" else await self._readiness.answer()
        if self._api is not None and path.startswith("/_edda/api/v1/"):
            return await self._api.answer(request)
        if self._control is not None and path == "/_edda/metrics":
            return await self._metrics_response(request, self._control)
        if self._pages is not None:
            return await self._page_response(request, self._pages)
        raise http_error(404, "there is nothing at this address")

    def error_page(self, request: Request, refusal: Response) -> Response:
        """As a page if a person would read it: programs do not ask for HTML."""
        if self._pages is None or not _wants_html(request):
            return refusal
        try:
            caller = self._callers.authenticate(request)
        except HTTPError:
            caller = None
        return self._pages.error_page(request, caller, refusal)

    async def _metrics_response(self, request: Request, control: Control) -> Response:
        self._callers.require(request).check(TokenScope.VIEW)
        _check_safe(request)
        self._backing.check_started()
        async with self._backing.slot():
            return await self._metrics.answer(control().get_stats, self._streams.count)

    async def _page_response(self, request: Request, pages: Viewer) -> Response:
        action = {"/_edda/login": self._log_in, "/_edda/logout": self._log_out}.get(request.path)
        if action is not None and request.method == "POST":
            return await action(request)
        caller = self._callers.authenticate(request)
        if caller is not None and not _is_open(request):
            caller.check(TokenScope.VIEW)
            self._backing.check_started()
        is_action = caller is not None and request.method not in SAFE
        body = await self._read(request) if is_action else b""
        async with self._backing.slot(BULK_TIMEOUT if is_action else None):
            found = await pages.answer(request, caller, body)
        if found is None:
            raise http_error(404, "there is nothing at this address")
        return replace(found, headers=(*found.headers, _REFERRER_POLICY))

    async def _log_in(self, request: Request) -> Response:
        self._door.check_host(request)
        check_origin(request, by_cookie=False)
        return self._sessions.log_in(request, await self._read(request))

    async def _log_out(self, request: Request) -> Response:
        self._door.check_host(request)
        check_origin(request, by_cookie=True)
        return self._sessions.log_out(request)

    async def _read(self, request: Request) -> bytes:
        body = await self._intake.read(request)
        self._intake.release(len(body))
        return body


def _is_open(request: Request) -> bool:
    return request.path == "/_edda/login" or request.path.startswith("/_edda/static/")


def _wants_html(request: Request) -> bool:
    is_page = request.path.startswith("/_edda/") and not request.path.startswith("/_edda/api/")
    return is_page and any(name == b"accept" and b"text/html" in value for name, value in request.headers)


def _check_safe(request: Request) -> None:
    if request.method not in {"GET", "HEAD"}:
        raise method_not_allowed(_READ_ONLY)
