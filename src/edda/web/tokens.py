"""Bearer tokens: name, scopes and secret, and the syntax of EDDA_TOKENS.

Either `name:scopes:secret`, separated by commas, with scopes joined by `+`:

    EDDA_TOKENS="shop:events:Qm9...,ops:events+control+view:9fz..."

or JSON:

    EDDA_TOKENS='[{"name": "shop", "scopes": ["events"], "secret": "Qm9..."}]'

To change a secret without an outage, set two tokens of the same name, with the old and the new secret, for a while.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from enum import StrEnum

import msgspec

_MIN_BITS = 128
_MIN_DISTINCT = 6
"""A random secret of 128 bits has more distinct characters than this, except with negligible probability."""
_SECRET = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
_ALPHABETS = ((re.compile(r"[0-9]+"), 10), (re.compile(r"[0-9a-f]+|[0-9A-F]+"), 16), (re.compile(r".+"), 64))
_CREATE_HINT = 'create one with: python -c "import secrets; print(secrets.token_urlsafe(32))"'


class TokenScope(StrEnum):
    EVENTS = "events"
    """Send events."""
    CONTROL = "control"
    """Change runs (start, cancel, retry, resume, delete) and send events of the outbox again."""
    VIEW = "view"
    """Read everything: the pages, the control API, the metrics."""


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    scopes: frozenset[TokenScope]
    secret: InitVar[str]
    digest: bytes = field(init=False, repr=False)
    """SHA-256 of the secret, which is not kept itself."""

    def __post_init__(self, secret: str) -> None:
        if not self.name:
            raise ValueError("a token needs a name")
        if not self.scopes:
            raise ValueError(f"token {self.name!r} has no scopes: expected some of {_all_scopes()}")
        _check_secret(self.name, secret)
        object.__setattr__(self, "digest", _digest(secret.encode()))


def match_token(tokens: Iterable[Token], presented: bytes) -> Token | None:
    """Compares with every token, so that the time does not depend on the match."""
    found: Token | None = None
    digest = _digest(presented)
    for token in tokens:
        found = token if hmac.compare_digest(token.digest, digest) else found
    return found


def find_tokens(given: str | Iterable[Token] | None) -> tuple[Token, ...]:
    """The app's argument, else the environment variable EDDA_TOKENS."""
    if given is None:
        return read_tokens(os.environ.get("EDDA_TOKENS", ""))
    tokens = read_tokens(given) if isinstance(given, str) else tuple(given)
    for token in tokens:
        if not isinstance(token, Token):
            raise TypeError(f"tokens: expected Token(name, scopes, secret) or a str, not {type(token).__name__}")
    return tokens


def read_tokens(text: str) -> tuple[Token, ...]:
    text = text.strip()
    if text.startswith(("[", "{")):
        return _read_json(text)
    return tuple(_read_token(number, part.strip()) for number, part in enumerate(text.split(","), 1) if part.strip())


def _read_token(number: int, text: str) -> Token:
    name, _, rest = text.partition(":")
    scopes, separator, secret = rest.partition(":")
    if not separator:  # the text is not shown: it may be a secret
        raise ValueError(f"tokens: number {number} is not name:scope+scope:secret, such as shop:events:<secret>")
    return Token(name, _read_scopes(name, scopes.split("+")), secret)


class _TokenJSON(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    scopes: list[str]
    secret: str


def _read_json(text: str) -> tuple[Token, ...]:
    items: list[_TokenJSON] | None = None
    with suppress(msgspec.DecodeError):  # its text has the names of unknown fields, which may be secrets
        items = msgspec.json.decode(text, type=list[_TokenJSON])
    if items is None:
        raise ValueError('tokens: expected JSON like [{"name": ..., "scopes": [...], "secret": ...}]')
    return tuple(Token(one.name, _read_scopes(one.name, one.scopes), one.secret) for one in items)


def _read_scopes(name: str, scopes: Iterable[str]) -> frozenset[TokenScope]:
    given = [scope.strip() for scope in scopes]
    if not all(scope in TokenScope.__members__.values() for scope in given):
        # The given scopes are not shown: the secret may be among them by mistake.
        raise ValueError(f"token {name!r}: unknown scope; expected some of {_all_scopes()}")
    return frozenset(map(TokenScope, given))


def _check_secret(name: str, secret: str) -> None:
    if not _SECRET.fullmatch(secret):
        raise ValueError(f"token {name!r}: a secret may contain only letters, digits and -._~+/; {_CREATE_HINT}")
    alphabet = next(size for pattern, size in _ALPHABETS if pattern.fullmatch(secret))
    if len(secret) * math.log2(alphabet) < _MIN_BITS or len(set(secret)) < _MIN_DISTINCT:
        raise ValueError(f"token {name!r} can be guessed: it needs at least {_MIN_BITS} random bits; {_CREATE_HINT}")


def _all_scopes() -> str:
    return ", ".join(TokenScope)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
