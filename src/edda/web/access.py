"""Access to the endpoints: client address, Host and Origin; bearer tokens; login with a token; and who the caller is.

After a login a cookie stands for the token, below `/_edda` and for twelve hours. The server stores no sessions. The
cookie is `name.expires.mac`; the key of the MAC is derived from the token's hash, so removing the token ends its
sessions, and the cookie does not reveal the token.

A browser sends the cookie with requests that another site's page makes, and such a page can also reach this machine.
Therefore a request below `/_edda` that changes something must come from a page of ours, or carry a token in a header.
"""

from __future__ import annotations

import hmac
import re
import time
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from urllib.parse import parse_qs, quote, unquote

from edda.web.options import WebOptions
from edda.web.request import Request
from edda.web.responses import HTTPError, Response, http_error, redirect, retry_later
from edda.web.tokens import Token, TokenScope, match_token

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/\s]+)(?::[0-9]{1,5})?")
_MAX_HOST_LENGTH = 255
_AUTH_HINT = 'set tokens (EddaApp(tokens=...) or EDDA_TOKENS), or auth="none" to serve every client'


class AccessPolicy:
    def __init__(self, options: WebOptions) -> None:
        self._options = options
        self._is_local_only = options.local_only

    def check_host(self, request: Request) -> None:
        """The client's address, if only this machine is served, and the Host header."""
        allowed, is_local = self._options.allowed_hosts, self._is_local_only
        if is_local:
            _check_loopback(request)
        elif not allowed:
            return
        name = host_name(request.header(b"host") or b"")
        if name is None or not (is_loopback_name(name) or matches_host(name, allowed)):
            hint = f", {_AUTH_HINT}" if is_local else ""
            raise http_error(403, f"this Host is not allowed: add it to allowed_hosts{hint}")

    def check_local_origin(self, request: Request) -> None:
        self.check_host(request)
        if not self._options.tokens:  # a browser never sends a token by itself
            _check_origin(request)

    def check_scope(self, request: Request, scope: TokenScope) -> None:
        check_writable(self._options, scope)
        if self._options.tokens:
            check_has_scope(self.find_token(request).scopes, scope)

    def find_token(self, request: Request) -> Token:
        token = match_token(self._options.tokens, self._presented(request))
        if token is None:
            raise unauthorized("unknown token")
        return token

    def check_probe_access(self, request: Request) -> None:
        """Probes send no token and an arbitrary Host: they are checked only while no tokens are set."""
        if self._is_local_only:
            self.check_host(request)

    def _presented(self, request: Request) -> bytes:
        header = request.header(b"authorization")
        if header is not None and request.query_token is not None:
            raise http_error(400, "expected one token, not one in the Authorization header and one in the query")
        if header is not None:
            scheme, _, token = header.partition(b" ")
            if scheme.lower() != b"bearer" or not token.strip():
                raise unauthorized("expected Authorization: Bearer <token>")
            return token.strip()
        if request.query_token is None:
            raise unauthorized("a token is required: Authorization: Bearer <token>")
        if not self._options.query_token:
            error = "tokens in the query are disabled (query_token=False): use Authorization: Bearer <token>"
            raise unauthorized(error)
        return request.query_token


def check_writable(options: WebOptions, scope: TokenScope) -> None:
    if options.read_only and scope is not TokenScope.VIEW:
        raise http_error(403, f"this server is read-only (read_only): the scope {scope.value!r} is disabled")


def check_has_scope(scopes: frozenset[TokenScope], scope: TokenScope) -> None:
    if scope not in scopes:
        raise http_error(403, f"the token lacks the scope {scope.value!r}")


def unauthorized(error: str) -> HTTPError:
    return http_error(HTTPStatus.UNAUTHORIZED, error, headers={"WWW-Authenticate": "Bearer"})


# The client's machine and the Host header


def _check_loopback(request: Request) -> None:
    is_local = request.client is None or is_loopback_address(request.client)
    if not is_local or request.has(*_FORWARDED):
        raise http_error(403, f"only clients on this machine are served: {_AUTH_HINT}")


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


