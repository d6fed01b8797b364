"""Removes secrets from text, values, URLs and log lines: passwords, credentials, and values beside secret names.

`clean_logs` adds a filter to all loggers of this package, against forged log lines and credentials in logs. Ids, types,
names and error texts come from outside: a line break in them would forge a log line, escape codes would control the
terminal, and an error may repeat a password. The filter escapes and redacts the arguments of each record. Handlers and
formatters belong to the program.
"""

from __future__ import annotations

import logging
import re
import traceback
from base64 import b64encode
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from .value_path import repr_short

REDACTED = "•••"

# All repetitions are bounded, so that matching takes linear time.
# A password may contain an unencoded @: of several, the last one before the end of the host ends it.
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
"""Text that looks like a number or another JSON value."""
_TERM = re.compile(r'(?<![^\s"=])([^\s"=]+) = ("(?:[^"\\]|\\.)*?(?:"|…(?= and |$)|$)|\S+)')
"""One comparison in the text of `core.event_match.describe`, which truncates long values."""

# Names and values as they appear in error texts: name=value, "name": "value".
_NAME = r"""(["']?)([\w.-]{1,200})\2\s{0,3}[:=]\s{0,3}"""
_VALUE = rf"""(?:[\w-]+ )?{REDACTED}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&)}}\]]+"""
_PAIR = re.compile(rf"(?<![\w.-])({_NAME})({_VALUE})")
_MAX_NESTING = 20
"""Of pairs within the value of a pair. Deeper ones are hidden unchecked: `a:a:a:...` would exhaust the stack."""
MAX_DEPTH = 64
"""Of values that are searched for secret fields."""
MIN_LENGTH = 3
"""Shorter secret values are too common to be replaced everywhere in a text."""


class Redaction:
    """Decides by name which fields are secret. Names are compared without case, `_` and `-`; `card.number` is a field
    `number` in a field `card`, at any depth; `*` stands for any text within one name."""

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
        """The description of a wait, with secret values hidden; quotes are removed from text that does not look like
        a number."""
        return _TERM.sub(self._clean_term, text)

    def censor(self, text: str, known: Iterable[str] = ()) -> str:
        """An error text without credentials, values beside secret names, and the `known` secret values."""
        for value in sorted(known, key=len, reverse=True):
            text = text.replace(value, REDACTED)
        return self._censor_pairs(redact_credentials(text), 0)

    def _censor_pairs(self, text: str, depth: int) -> str:
        def censor(pair: re.Match[str]) -> str:
            if REDACTED in pair[4]:
                return pair[0]
            if self.hides(pair[3].split(".")) or depth == _MAX_NESTING:
                return f"{pair[1]}{REDACTED}"
            return f"{pair[1]}{self._censor_pairs(pair[4], depth + 1)}"  # `ValueError: password=x` is a pair in a pair

        return _PAIR.sub(censor, text)

    def _clean_term(self, term: re.Match[str]) -> str:
        path, value = term.groups()
        if self.hides(split_key(path)):
            return f"{path} = {REDACTED}"
        is_plain = len(value) > 2 and value[0] == value[-1] == '"' and "\\" not in value
        if is_plain and _LITERAL.fullmatch(value[1:-1]):  # "17" keeps its quotes: the number 17 would not match it
            is_plain = False
        return f"{path} = {value[1:-1] if is_plain else value}"


