"""One request, as far as it is known before its body."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, unquote_to_bytes

from edda.web.answers import http_error

if TYPE_CHECKING:
    from edda.web.asgi import Headers, Receive, Scope

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