def host_name(host: bytes) -> str | None:
    """The name in a Host header without its port; None if the header is malformed."""
    return None if len(host) > _MAX_HOST_LENGTH else _host_name(host)


@lru_cache(maxsize=1024)
def _host_name(host: bytes) -> str | None:
    found = _HOST.fullmatch(host.decode("latin-1"))
    return None if found is None else found[1].strip("[]").rstrip(".").lower()


def matches_host(name: str, patterns: tuple[str, ...]) -> bool:
    """`*.shop.example` matches every name below it, `*` every name."""
    return any(
        pattern in {"*", name} or (pattern.startswith("*.") and name.endswith(pattern[1:]))
        for pattern in map(str.lower, patterns)
    )


# The origin of a browser's request


def _check_origin(request: Request) -> None:
    """Browsers state the origin of a request. A request without one is not from a browser, and so not from a page that
    a user was lured to."""
    if request.method in SAFE_METHODS:
        return
    site, origin = request.header(b"sec-fetch-site"), origin_of(request)
    if site is None and origin is None:
        return
    same = site in {b"same-origin", b"none"} if site is not None else is_same_origin(origin or b"", request)
    if not same:
        raise http_error(403, "a page of another origin may not send this request")


def origin_of(request: Request) -> bytes | None:
    """The Origin, else the Referer; None if the request has neither, as that of a program."""
    origin = request.header(b"origin")
    return request.header(b"referer") if origin is None else origin


def is_same_origin(origin: bytes, request: Request) -> bool:
    """Compares the host of an Origin or Referer with the Host header."""
    _, separator, rest = origin.partition(b"://")
    host = re.split(rb"[/?#]", rest, maxsplit=1)[0]
    return bool(separator) and host.lower() == (request.header(b"host") or b"").lower()


COOKIE = "edda_session"
SECONDS = 12 * 3600
MAX_FAILURES = 10
"""Wrong tokens per minute, of all clients together; further ones get 429."""
_MAX_FIELDS = 10
_PURPOSE = b"edda session 1"
_DOTS = re.compile(r"\.{1,2}")


class LoginSessions:
    def __init__(self, options: WebOptions, now: Callable[[], float] = time.time) -> None:
        self._tokens = options.tokens
        self._throttle = LoginThrottle()
        self._now = now

    def find(self, request: Request) -> Token | None:
        """The token that the cookie stands for, with the scopes that it has now."""
        for header, value in request.headers:
            for pair in value.decode("latin-1").split(";") if header == b"cookie" else ():
                name, _, text = pair.strip().partition("=")
                if name == COOKIE and (token := self._verify(text)):
                    return token
        return None

    def log_in(self, request: Request, body: bytes) -> Response:
        """Handles the form with `token` and `next`; redirects to the form again if the token is unknown."""
        try:
            form = parse_qs(body.decode("latin-1"), encoding="utf-8", errors="replace", max_num_fields=_MAX_FIELDS)
        except ValueError:
            raise http_error(400, f"expected a form of at most {_MAX_FIELDS} fields: token and next") from None
        target = own_path(request, form.get("next", [""])[0])
        if not self._tokens:
            return redirect(target)
        token = match_token(self._tokens, form.get("token", [""])[0].strip().encode())
        if token is None:
            self._throttle.add(self._now())
            return redirect(f"{request.base}/login?failed=1&next={quote(target, safe='')}")
        claim = f"{_encode_name(token)}.{int(self._now()) + SECONDS}"
        return redirect(target, self._cookie(request, f"{claim}.{_sign(token, claim)}", SECONDS))

    def log_out(self, request: Request) -> Response:
        return redirect(f"{request.base}/login", self._cookie(request, "", 0))

    def _verify(self, cookie: str) -> Token | None:
        claim, _, mac = cookie.rpartition(".")
        name, _, expires = claim.partition(".")
        if not (expires.isascii() and expires.isdigit() and len(expires) < 12 and int(expires) > self._now()):
            return None
        # While a secret is changed, two tokens have the same name.
        for token in self._tokens:
            if name == _encode_name(token) and hmac.compare_digest(_sign(token, claim).encode(), mac.encode()):
                return token
        return None

    def _cookie(self, request: Request, value: str, seconds: int) -> tuple[bytes, bytes]:
        secure = "; Secure" if request.secure else ""
        text = f"{COOKIE}={value}; Max-Age={seconds}; Path={request.base}; HttpOnly; SameSite=Strict{secure}"
        return b"set-cookie", text.encode("ascii")


