"""Who may send what from where: hosts, origins, forwarded addresses, read-only servers."""

from __future__ import annotations

import re
from functools import lru_cache
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address

from edda.web.options import WebOptions
from edda.web.request import Request
from edda.web.responses import HTTPError, http_error

from .tokens import Token, TokenScope, TokenStore

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/\s]+)(?::[0-9]{1,5})?")
_LONGEST = 255


@lru_cache(maxsize=1024)
def is_loopback_address(text: str) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_name(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost") or is_loopback_address(name)


def name_of(host: bytes) -> str | None:
    """The name in a Host header, without its port; None for what is no host."""
    if len(host) > _LONGEST:
        return None
    return _name_of(host)


@lru_cache(maxsize=1024)
def _name_of(host: bytes) -> str | None:
    found = _HOST.fullmatch(host.decode("latin-1"))
    return None if found is None else found[1].strip("[]").rstrip(".").lower()


def fits(name: str, patterns: tuple[str, ...]) -> bool:
    """`*.shop.example` fits every name below it, `*` every name."""
    return any(
        pattern in {"*", name} or (pattern.startswith("*.") and name.endswith(pattern[1:]))
        for pattern in map(str.lower, patterns)
    )


_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_SETTINGS = 'give tokens (EddaApp(tokens=...) or EDDA_TOKENS), or auth="none" to serve everybody'


class AccessPolicy:
    def __init__(self, options: WebOptions) -> None:
        self._options = options
        self._keyring = TokenStore(options.tokens)

    def check_host(self, request: Request) -> None:
        """Where it came from, and what it takes this server for."""
        if self._options.local_only:
            _check_machine(request)
        self._check_host(request)

    def check_local_origin(self, request: Request) -> None:
        self.check_host(request)
        if not self._options.tokens:  # a token is never sent by a browser on its own
            _check_origin(request)

    def check_scope(self, request: Request, scope: TokenScope) -> None:
        check_writable(self._options, scope)
        if not self._options.tokens:
            return
        if scope not in self.find_token(request).scopes:
            raise http_error(403, f"the token lacks the scope {scope.value!r}")

    def has_token(self, request: Request) -> bool:
        return request.query_token is not None or request.has(b"authorization")

    def find_token(self, request: Request) -> Token:
        token = self._keyring.find(self._presented(request))
        if token is None:
            raise unauthorized("the token is not known here")
        return token

    def check_probe_access(self, request: Request) -> None:
        """Probes know neither tokens nor names; still, only this machine is served before any were given."""
        if self._options.local_only:
            _check_machine(request)
            self._check_host(request)

    def _check_host(self, request: Request) -> None:
        allowed = self._options.allowed_hosts
        if not allowed and not self._options.local_only:
            return
        name = name_of(request.header(b"host") or b"")
        if name is None or not (is_loopback_name(name) or fits(name, allowed)):
            raise http_error(403, f"this Host is not served: name it in allowed_hosts{self._auth_hint()}")

    def _auth_hint(self) -> str:
        return f", {_SETTINGS}" if self._options.local_only else ""

    def _presented(self, request: Request) -> bytes:
        header = request.header(b"authorization")
        if header is not None and request.query_token is not None:
            raise http_error(400, "a token came in the Authorization header and in the query: expected one")
        if header is not None:
            return _bearer(header)
        if request.query_token is None:
            raise unauthorized("a token is needed: Authorization: Bearer <token>")
        if not self._options.query_token:
            raise unauthorized("tokens in the query are off (query_token=False): use Authorization: Bearer <token>")
        return request.query_token


def check_writable(options: WebOptions, scope: TokenScope) -> None:
    if options.read_only and scope is not TokenScope.VIEW:
        raise http_error(403, f"this server is for looking only (read_only): nobody has the scope {scope.value!r}")


def _check_machine(request: Request) -> None:
    here = request.client is None or is_loopback_address(request.client)
    if not here or request.has(*_FORWARDED):
        raise http_error(403, f"only this machine is served: {_SETTINGS}")


def _check_origin(request: Request) -> None:
    """Browsers say where a request comes from; everything else is no page that somebody was lured to."""
    if request.method in SAFE:
        return
    site, told = request.header(b"sec-fetch-site"), told_origin(request)
    if site is None and told is None:
        return
    same = site in {b"same-origin", b"none"} if site is not None else is_own_origin(told or b"", request)
    if not same:
        raise http_error(403, "a page of another origin may not send this")


def told_origin(request: Request) -> bytes | None:
    """The Origin, else the Referer, which says more; None if the request has neither, as those of programs."""
    origin = request.header(b"origin")
    return request.header(b"referer") if origin is None else origin


def is_own_origin(origin: bytes, request: Request) -> bool:
    """Of an Origin or a Referer."""
    _, separator, rest = origin.partition(b"://")
    host = re.split(rb"[/?#]", rest, maxsplit=1)[0]
    return bool(separator) and host.lower() == (request.header(b"host") or b"").lower()


def _bearer(header: bytes) -> bytes:
    scheme, _, token = header.partition(b" ")
    if scheme.lower() != b"bearer" or not token.strip():
        raise unauthorized("expected Authorization: Bearer <token>")
    return token.strip()


def unauthorized(error: str) -> HTTPError:
    return http_error(HTTPStatus.UNAUTHORIZED, error, headers={"WWW-Authenticate": "Bearer"})
