"""Comparing what runs were started with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from edda.errors import ArgumentError

MISSING = object()


def at_path(value: Any, path: str) -> Any:
    """`address.city` is the city in the address; `MISSING` if there is none."""
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return MISSING
        value = value[key]
    return value


def same(found: Any, wanted: Any) -> bool:
    """Equal by value and kind: True is not 1."""
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)


class InputFilter(Struct, frozen=True):
    """`order.id=A-17`, as somebody typed it: nobody says there whether 17 is a number or a text, so both fit."""

    path: str
    text: str

    def fits(self, arguments: Any) -> bool:
        found = at_path(arguments, self.path)
        if found is MISSING:
            return False
        return same(found, self._value) or (not isinstance(found, dict | list | bool) and str(found) == self.text)

    def touches(self, hides: Callable[[Sequence[str]], bool]) -> bool:
        """Whether it compares a field that is hidden: that at its path, one around it, or one in its value."""
        path = self.path.split(".")
        if any(hides(path[:end]) for end in range(1, len(path) + 1)):
            return True
        return _has_hidden(self._value, path, hides)

    @property
    def _value(self) -> Any:
        try:
            return msgspec.json.decode(self.text)
        except ValueError:
            return self.text


def _has_hidden(value: Any, path: Sequence[str], hides: Callable[[Sequence[str]], bool]) -> bool:
    if isinstance(value, list):
        return any(_has_hidden(item, path, hides) for item in value)
    if not isinstance(value, dict):
        return False
    return any(hides([*path, name]) or _has_hidden(item, [*path, name], hides) for name, item in value.items())


def read_condition(text: str) -> InputFilter:
    path, separator, value = text.partition("=")
    if not separator or not path:
        raise ArgumentError("input: expected a path and a value, such as order.id=A-17")
    return InputFilter(path.strip(), value)