class LoginThrottle:
    """Limits wrong tokens per minute, of all clients together.

    Not per address: behind a proxy all clients have the same one, or one that they wrote into a header themselves. A
    correct token is always accepted: with 128 random bits it cannot be guessed, so rejecting it during an attack would
    only lock its owner out.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_FAILURES)

    def add(self, now: float) -> None:
        """Raises 429 if the limit is exceeded."""
        if len(self._times) == MAX_FAILURES and now - self._times[0] < 60:
            seconds = int(60 - (now - self._times[0])) + 1
            raise HTTPError(retry_later(429, "too many wrong tokens: wait a minute", seconds))
        self._times.append(now)


def own_path(request: Request, target: str) -> str:
    """The target if it is one of our pages, else the first page: the login must not redirect to another site."""
    first = f"{request.base}/"
    path = target.partition("?")[0]
    parts = unquote(path.removeprefix(first)).replace("\\", "/").split("/")
    is_below = path.startswith(first) and not any(_DOTS.fullmatch(part) for part in parts) and "" not in parts[:-1]
    return target if is_below and target.isascii() and target.isprintable() and " " not in target else first


def _encode_name(token: Token) -> str:
    return urlsafe_b64encode(token.name.encode()).decode().rstrip("=")


def _sign(token: Token, claim: str) -> str:
    key = hmac.digest(token.digest, _PURPOSE, "sha256")
    return hmac.digest(key, claim.encode(), "sha256").hex()


@dataclass(frozen=True, slots=True)
class Principal:
    name: str
    """Of the token; the audit log has it."""
    origin: str
    """The client's address."""
    scopes: frozenset[TokenScope] = frozenset()
    """Those of the token, without those that `read_only` disables."""

    def check(self, scope: TokenScope) -> None:
        check_has_scope(self.scopes, scope)


class Authenticator:
    def __init__(self, options: WebOptions, access: AccessPolicy, sessions: LoginSessions) -> None:
        self._options = options
        self._access = access
        self._sessions = sessions
        self._anybody = "local" if options.local_only else "anybody"
        self._enabled = frozenset({TokenScope.VIEW}) if options.read_only else frozenset(TokenScope)

    def require(self, request: Request) -> Principal:
        caller = self.authenticate(request)
        if caller is None:
            raise unauthorized("a token is required: Authorization: Bearer <token>, or log in")
        return caller

    def authenticate(self, request: Request) -> Principal | None:
        """None if the request has neither a token nor a valid cookie; raises 401 for an unknown token."""
        self._access.check_host(request)
        has_token = request.query_token is not None or request.has(b"authorization")
        if self._options.tokens and has_token:
            return self._principal(request, self._access.find_token(request))
        session = self._sessions.find(request)
        check_origin(request, by_cookie=session is not None)
        if not self._options.tokens:
            return Principal(self._anybody, request.client or "unix", self._enabled)
        return None if session is None else self._principal(request, session)

    def _principal(self, request: Request, token: Token) -> Principal:
        return Principal(token.name, request.client or "unix", token.scopes & self._enabled)


def check_origin(request: Request, *, by_cookie: bool) -> None:
    """Browsers state the origin of a request; a request without one is from a program, which sends no cookie."""
    if request.method in SAFE_METHODS:
        return
    site, origin = request.header(b"sec-fetch-site"), origin_of(request)
    if site is not None:
        is_own = site == b"same-origin"
    else:  # a Referer can be suppressed by the page, an Origin cannot: a cookie counts only with an Origin
        is_own = origin is None or is_same_origin(origin, request)
        is_own = is_own and (request.has(b"origin") or not by_cookie)
    if not is_own:
        raise http_error(403, "a page of another origin may not do this: use the pages of this server")
