"""The values of secret fields within a value: an error's text may repeat them without their names."""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator
from typing import Any

from .redact import SHORTEST, Redaction
from .value_path import repr_short

MAX_DEPTH = 64


def find_secrets(redaction: Redaction, value: Any) -> frozenset[str]:
    """As texts, and as `repr` writes them; those too short to be told from other text are left out."""
    found = [text for text in _hidden(redaction, value, (), 0) if len(text) >= SHORTEST]
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
    """The paths of a match are keys, too."""
    return key.lstrip("@").split(".")


def named_items(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    return ((key if isinstance(key, str) else write_value(key), item) for key, item in value.items())


def write_value(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return b2a_base64(value, newline=False).decode()
    try:
        return str(value)
    except Exception:  # a class of the user's may refuse
        return repr_short(value)


def write_int(value: int) -> str:
    try:
        return str(value)
    except ValueError:  # Python does not write more than 4,300 digits
        return hex(value)
