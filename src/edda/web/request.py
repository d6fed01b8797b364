"""One request: its headers, and its body read within limits of size and time."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, unquote_to_bytes

from .responses import http_error

if TYPE_CHECKING:
    from edda.web.asgi import Headers, Receive, Scope
import asyncio

from edda.web.options import WebOptions

from .responses import HTTPError, retry_later

_ABSOLUTE = re.compile(r"https?://[^/]*", re.IGNORECASE)
# Only this spelling is taken for a token: what would be taken is then also what is cut out of the logs.
_QUERY_TOKEN = re.compile(rb"(^|&)access_token=([^&]*)")


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Below the place where the app is mounted."""
    headers: Headers
    client: str | None
    """None for a client on a Unix socket."""
    query_token: bytes | None = field(repr=False)
    receive: Receive
    root: str = ""
    """Where the app is mounted: in front of every link to a page of ours."""
    raw_path: str = ""
    """As `path`, still percent-encoded."""
    query: bytes = b""
    """Without a token that was in it."""
    secure: bool = False
    """Came by https."""

    @property
    def base(self) -> str:
        """The address of our first page, without the slash at its end: what every link begins with."""
        return f"{quote(self.root)}/_edda"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the path: a slash that is within one came percent-encoded."""
        return tuple(unquote(part) for part in self.raw_path.split("/")[1:])

    def header(self, name: bytes) -> bytes | None:
        """For headers that may come once; twice is how requests are smuggled past a proxy."""
        found = [value for key, value in self.headers if key == name]
        if len(found) > 1:
            raise http_error(400, f"the header {name.decode()} came {len(found)} times")
        return found[0] if found else None

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
    """Where the app is mounted; the second is for a Starlette whose own place a proxy cut off the path."""
    root: str = scope.get("root_path", "").rstrip("/")
    return root, root.removeprefix(scope.get("app_root_path", "").rstrip("/"))


def _path_below(roots: tuple[str, ...], path: str) -> str:
    """Servers differ in whether the path has the place of mounting in front, and in how they show a full address."""
    path = _ABSOLUTE.sub("", path, count=1) or "/"
    for root in roots:
        if root and (path == root or path.startswith(root + "/")):
            return path[len(root) :] or "/"
    return path


def _raw_path(scope: Scope, path: str) -> str:
    """Not every server has it, and some cut less off it than off the path: what does not fit the path is not used."""
    sent: bytes = scope.get("raw_path") or b""
    raw = sent.partition(b"?")[0].decode("latin-1")
    raw = _path_below(tuple(quote(root) for root in _roots(scope)), raw)
    return raw if unquote(raw) == path else quote(path)


def _take_query_token(scope: Scope) -> bytes | None:
    """Servers write their logs from the scope, after the answer: the token is gone by then."""
    query: bytes = scope.get("query_string", b"")
    found = _QUERY_TOKEN.search(query)
    if found is None:
        return None
    scope["query_string"] = _QUERY_TOKEN.sub(rb"\1access_token=***", query)
    return unquote_to_bytes(found[2])


_ENCODINGS = frozenset({b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress"})
_HEAD_START = 5.0
"""Seconds before the rate counts: a slow start is no slow body."""


class DisconnectedError(Exception):
    """Nobody is there to be answered."""


class BodyReader:
    """Reads bodies and keeps account of the memory that they hold together."""

    def __init__(self, options: WebOptions) -> None:
        self._options = options
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """What was read is held until `release`."""
        _check_encoding(request)
        self._check_declared(request)
        body = bytearray()
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(begun + self._seconds_for(0)) as limit:
                while await self._read_more(request, body):
                    limit.reschedule(begun + self._seconds_for(len(body)))
        except BaseException as error:
            self.release(len(body))
            if isinstance(error, TimeoutError):
                raise _too_slow() from None
            raise
        return bytes(body)

    def release(self, size: int) -> None:
        self._held -= size

    async def _read_more(self, request: Request, body: bytearray) -> bool:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        chunk = message.get("body", b"")
        more = bool(message.get("more_body", False))
        if chunk:
            self._check_size(len(body) + len(chunk))
            self._hold(len(chunk))
            body += chunk
        elif more:
            await asyncio.sleep(0)  # a server that has nothing and says so without waiting must not stop the others
        return more

    def _check_declared(self, request: Request) -> None:
        declared = request.header(b"content-length")
        if declared is None:
            return
        if not declared.isdigit():
            raise http_error(400, "Content-Length is not a number")
        # Python refuses to read numbers of thousands of digits: whatever has so many is too large in any case.
        self._check_size(int(declared[:30]))

    def _check_size(self, size: int) -> None:
        if size > self._options.max_body:
            raise http_error(413, f"the body is larger than {self._options.max_body} bytes (max_body)")

    def _hold(self, size: int) -> None:
        if self._held + size > self._options.max_buffered:
            raise HTTPError(retry_later(503, "too many large requests at once", self._options.retry_after))
        self._held += size

    def _seconds_for(self, size: int) -> float:
        return min(self._options.body_timeout, _HEAD_START + size / self._options.min_rate)


def _check_encoding(request: Request) -> None:
    encoding = request.header(b"content-encoding")
    name = b"identity" if encoding is None else encoding.strip().lower()
    if name != b"identity":
        # Decoded, a small body may be of any size, and a signature is of the bytes as they came.
        told = f" {name.decode()}" if name in _ENCODINGS else ""
        error = f"the Content-Encoding{told} is not taken here: send the body as it is"
        raise http_error(415, error, headers={"Accept-Encoding": "identity"})


def _too_slow() -> HTTPError:
    return http_error(408, "the body came too slowly", headers={"Connection": "close"})
