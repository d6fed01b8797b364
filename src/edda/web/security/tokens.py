"""Bearer tokens: their names, what each may do, and how they are written in EDDA_TOKENS.

Either `name:scopes:secret`, several of them separated by commas, the scopes joined by `+`:

    EDDA_TOKENS="shop:events:Qm9...,ops:events+control+view:9fz..."

or JSON:

    EDDA_TOKENS='[{"name": "shop", "scopes": ["events"], "secret": "Qm9..."}]'

A secret is changed without a gap by having the old and the new one side by side for a while.
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

_LEAST_BITS = 128
_LEAST_DIFFERENT = 6
"""A random secret of that strength has more different characters than this, all but surely."""
_SECRET = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
_ALPHABETS = ((re.compile(r"[0-9]+"), 10), (re.compile(r"[0-9a-f]+|[0-9A-F]+"), 16), (re.compile(r".+"), 64))
_MAKE_ONE = 'make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"'


class TokenScope(StrEnum):
    EVENTS = "events"
    """Send events."""
    CONTROL = "control"
    """Change runs: start, cancel, retry, resume and delete them; send what is in the outbox again."""
    VIEW = "view"
    """Look at runs and at everything else: the pages, the control API, the metrics."""


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    scopes: frozenset[TokenScope]
    secret: InitVar[str]
    digest: bytes = field(init=False, repr=False)
    """All that is kept of the secret."""

    def __post_init__(self, secret: str) -> None:
        if not self.name:
            raise ValueError("a token needs a name")
        if not self.scopes:
            raise ValueError(f"token {self.name!r} has no scopes: expected some of {_all_scopes()}")
        _check_secret(self.name, secret)
        object.__setattr__(self, "digest", _digest(secret.encode()))


class TokenStore:
    """Knows tokens by their hashes."""

    def __init__(self, tokens: Iterable[Token]) -> None:
        self._tokens = tuple(tokens)

    def find(self, presented: bytes) -> Token | None:
        """Takes the same time wherever in the ring it is, or if it is not."""
        found: Token | None = None
        digest = _digest(presented)
        for token in self._tokens:
            found = token if hmac.compare_digest(token.digest, digest) else found
        return found

    def scopes_of(self, presented: bytes) -> frozenset[TokenScope]:
        """Empty for a token that is not known."""
        token = self.find(presented)
        return frozenset() if token is None else token.scopes


def find_tokens(given: str | Iterable[Token] | None) -> tuple[Token, ...]:
    """What the app was given, else what EDDA_TOKENS says."""
    if given is None:
        return read_tokens(os.environ.get("EDDA_TOKENS", ""))
    tokens = read_tokens(given) if isinstance(given, str) else tuple(given)
    for token in tokens:
        if not isinstance(token, Token):
            raise TypeError(f"tokens: expected Token(name, scopes, secret) or a text, not {type(token).__name__}")
    return tokens


def read_tokens(text: str) -> tuple[Token, ...]:
    text = text.strip()
    if text.startswith(("[", "{")):
        return _read_json(text)
    return tuple(_read_token(number, part.strip()) for number, part in enumerate(text.split(","), 1) if part.strip())


def _read_token(number: int, text: str) -> Token:
    name, _, rest = text.partition(":")
    scopes, separator, secret = rest.partition(":")
    if not separator:  # the text is not shown: it may be nothing but a secret
        raise ValueError(f"tokens: number {number} is not name:scope+scope:secret, such as shop:events:<secret>")
    return Token(name, _read_scopes(name, scopes.split("+")), secret)


class _TokenJSON(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    scopes: list[str]
    secret: str


def _read_json(text: str) -> tuple[Token, ...]:
    written: list[_TokenJSON] | None = None
    with suppress(msgspec.DecodeError):  # whose text has the names of unknown fields, which may be secrets
        written = msgspec.json.decode(text, type=list[_TokenJSON])
    if written is None:
        raise ValueError('tokens: expected JSON like [{"name": ..., "scopes": [...], "secret": ...}]')
    return tuple(Token(one.name, _read_scopes(one.name, one.scopes), one.secret) for one in written)


def _read_scopes(name: str, scopes: Iterable[str]) -> frozenset[TokenScope]:
    given = [scope.strip() for scope in scopes]
    if not all(scope in TokenScope.__members__.values() for scope in given):
        # What was given is not shown: the secret may stand in its place.
        raise ValueError(f"token {name!r}: a scope is not known; expected some of {_all_scopes()}")
    return frozenset(map(TokenScope, given))


def _check_secret(name: str, secret: str) -> None:
    if not _SECRET.fullmatch(secret):
        raise ValueError(f"token {name!r}: a secret has only letters, digits and -._~+/; {_MAKE_ONE}")
    alphabet = next(size for pattern, size in _ALPHABETS if pattern.fullmatch(secret))
    if len(secret) * math.log2(alphabet) < _LEAST_BITS or len(set(secret)) < _LEAST_DIFFERENT:
        raise ValueError(f"token {name!r} can be guessed: it needs at least {_LEAST_BITS} random bits; {_MAKE_ONE}")


def _all_scopes() -> str:
    return ", ".join(TokenScope)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
