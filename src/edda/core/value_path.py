"""Paths into nested values for error messages: `$.items[3].price`."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class LocatedError(Exception):
    """Each level of the recursion that it passes adds its key to `path`. Callers convert it to a public error."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []

    def add_key(self, key: Any) -> None:
        self.steps.append(path_part(key))

    @property
    def path(self) -> str:
        return "".join(reversed(self.steps))


def path_part(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{repr_short(key)}]"


def truncate(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def repr_short(value: Any) -> str:
    try:
        return truncate(repr(value))
    except Exception:  # a user's __repr__ may raise anything, and `repr` of a very long integer raises ValueError
        return f"<{type(value).__qualname__}>"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
