"""Removing secrets: passwords in URLs, credentials in texts, values under secret names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

REDACTED = "•••"

# Bounded, so that no text takes long to look through.
# A password may have an @ in it that was not encoded: of several the last one before the end of the host counts.
_URL = re.compile(
    r"(?<![\w+.-])([a-zA-Z][\w+.-]{0,30}://[^\s:/@]{0,200}:)[^\s@]{1,1000}(?:@[^\s@/\"'<>,;]{1,200}){0,5}(?=@)"
)
_QUERY = re.compile(r"(?i)([?&][\w-]{0,40}(?:password|passwd|secret|token|api_?key)=)[^&\s\"'#]{1,1000}")
_CREDENTIALS = re.compile(
    r"(?i)(?<!\w)(bearer\s+|authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[\w-]{1,30}\s{1,3})?)[^\s\"',;}]{6,}"
)


def redact_credentials(text: str) -> str:
    if "://" in text:
        text = _QUERY.sub(rf"\1{REDACTED}", _URL.sub(rf"\1{REDACTED}", text))
    return _CREDENTIALS.sub(rf"\1{REDACTED}", text)


USUAL = (
    "*password",
    "*passwd",
    "*secret",
    "*token",
    "*authorization",
    "*apikey",
    "*cardnumber",
    "*privatekey",
    "*credentials",
    "cookie",
    "setcookie",
    "cvc",
    "cvv",
)

_LITERAL = re.compile(r"-?[0-9][0-9.eE+-]*|true|false|null")
"""Text that would read as a number or as another value of JSON."""
_TERM = re.compile(r'(?<![^\s"=])([^\s"=]+) = ("(?:[^"\\]|\\.)*?(?:"|…(?= and |$)|$)|\S+)')
"""One comparison of a wait in words, as `core.match.describe` writes it; a long value is cut there."""

# As people and libraries write them into the texts of errors.
_NAME = r"""(["']?)([\w.-]{1,200})\2\s{0,3}[:=]\s{0,3}"""
_VALUE = rf"""(?:[\w-]+ )?{REDACTED}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&)}}\]]+"""
_PAIR = re.compile(rf"(?<![\w.-])({_NAME})({_VALUE})")
_MAX_NESTING = 20
"""Of pairs within the value of a pair. Deeper ones are hidden unseen: `a:a:a:` and so on takes the whole stack."""
SHORTEST = 3
"""Shorter values are too common to be hidden wherever they stand."""


class Redaction:
    """Names are compared without regard to case, `_` and `-`. `card.number` is the field of a field, wherever that
    is; `*` stands for any text within one name."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._patterns = tuple(tuple(map(_normal, name.split("."))) for name in (*USUAL, *names))
        self._hides = lru_cache(maxsize=4096)(self._look)

    def hides(self, path: Sequence[str]) -> bool:
        """Whether the field at the end of this path is secret."""
        return self._hides(tuple(path))

    def _look(self, path: tuple[str, ...]) -> bool:
        names = tuple(map(_normal, path))
        return any(_fits(names, pattern) for pattern in self._patterns)

    def clean(self, text: str) -> str:
        """What a run waits for in words: secrets are hidden, and text needs no quotes unless it reads as a
        number."""
        return _TERM.sub(self._clean_term, text)

    def censor(self, text: str, known: Iterable[str] = ()) -> str:
        """The text of an error: without credentials, what stands beside the name of a secret, and these values."""
        for value in sorted(known, key=len, reverse=True):
            text = text.replace(value, REDACTED)
        return self._censor_pairs(redact_credentials(text), 0)

    def _censor_pairs(self, text: str, depth: int) -> str:
        return _PAIR.sub(lambda pair: self._censor_pair(pair, depth), text)

    def _censor_pair(self, pair: re.Match[str], depth: int) -> str:
        if REDACTED in pair[4]:
            return pair[0]
        if self.hides(pair[3].split(".")) or depth == _MAX_NESTING:
            return f"{pair[1]}{REDACTED}"
        return f"{pair[1]}{self._censor_pairs(pair[4], depth + 1)}"  # `ValueError: password=x`: one is in the other

    def _clean_term(self, term: re.Match[str]) -> str:
        path, value = term.groups()
        if self.hides(path.lstrip("@").split(".")):
            return f"{path} = {REDACTED}"
        is_plain = len(value) > 2 and value[0] == value[-1] == '"' and "\\" not in value
        if is_plain and _LITERAL.fullmatch(value[1:-1]):  # "17" is text, and an event with the number 17 does not match
            is_plain = False
        return f"{path} = {value[1:-1] if is_plain else value}"


def _normal(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _fits(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if len(names) < len(pattern):
        return False
    return all(fnmatchcase(name, part) for name, part in zip(names[-len(pattern) :], pattern, strict=True))