def _normal(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _fits(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if len(names) < len(pattern):
        return False
    return all(fnmatchcase(name, part) for name, part in zip(names[-len(pattern) :], pattern, strict=True))


# Secret values, which an error text may repeat without their names


def find_secrets(redaction: Redaction, value: Any) -> frozenset[str]:
    """The values as text, and as `repr` escapes them; values shorter than `MIN_LENGTH` are left out."""
    found = [text for text in _hidden(redaction, value, (), 0) if len(text) >= MIN_LENGTH]
    return frozenset((*found, *(repr(text)[1:-1] for text in found)))


def _hidden(redaction: Redaction, value: Any, path: tuple[str, ...], depth: int) -> Iterator[str]:
    if depth >= MAX_DEPTH:
        return
    if isinstance(value, dict):
        for key, item in named_items(value):
            inner = (*path, *split_key(key))
            yield from _texts(item, 0) if redaction.hides(inner) else _hidden(redaction, item, inner, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _hidden(redaction, item, path, depth + 1)


def _texts(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, dict | list | tuple | set | frozenset) and depth < MAX_DEPTH:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item, depth + 1)
    elif value is not None and not isinstance(value, bool):
        yield write_int(value) if isinstance(value, int) else write_value(value)


def split_key(key: str) -> list[str]:
    """Splits a key that is the path of a match."""
    return key.lstrip("@").split(".")


def named_items(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    return ((key if isinstance(key, str) else write_value(key), item) for key, item in value.items())


def write_value(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return b2a_base64(value, newline=False).decode()
    try:
        return str(value)
    except Exception:  # `__str__` of a user class may raise anything
        return repr_short(value)


def write_int(value: int) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses decimal texts of more than 4,300 digits
        return hex(value)


# URLs with passwords: shown in messages without them, and sent to HTTP servers in a header instead

_SCHEME = re.compile(r"\s*[\"']?\s*([A-Za-z][\w+.-]{0,30})://")


def show_url(url: str) -> str:
    """The URL for messages. The text may be malformed (in quotes, without a scheme), with a password anywhere before
    its last `@` or in its query: only what is certainly host, port and path is shown."""
    found = _SCHEME.match(url)
    scheme = "" if found is None else f"{found[1]}://"
    if "@" in url:
        location, query, _ = url.rpartition("@")[2].partition("?")
        return f"{scheme}{REDACTED}@{location}{query and '?' + REDACTED}"
    if found is None:
        return REDACTED if re.search("[:=?]", url) else url
    location, query, _ = url[found.end() :].partition("?")
    return f"{scheme}{location}{query and '?' + REDACTED}"


def split_credentials(url: str) -> tuple[str, dict[str, str]]:
    """The URL without user and password, and the `Authorization` header with them: HTTP clients log the URL."""
    parts = urlsplit(url)
    if parts.username is None and parts.password is None:
        return url, {}
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return plain, {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


# Log lines

# Control characters, those that change the direction of text, Unicode line breaks, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))

_redaction = Redaction()
_secret_names: frozenset[str] = frozenset()


def clean_logs(redact: Iterable[str] = ()) -> None:
    """Add the filter to all existing loggers of this package; call it again after further imports. A filter on the
    parent logger would not do: it does not see records of child loggers.

    `redact` are further names of secret fields. They apply to the whole process, since its apps share one log."""
    global _redaction, _secret_names
    if not _secret_names.issuperset(redact):
        _secret_names = _secret_names.union(redact)
        _redaction = Redaction(sorted(_secret_names))
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "edda" and isinstance(logger, logging.Logger) and _cleaner not in logger.filters:
            logger.addFilter(_cleaner)


def hides(path: str) -> bool:
    """Whether the path of a match, such as `card.number` or `@token`, is a secret field in this process."""
    return _redaction.hides(split_key(path))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def clean_text(text: str) -> str:
    """The text without credentials, with control characters escaped: a line break becomes `\\n`."""
    return _UNSAFE.sub(_escape, _redaction.censor(text))


def censor(text: str, known: Iterable[str] = ()) -> str:
    """The text without credentials, values beside secret names, and the `known` secret values."""
    return _redaction.censor(text, known)


def secrets_in(value: Any) -> frozenset[str]:
    """The values of its secret fields."""
    return find_secrets(_redaction, value)


class _Cleaner(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_clean, record.args))
        elif isinstance(record.args, dict):
            record.args = {name: _clean(value) for name, value in record.args.items()}
        if record.exc_info and not record.exc_text:  # formatters use an existing text
            record.exc_text = _clean_traceback(record.exc_info)
        return True


def _clean(value: Any) -> Any:
    """Numbers stay numbers, for `%d`; all other arguments become cleaned text."""
    if value is None or isinstance(value, int | float):
        return value
    return _Text(value)


class _Text:
    """Cleans a value when a handler formats it: most records are below the level of all handlers."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return clean_text(str(self._value))

    def __repr__(self) -> str:
        return clean_text(repr(self._value))


def _clean_traceback(exc_info: Any) -> str:
    """Indented, so that a line of a message cannot be mistaken for a log line."""
    text = "".join(traceback.format_exception(*exc_info)).rstrip("\n")
    return "\n".join(f"  {_UNSAFE_IN_LINES.sub(_escape, line)}" for line in _redaction.censor(text).split("\n"))


_cleaner = _Cleaner()
