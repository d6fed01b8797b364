"""One HTTP request: its path, headers and query from the ASGI scope, and its body, read within limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, unquote_to_bytes

from edda.web.options import WebOptions

from .responses import Headers, HTTPError, Receive, Scope, http_error, retry_later

_ABSOLUTE = re.compile(r"https?://[^/]*", re.IGNORECASE)
# A token is accepted in this spelling only, which is also the one that is removed from the scope and so from the logs.
_QUERY_TOKEN = re.compile(rb"(^|&)access_token=([^&]*)")
_ENCODINGS = frozenset({b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress"})
_RATE_GRACE = 5.0
"""Seconds before `min_rate` applies."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Without the prefix that the app is mounted at."""
    headers: Headers
    client: str | None
    """None for a client on a Unix socket."""
    query_token: bytes | None = field(repr=False)
    receive: Receive
    root: str = ""
    """The prefix that the app is mounted at; links to our pages begin with it."""
    raw_path: str = ""
    """`path`, still percent-encoded."""
    query: bytes = b""
    """A token in it is replaced by ***."""
    secure: bool = False
    """The scheme is https."""

    @property
    def base(self) -> str:
        """The path of the first page without its trailing slash: every link begins with it."""
        return f"{quote(self.root)}/_edda"

    @property
    def parts(self) -> tuple[str, ...]:
        """The decoded parts of the path; a part may contain a slash, which is percent-encoded in `raw_path`."""
        return tuple(unquote(part) for part in self.raw_path.split("/")[1:])

    def header(self, name: bytes) -> bytes | None:
        """Raises 400 if the header occurs twice: two headers are used to smuggle requests past a proxy."""
        values = [value for key, value in self.headers if key == name]
        if len(values) > 1:
            raise http_error(400, f"the header {name.decode()} occurs {len(values)} times")
        return values[0] if values else None

    def has(self, *names: bytes) -> bool:
        return any(key in names for key, _ in self.headers)


def read_request(scope: Scope, receive: Receive) -> Request:
    client = scope.get("client")
    path = _path_below(_roots(scope), scope["path"])
    return Request(
        method=scope["method"],
        path=path,
        headers=list(scope["headers"]),
        client=None if client is None or not client[0] else client[0],
        query_token=_take_query_token(scope),
        receive=receive,
        root=_roots(scope)[0],
        raw_path=_raw_path(scope, path),
        query=scope.get("query_string", b""),
        secure=scope.get("scheme") == "https",
    )


def _roots(scope: Scope) -> tuple[str, ...]:
    """The second is for a Starlette app whose own root_path a proxy has removed from the path."""
    root: str = scope.get("root_path", "").rstrip("/")
    return root, root.removeprefix(scope.get("app_root_path", "").rstrip("/"))


def _path_below(roots: tuple[str, ...], path: str) -> str:
    """Some servers leave root_path at the start of the path, and some pass on an absolute URL."""
    path = _ABSOLUTE.sub("", path, count=1) or "/"
    for root in roots:
        if root and (path == root or path.startswith(root + "/")):
            return path[len(root) :] or "/"
    return path


def _raw_path(scope: Scope, path: str) -> str:
    """Some servers have no raw_path, and some remove root_path from `path` only: then the path is quoted anew."""
    sent: bytes = scope.get("raw_path") or b""
    raw = sent.partition(b"?")[0].decode("latin-1")
    raw = _path_below(tuple(quote(root) for root in _roots(scope)), raw)
    return raw if unquote(raw) == path else quote(path)


def _take_query_token(scope: Scope) -> bytes | None:
    """Replaces the token in the scope, because servers write their access log from the scope after the response."""
    query: bytes = scope.get("query_string", b"")
    found = _QUERY_TOKEN.search(query)
    if found is None:
        return None
    scope["query_string"] = _QUERY_TOKEN.sub(rb"\1access_token=***", query)
    return unquote_to_bytes(found[2])


class DisconnectedError(Exception):
    """The client closed the connection before its body was complete."""


class BodyReader:
    """Reads bodies, and limits the memory that all of them hold together (`max_buffered`)."""

    def __init__(self, options: WebOptions) -> None:
        self._options = options
        self._held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body counts as held until the block ends."""
        _check_encoding(request)
        declared = request.header(b"content-length")
        if declared is not None:
            if not declared.isdigit():
                raise http_error(400, "Content-Length is not a number")
            self._check_size(int(declared[:30]))  # int() rejects thousands of digits; 30 exceed every limit
        body = bytearray()
        try:
            await self._receive(request, body)
            yield bytes(body)
        finally:
            self._held -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(started + self._seconds_for(0)) as limit:
                while await self._read_more(request, body):
                    limit.reschedule(started + self._seconds_for(len(body)))
        except TimeoutError:
            text = "the body arrived too slowly (body_timeout, min_rate)"
            raise http_error(408, text, headers={"Connection": "close"}) from None

    async def _read_more(self, request: Request, body: bytearray) -> bool:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        chunk = message.get("body", b"")
        more = bool(message.get("more_body", False))
        if chunk:
            self._check_size(len(body) + len(chunk))
            if self._held + len(chunk) > self._options.max_buffered:
                error = "the bodies of all current requests are too large together (max_buffered)"
                raise HTTPError(retry_later(503, error, self._options.retry_after))
            self._held += len(chunk)
            body += chunk
        elif more:
            await asyncio.sleep(0)  # a server whose receive() returns empty chunks at once must not block the loop
        return more

    def _check_size(self, size: int) -> None:
        if size > self._options.max_body:
            raise http_error(413, f"the body is larger than {self._options.max_body} bytes (max_body)")

    def _seconds_for(self, size: int) -> float:
        return min(self._options.body_timeout, _RATE_GRACE + size / self._options.min_rate)


def _check_encoding(request: Request) -> None:
    encoding = request.header(b"content-encoding")
    name = b"identity" if encoding is None else encoding.strip().lower()
    if name != b"identity":
        # A small compressed body can expand to any size, and a webhook signature covers the bytes as sent.
        shown = f" {name.decode()}" if name in _ENCODINGS else ""
        error = f"the Content-Encoding{shown} is not supported: send the body unencoded"
        raise http_error(415, error, headers={"Accept-Encoding": "identity"})
