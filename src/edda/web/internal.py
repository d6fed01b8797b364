"""The routes below `/_edda`: probes, metrics, the control API, login and logout, and the pages of the viewer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from edda.control.controller import BULK_TIMEOUT
from edda.engine.tasks import start_task
from edda.errors import EddaError
from edda.web.access import SAFE_METHODS, AccessPolicy, Authenticator, LoginSessions, Principal, check_origin
from edda.web.api import Control, ControlEndpoint
from edda.web.metrics import Metrics
from edda.web.options import WebOptions
from edda.web.request import BodyReader, Request
from edda.web.tokens import TokenScope

from .responses import HTTPError, Response, http_error, json_response, method_not_allowed, retry_later
from .service import ServiceGate
from .sse import ASGIResponse, EventStreams

logger = logging.getLogger("edda.web")

# Under "no-referrer" a browser sends `Origin: null` with our own forms, and over plain http no Sec-Fetch-Site either.
_REFERRER_POLICY = (b"referrer-policy", b"same-origin")


class PageViewer(Protocol):
    """Implemented by `Viewer`, which is imported on the first request for a page."""

    async def handle(self, request: Request, caller: Principal | None, body: bytes = b"") -> Response | None:
        """None if there is no such page. Without a caller, only the login page and static files are served."""

    def error_page(self, request: Request, caller: Principal | None, error: Response) -> Response:
        """The error response as an HTML page."""
        ...


class InternalRoutes:
    def __init__(
        self,
        options: WebOptions,
        access: AccessPolicy,
        bodies: BodyReader,
        gate: ServiceGate,
        streams: EventStreams,
        metrics: Metrics,
        control: Control | None,
        viewer: Callable[[], PageViewer] | None,
    ) -> None:
        self._access = access
        self._bodies = bodies
        self._gate = gate
        self._streams = streams
        self._metrics = metrics
        self._control = control
        self._viewer = viewer
        self._readiness = Readiness(gate)
        self._api: ControlEndpoint | None = None
        self._sessions = LoginSessions(options)
        self._authenticator = Authenticator(options, access, self._sessions)
        if control is not None:
            self._api = ControlEndpoint(options, self._authenticator, bodies, gate, streams, control)

    async def handle(self, request: Request) -> ASGIResponse:
        self._access.check_probe_access(request)
        path = request.path
        if path in {"/_edda/livez", "/_edda/readyz"}:
            _check_safe(request)
            return _ALIVE if path == "/_edda/livez" else await self._readiness.check()
        if self._api is not None and path.startswith("/_edda/api/v1/"):
            return await self._api.handle(request)
        if self._control is not None and path == "/_edda/metrics":
            return await self._metrics_response(request, self._control)
        if self._viewer is not None:
            return await self._page_response(request, self._viewer())
        raise http_error(404, "there is nothing at this path")

    def error_page(self, request: Request, error: Response) -> Response:
        """The error as an HTML page, if the client accepts HTML and asked for a page."""
        is_page = request.path.startswith("/_edda/") and not request.path.startswith("/_edda/api/")
        wants_html = any(name == b"accept" and b"text/html" in value for name, value in request.headers)
        if self._viewer is None or not (is_page and wants_html):
            return error
        try:
            caller = self._authenticator.authenticate(request)
        except HTTPError:
            caller = None
        return self._viewer().error_page(request, caller, error)

    async def _metrics_response(self, request: Request, control: Control) -> Response:
        self._authenticator.require(request).check(TokenScope.VIEW)
        _check_safe(request)
        self._gate.check_started()
        async with self._gate.slot():
            return await self._metrics.collect(control().get_stats, self._streams.count)

    async def _page_response(self, request: Request, viewer: PageViewer) -> Response:
        if request.method == "POST" and request.path in {"/_edda/login", "/_edda/logout"}:
            return await self._log_in_or_out(request)
        caller = self._authenticator.authenticate(request)
        is_public = request.path == "/_edda/login" or request.path.startswith("/_edda/static/")
        if caller is not None and not is_public:
            caller.check(TokenScope.VIEW)
            self._gate.check_started()
        is_action = caller is not None and request.method not in SAFE_METHODS
        body = b""
        if is_action:
            async with self._bodies.read(request) as body:
                pass
        async with self._gate.slot(BULK_TIMEOUT if is_action else None):
            page = await viewer.handle(request, caller, body)
        if page is None:
            raise http_error(404, "there is nothing at this path")
        return replace(page, headers=(*page.headers, _REFERRER_POLICY))

    async def _log_in_or_out(self, request: Request) -> Response:
        is_logout = request.path == "/_edda/logout"
        self._access.check_host(request)
        check_origin(request, by_cookie=is_logout)
        if is_logout:
            return self._sessions.log_out(request)
        async with self._bodies.read(request) as body:
            return self._sessions.log_in(request, body)


_ALIVE = json_response(200, {"status": "ok"})
"""Sent from the event loop without the database: liveness means that the loop runs."""


class Readiness:
    """Pings the database; requests that arrive during a ping share its result."""

    def __init__(self, gate: ServiceGate) -> None:
        self._gate = gate
        self._running: asyncio.Task[Response] | None = None

    async def check(self) -> Response:
        if self._running is None:
            self._running = start_task(self._ping())
            self._running.add_done_callback(self._clear)
        return await asyncio.shield(self._running)

    def _clear(self, _: asyncio.Task[Response]) -> None:
        self._running = None

    async def _ping(self) -> Response:
        try:
            self._gate.check_started()
            await self._gate.ping()
        except HTTPError as error:
            return error.response
        except (EddaError, OSError) as error:
            logger.warning("readiness check failed (%s), answering 503", error)
            return retry_later(503, "the database does not respond", self._gate.retry_after)
        return json_response(200, {"status": "ready"})


def _check_safe(request: Request) -> None:
    if request.method not in {"GET", "HEAD"}:
        raise method_not_allowed("GET, HEAD")
