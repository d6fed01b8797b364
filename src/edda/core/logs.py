"""Log lines that cannot be forged and show no credentials.

Ids, types, sources, names and the texts of errors come from outside. In a log line one with a line break begins a line
of its own, one with escape codes moves the cursor of a terminal, and an error may repeat a password. A filter on every
logger of this package cleans what is put into a line. Handlers and formatters are the program's own.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterable
from typing import Any

from .redact import Redaction
from .secrets import find_secrets

# Control characters, those that change the direction of a text, and the two line breaks of Unicode.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))


_redaction = Redaction()
_hidden: frozenset[str] = frozenset()


def clean_logs(redact: Iterable[str] = ()) -> None:
    """Put the filter on all loggers of this package that there are; those of modules that are imported later need it
    again. A filter of the logger above them would not do: it sees only what is logged there.

    `redact` are names of fields that are secret besides the usual ones; a process has one log, so those of all its apps
    count."""
    global _redaction, _hidden
    if not _hidden.issuperset(redact):
        _hidden = _hidden.union(redact)
        _redaction = Redaction(sorted(_hidden))
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "edda" and isinstance(logger, logging.Logger) and _cleaner not in logger.filters:
            logger.addFilter(_cleaner)


def hides(path: str) -> bool:
    """Whether the field at this path of a match, such as `card.number` or `@token`, is secret in this process."""
    return _redaction.hides(path.lstrip("@").split("."))


def clean_text(text: str) -> str:
    """In one line, without escape codes and credentials: `\\n` stands for a line break."""
    return _UNSAFE.sub(_escape, _redaction.censor(text))


def censor(text: str, known: Iterable[str] = ()) -> str:
    """Without credentials, what stands beside the name of a secret, and these values."""
    return _redaction.censor(text, known)


def secrets_in(value: Any) -> frozenset[str]:
    """The values of the fields in it that are secret in this process."""
    return find_secrets(_redaction, value)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class _Cleaner(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_clean, record.args))
        elif isinstance(record.args, dict):
            record.args = {name: _clean(value) for name, value in record.args.items()}
        if record.exc_info and not record.exc_text:  # formatters take the text that is there
            record.exc_text = _clean_traceback(record.exc_info)
        return True


def _clean(value: Any) -> Any:
    """Numbers stay numbers, for `%d`; everything else is put into the line as its text, which is cleaned."""
    if value is None or isinstance(value, int | float):
        return value
    return _Text(value)


class _Text:
    """A value that is cleaned when it is written, if it is: most lines are below the level of every handler."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return clean_text(str(self._value))

    def __repr__(self) -> str:
        return clean_text(repr(self._value))


def _clean_traceback(exc_info: Any) -> str:
    """Indented, so that no line of a message can be taken for a line of the log."""
    text = "".join(traceback.format_exception(*exc_info)).rstrip("\n")
    return "\n".join(f"  {_UNSAFE_IN_LINES.sub(_escape, line)}" for line in _redaction.censor(text).split("\n"))


_cleaner = _Cleaner()
