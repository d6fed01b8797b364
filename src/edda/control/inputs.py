"""Comparing what runs were started with."""

from __future__ import annotations

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


class Condition(Struct, frozen=True):
    """`order.id=A-17`, as somebody typed it: nobody says there whether 17 is a number or a text, so both fit."""

    path: str
    text: str

    def fits(self, arguments: Any) -> bool:
        found = at_path(arguments, self.path)
        if found is MISSING:
            return False
        return same(found, self._value) or (not isinstance(found, dict | list | bool) and str(found) == self.text)

    @property
    def _value(self) -> Any:
        try:
            return msgspec.json.decode(self.text)
        except ValueError:
            return self.text


def read_condition(text: str) -> Condition:
    path, separator, value = text.partition("=")
    if not separator or not path:
        raise ArgumentError(f"input {text!r}: expected a path and a value, such as order.id=A-17")
    return Condition(path.strip(), value)
