"""The viewer: routes of its pages, and their responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie
from typing import TypeVar
from urllib.parse import quote, unquote

from edda import errors
from edda.control.controller import Controller
from edda.viewer import events, overview, runs, templating
from edda.viewer.request import Download, PageRequest, QueryParams, Redirect, Rendered, Reply
from edda.web.access import Principal
from edda.web.request import Request
from edda.web.responses import Response

T = TypeVar("T")
PageHandler = Callable[[PageRequest, Controller], Awaitable[Reply]]

_FLASH = "edda_flash"
_MAX_FLASH_LENGTH = 400
_HTML = (b"content-type", b"text/html; charset=utf-8")
_IMMUTABLE = (b"cache-control", b"public, max-age=31536000, immutable")

GET_ROUTES: dict[tuple[str, ...], PageHandler] = {
    (): overview.show_overview,
    ("workers",): overview.show_workers,
    ("workflows",): overview.show_workflows,
    ("audit",): overview.show_audit,
    ("runs",): runs.show_runs,
    ("runs", "bulk"): runs.bulk_form,
    ("runs", "*"): runs.show_run,
    ("runs", "*", "export"): runs.export_run,
    **{("runs", "*", name): runs.action_form for name in runs.ACTIONS},
    ("start", "*"): runs.start_form,
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
POST_ROUTES: dict[tuple[str, ...], tuple[str, PageHandler]] = {
    ("runs", "bulk"): ("control", runs.submit_bulk),
    **{("runs", "*", name): ("control", runs.submit_action) for name in runs.ACTIONS},
    ("runs", "*", "answer"): ("events", runs.submit_wait_form),
    ("start", "*"): ("control", runs.submit_start_form),
    ("events", "send"): ("events", events.send_event),
    ("events", "*", "resend"): ("events", events.resend),
    ("channels", "publish"): ("events", events.publish),
    ("outbox", "retry"): ("control", events.submit_outbox),
    ("outbox", "drop"): ("control", events.submit_outbox),
}


class Viewer:
    def __init__(self, control: Callable[[Principal], Controller]) -> None:
        self._control = control

    async def handle(self, request: Request, caller: Principal | None, body: bytes = b"") -> Response | None:
        """None if there is no such page. Without a caller, only the login page and static files are served."""
        parts = request.parts[1:]
        if parts and parts[0] == "static":
            return _static_file(parts[1:])
        page = _page_request(request, parts, caller, body)
        if parts == ("login",):
            return _to_response(page, Rendered("login.html"))
        if caller is None:
            query = QueryParams((("next", page.link(*page.parts, query=page.query)),))
            return _to_response(page, Redirect(page.link("login", query=query)))
        try:
            reply = await self._reply(page, self._control(caller))
        except errors.EddaError as error:
            reply = error_page_for(error)
        return None if reply is None else _to_response(page, reply)

    def error_page(self, request: Request, caller: Principal | None, error: Response) -> Response:
        page = _page_request(request, request.parts[1:], caller, b"")
        response = _to_response(page, error_page(error.status, error.reason))
        kept = tuple(header for header in error.headers if header[0] != b"content-type")
        return replace(response, headers=(*response.headers, *kept))

    async def _reply(self, request: PageRequest, control: Controller) -> Reply | None:
        if request.method in {"GET", "HEAD"}:
            handler = _find(GET_ROUTES, request.parts)
            return None if handler is None else await handler(request, control)
        found = _find(POST_ROUTES, request.parts)
        if request.method != "POST" or found is None:
            return None
        scope, handler = found
        if scope not in request.scopes:
            return error_page(403, f"your token lacks the scope {scope}")
        return await handler(request, control)


def _page_request(request: Request, parts: tuple[str, ...], caller: Principal | None, body: bytes) -> PageRequest:
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
    """A route with exactly these parts, else one with `*` in place of the second."""
    return table.get(parts) or (table.get((parts[0], "*", *parts[2:])) if len(parts) > 1 else None)


def _to_response(request: PageRequest, reply: Reply) -> Response:
    match reply:
        case Rendered():
            body = templating.render(reply.template, {"request": request, **reply.values})
            cleared = (_flash_cookie(request, "", 0),) if request.flash else ()
            return Response(reply.status, body, (_HTML, *cleared))
        case Download():
            name = quote(reply.name, safe="")
            disposition = (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode())
            return Response(200, reply.body, ((b"content-type", b"application/json"), disposition))
        case Redirect():
            headers = [(b"location", reply.to.encode("ascii"))]
            if reply.flash:
                headers.append(_flash_cookie(request, quote(reply.flash[:_MAX_FLASH_LENGTH], safe=""), 60))
            return Response(303, b"", tuple(headers))


def _flash_cookie(request: PageRequest, value: str, seconds: int) -> tuple[bytes, bytes]:
    """The result of an action is shown on the next page. A query parameter would let any link show any text."""
    secure = "; Secure" if request.is_secure else ""
    text = f"{_FLASH}={value}; Path={request.base or '/'}; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"
    return b"set-cookie", text.encode("ascii")


def _read_flash(request: Request) -> str | None:
    if request.has(b"x-edda-live"):  # another page refreshes itself: it must not clear the cookie
        return None
    for name, value in request.headers:
        if name == b"cookie":
            try:
                found = SimpleCookie(value.decode("latin-1")).get(_FLASH)
            except CookieError:
                continue
            if found and found.value:
                return unquote(found.value)[:_MAX_FLASH_LENGTH]
    return None


def _static_file(parts: tuple[str, ...]) -> Response | None:
    content = templating.read_file(parts[-1]) if len(parts) == 1 else None
    if content is None:
        return None
    media_type = templating.TYPES.get(parts[-1].rpartition(".")[2], "text/plain")
    return Response(200, content, ((b"content-type", media_type.encode()), _IMMUTABLE))


_STATUSES: tuple[tuple[tuple[type[errors.EddaError], ...], int], ...] = (
    ((errors.InstanceNotFoundError, errors.NotFoundError, errors.UnknownWorkflowError), 404),
    ((errors.ActionRefusedError, errors.InstanceConflictError), 409),
    ((errors.ArgumentError, errors.EventError, errors.EventValidationError, errors.PayloadError), 422),
)
_TEXTS = {
    400: ("Bad request", "Go back, reload the page, and try again."),
    401: ("Not logged in", "Log in with a token of this server."),
    403: ("Not allowed", "Log in with a token that has the scope, or ask the operator of this server."),
    404: ("Not found", "The address may be mistyped, or the object was deleted."),
    405: ("Not possible here", "Go back and use the buttons of the page."),
    408: ("Too slow", "Go back and send it again."),
    409: ("Not possible now", "The state has changed: reload the page."),
    413: ("Too large", "Send less, or raise max_body in the settings of this server."),
    422: ("Invalid input", "Go back, correct it, and send it again."),
    429: ("Too many requests", "Wait a minute, then try again."),
    431: ("Too many headers", "Delete the cookies of this site, then try again."),
    503: ("Not available", "Try again later. If the error remains, run `edda doctor` on the server."),
}
_OTHER = ("Unexpected error", "Try again. If the error remains, ask the operator of this server.")


def error_page_for(error: errors.EddaError) -> Rendered:
    """Raises the error again if its text is not meant for the user."""
    for kinds, status in _STATUSES:
        if isinstance(error, kinds):
            return error_page(status, str(error))
    raise error


def error_page(status: int, reason: str) -> Rendered:
    title, advice = _TEXTS.get(status, _OTHER)
    return Rendered("error.html", {"title": title, "reason": reason, "advice": advice}, status)
