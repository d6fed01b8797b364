"""Where in a nested value something is wrong: `$.items[3].price`."""

from __future__ import annotations

from typing import Any


class LocatedError(Exception):
    """Learns its place on the way out: every level it passes adds its own step. Never reaches a user as it is."""

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
    except Exception:  # a __repr__ of the user's may raise anything, and Python's own does for very long integers
        return f"<{type(value).__qualname__}>"
