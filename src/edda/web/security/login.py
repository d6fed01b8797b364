"""Logging in with a token: from then on a cookie speaks for it, below `/_edda` and for half a day.

Nothing is stored. The cookie is `name.expires.mac`, under a key made of the token's hash: whoever takes the token away
ends its sessions, and the token itself cannot be found from them.
"""

from __future__ import annotations

import hmac
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import deque
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, quote, unquote

from edda.web.options import WebOptions
from edda.web.request import Request
from edda.web.responses import HTTPError, Response, http_error, redirect, retry_later

from .tokens import Token, TokenStore

COOKIE = "edda_session"
SECONDS = 12 * 3600
MOST_FAILURES = 10
"""Of all clients together, within a minute; further wrong tokens are answered 429."""
_MOST_FIELDS = 10
_PURPOSE = b"edda session 1"
_DOTS = re.compile(r"\.{1,2}")


class LoginSessions:
    def __init__(self, options: WebOptions, now: Callable[[], float] = time.time) -> None:
        self._tokens = options.tokens
        self._keyring = TokenStore(options.tokens)
        self._failures = LoginThrottle()
        self._now = now

    def find(self, request: Request) -> Token | None:
        """The token that a cookie of ours speaks for; scopes are those that it has now."""
        return next((token for cookie in _cookies(request) if (token := self._read(cookie))), None)

    def log_in(self, request: Request, body: bytes) -> Response:
        """What a form with `token` and `next` is answered: back to the form if the token is not known."""
        form = _read_form(body)
        wanted = own_path(request, form.get("next", [""])[0])
        if not self._tokens:
            return redirect(wanted)
        token = self._keyring.find(form.get("token", [""])[0].strip().encode())
        if token is None:
            self._failures.add(self._now())
            return redirect(f"{request.base}/login?failed=1&next={quote(wanted, safe='')}")
        return redirect(wanted, self._cookie(request, self._write(token), SECONDS))

    def log_out(self, request: Request) -> Response:
        return redirect(f"{request.base}/login", self._cookie(request, "", 0))

    def _write(self, token: Token) -> str:
        name = urlsafe_b64encode(token.name.encode()).decode().rstrip("=")
        claim = f"{name}.{int(self._now()) + SECONDS}"
        return f"{claim}.{_sign(token, claim)}"

    def _read(self, cookie: str) -> Token | None:
        claim, _, mac = cookie.rpartition(".")
        name, _, expires = claim.partition(".")
        if not (expires.isascii() and expires.isdigit() and len(expires) < 12 and int(expires) > self._now()):
            return None
        # The old and the new secret of a token may stand side by side under one name.
        return next((token for token in self._tokens if _is_named(token, name) and _fits(token, claim, mac)), None)

    def _cookie(self, request: Request, value: str, seconds: int) -> tuple[bytes, bytes]:
        secure = "; Secure" if request.secure else ""
        text = f"{COOKIE}={value}; Max-Age={seconds}; Path={request.base}; HttpOnly; SameSite=Strict{secure}"
        return b"set-cookie", text.encode("ascii")


class LoginThrottle:
    """Wrong tokens of the last minute, from wherever they came.

    Not by address: behind a proxy it is one for everybody, or what the sender wrote into a header. And the right token
    is let in whatever others try: with 128 bits it is not found by trying, so keeping it out would only keep its owner
    out.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MOST_FAILURES)

    def add(self, now: float) -> None:
        """Raises `RefusedError` for one too many."""
        if len(self._times) == MOST_FAILURES and now - self._times[0] < 60:
            seconds = int(60 - (now - self._times[0])) + 1
            raise HTTPError(retry_later(429, "too many wrong tokens were tried here: wait a minute", seconds))
        self._times.append(now)


def _read_form(body: bytes) -> dict[str, list[str]]:
    try:
        return parse_qs(body.decode("latin-1"), encoding="utf-8", errors="replace", max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise http_error(400, f"expected a form of at most {_MOST_FIELDS} fields: token and next") from None


def own_path(request: Request, wanted: str) -> str:
    """The path if it is one of our pages, else the first page: nobody is sent elsewhere from here."""
    first = f"{request.base}/"
    path = wanted.partition("?")[0]
    parts = unquote(path.removeprefix(first)).replace("\\", "/").split("/")
    is_below = path.startswith(first) and not any(_DOTS.fullmatch(part) for part in parts) and "" not in parts[:-1]
    return wanted if is_below and wanted.isascii() and wanted.isprintable() and " " not in wanted else first


def _cookies(request: Request) -> Iterator[str]:
    for header, value in request.headers:
        if header == b"cookie":
            for pair in value.decode("latin-1").split(";"):
                name, _, text = pair.strip().partition("=")
                if name == COOKIE:
                    yield text


def _is_named(token: Token, written: str) -> bool:
    try:
        return urlsafe_b64decode(written + "=" * (-len(written) % 4)) == token.name.encode()
    except ValueError:
        return False


def _fits(token: Token, claim: str, mac: str) -> bool:
    return hmac.compare_digest(_sign(token, claim).encode(), mac.encode())


def _sign(token: Token, claim: str) -> str:
    key = hmac.digest(token.digest, _PURPOSE, "sha256")
    return hmac.digest(key, claim.encode(), "sha256").hex()
