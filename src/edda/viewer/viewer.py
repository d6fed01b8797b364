"""Viewer: from a request to a page and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie
from typing import TypeVar
from urllib.parse import quote, unquote

from edda.control.controller import Controller
from edda.errors import EddaError
from edda.web.request import Request
from edda.web.responses import Response
from edda.web.security.callers import Principal

from . import templating
from .errors import error_page, error_page_for
from .pages import events, forms, overview, runs
from .request import Download, PageRequest, QueryParams, Redirect, Rendered, Reply

T = TypeVar("T")
PageMaker = Callable[[PageRequest, Controller], Awaitable[Reply]]

_SAID = "edda_said"
_LONGEST_SAID = 400
_HTML = (b"content-type", b"text/html; charset=utf-8")
_KEPT = (b"cache-control", b"public, max-age=31536000, immutable")

GET_ROUTES: dict[tuple[str, ...], PageMaker] = {
    (): overview.show_overview,
    ("workers",): overview.show_workers,
    ("workflows",): overview.show_workflows,
    ("audit",): overview.show_audit,
    ("runs",): runs.show_runs,
    ("runs", "bulk"): runs.bulk_form,
    ("runs", "*"): runs.show_run,
    ("runs", "*", "export"): runs.export_run,
    **{("runs", "*", name): runs.action_form for name in runs.ACTIONS},
    ("start", "*"): forms.start_form,
    ("events",): events.show_events,
    ("events", "send"): events.send_form,
    ("events", "*"): events.show_event,
    ("events", "*", "resend"): events.resend_form,
    ("waits",): events.show_waits,
    ("channels",): events.show_channels,
    ("channels", "publish"): events.publish_form,
    ("outbox",): events.show_outbox,
    ("outbox", "retry"): events.outbox_form,
    ("outbox", "drop"): events.outbox_form,
}
POST_ROUTES: dict[tuple[str, ...], tuple[str, PageMaker]] = {
    ("runs", "bulk"): ("control", runs.submit_bulk),
    **{("runs", "*", name): ("control", runs.submit_action) for name in runs.ACTIONS},
    ("runs", "*", "answer"): ("events", forms.submit_wait_form),
    ("start", "*"): ("control", forms.submit_start_form),
    ("events", "send"): ("events", events.send_event),
    ("events", "*", "resend"): ("events", events.resend),
    ("channels", "publish"): ("events", events.publish),
    ("outbox", "retry"): ("control", events.submit_outbox),
    ("outbox", "drop"): ("control", events.submit_outbox),
}


class Viewer:
    def __init__(self, control: Callable[[Principal], Controller]) -> None:
        self._control = control

    async def answer(self, request: Request, caller: Principal | None, body: bytes = b"") -> Response | None:
        """None for what is no page. Without a caller there is a login, and nothing else."""
        parts = request.parts[1:]
        if parts and parts[0] == "static":
            return _file(parts[1:])
        visit = _read_visit(request, parts, caller, body)
        if parts == ("login",):
            return _to_response(visit, Rendered("login.html"))
        if caller is None:
            return _to_redirect(visit, Redirect(visit.link("login", query=_login_query(visit))))
        try:
            reply = await self._reply(visit, self._control(caller))
        except EddaError as error:
            reply = error_page_for(error)
        return None if reply is None else _to_response(visit, reply)

    def error_page(self, request: Request, caller: Principal | None, refusal: Response) -> Response:
        visit = _read_visit(request, request.parts[1:], caller, b"")
        page = _to_response(visit, error_page(refusal.status, refusal.reason))
        kept = tuple(header for header in refusal.headers if header[0] != b"content-type")
        return replace(page, headers=(*page.headers, *kept))

    async def _reply(self, visit: PageRequest, control: Controller) -> Reply | None:
        if visit.method in {"GET", "HEAD"}:
            page = _find(GET_ROUTES, visit.parts)
            return None if page is None else await page(visit, control)
        found = _find(POST_ROUTES, visit.parts)
        if visit.method != "POST" or found is None:
            return None
        scope, page = found
        if scope not in visit.scopes:
            return error_page(403, f"your token lacks the scope {scope}")
        return await page(visit, control)


def _read_visit(request: Request, parts: tuple[str, ...], caller: Principal | None, body: bytes) -> PageRequest:
    return PageRequest(
        method=request.method,
        parts=tuple(part for part in parts if part),
        base=request.base,
        query=QueryParams.read(request.query),
        form=QueryParams.read(body),
        user=caller.name if caller else "",
        scopes=frozenset(scope.value for scope in caller.scopes) if caller else frozenset(),
        flash=_read_flash(request),
        is_secure=request.secure,
    )


def _find(table: Mapping[tuple[str, ...], T], parts: tuple[str, ...]) -> T | None:
    """By the path itself, else with its second part as whatever it may be."""
    return table.get(parts) or (table.get((parts[0], "*", *parts[2:])) if len(parts) > 1 else None)


def _to_response(visit: PageRequest, reply: Reply) -> Response:
    match reply:
        case Rendered():
            body = templating.render(reply.template, {"visit": visit, **reply.values})
            return Response(reply.status, body, (_HTML, *_clear_flash(visit)))
        case Download():
            name = quote(reply.name, safe="")
            disposition = (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode())
            return Response(200, reply.body, ((b"content-type", b"application/json"), disposition))
        case Redirect():
            return _to_redirect(visit, reply)


def _to_redirect(visit: PageRequest, moved: Redirect) -> Response:
    headers = [(b"location", moved.to.encode("ascii"))]
    if moved.flash:
        headers.append(_cookie(visit, quote(moved.flash[:_LONGEST_SAID], safe=""), 60))
    return Response(303, b"", tuple(headers))


def _clear_flash(visit: PageRequest) -> tuple[tuple[bytes, bytes], ...]:
    return (_cookie(visit, "", 0),) if visit.flash else ()


def _cookie(visit: PageRequest, value: str, seconds: int) -> tuple[bytes, bytes]:
    """What came of an action travels in a cookie: in the address, anybody could make a page say anything."""
    secure = "; Secure" if visit.is_secure else ""
    text = f"{_SAID}={value}; Path={visit.base or '/'}; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"
    return b"set-cookie", text.encode("ascii")


def _read_flash(request: Request) -> str | None:
    if request.has(b"x-edda-live"):  # another page that keeps itself up to date must not take it away
        return None
    for name, value in request.headers:
        if name == b"cookie":
            try:
                found = SimpleCookie(value.decode("latin-1")).get(_SAID)
            except CookieError:
                continue
            if found and found.value:
                return unquote(found.value)[:_LONGEST_SAID]
    return None


def _login_query(visit: PageRequest) -> QueryParams:
    return QueryParams((("next", visit.link(*visit.parts, query=visit.query)),))


def _file(parts: tuple[str, ...]) -> Response | None:
    content = templating.read_file(parts[-1]) if len(parts) == 1 else None
    if content is None:
        return None
    kind = templating.TYPES.get(parts[-1].rpartition(".")[2], "text/plain")
    return Response(200, content, ((b"content-type", kind.encode()), _KEPT))
