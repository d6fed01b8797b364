"""Who asks below `/_edda`: a program with a token, a browser with a session, or without tokens this machine.

A browser sends a session's cookie along whoever made it send a request, and it reaches this machine from every page:
what changes something has to come from a page of ours, or with a token in a header, which no page of others has.
"""

from __future__ import annotations

from dataclasses import dataclass

from edda.web.options import WebOptions
from edda.web.request import Request
from edda.web.responses import http_error

from .access import SAFE, AccessPolicy, is_own_origin, told_origin, unauthorized
from .login import LoginSessions
from .tokens import Token, TokenScope


@dataclass(frozen=True, slots=True)
class Principal:
    name: str
    """Of the token; what is done is noted under it."""
    origin: str
    """The address."""
    scopes: frozenset[TokenScope] = frozenset()
    """Of the token, less what nobody may do here."""

    def check(self, scope: TokenScope) -> None:
        if scope not in self.scopes:
            raise http_error(403, f"the token lacks the scope {scope.value!r}")


class Authenticator:
    def __init__(self, options: WebOptions, door: AccessPolicy, sessions: LoginSessions) -> None:
        self._options = options
        self._door = door
        self._sessions = sessions
        self._possible = frozenset({TokenScope.VIEW}) if options.read_only else frozenset(TokenScope)

    def require(self, request: Request) -> Principal:
        caller = self.authenticate(request)
        if caller is None:
            raise unauthorized("a token is needed: Authorization: Bearer <token>, or log in")
        return caller

    def authenticate(self, request: Request) -> Principal | None:
        """None for somebody who has shown nothing; a token that is wrong is refused."""
        self._door.check_host(request)
        if self._options.tokens and self._door.has_token(request):
            return self._caller(request, self._door.find_token(request))
        session = self._sessions.find(request)
        check_origin(request, by_cookie=session is not None)
        if not self._options.tokens:
            return Principal("local" if self._options.local_only else "anybody", _address(request), self._possible)
        return None if session is None else self._caller(request, session)

    def _caller(self, request: Request, token: Token) -> Principal:
        return Principal(token.name, _address(request), token.scopes & self._possible)


def check_origin(request: Request, *, by_cookie: bool) -> None:
    """Browsers say where a request comes from; what says nothing is no browser, and has no cookie to misuse."""
    if request.method in SAFE:
        return
    site, told = request.header(b"sec-fetch-site"), told_origin(request)
    if site is not None:
        own = site == b"same-origin"
    else:  # a Referer alone may refuse a request, but does not let a cookie in: it can be left out, and Origin cannot
        own = told is None or is_own_origin(told, request)
        own = own and (request.has(b"origin") or not by_cookie)
    if not own:
        raise http_error(403, "a page of another origin may not do this: it has to come from this server's own pages")


def _address(request: Request) -> str:
    return request.client or "unix"
