"""What a form is made of, what was entered into it, and where each value goes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from edda.control.json_schema import Path

ROOT = "data"
ADD = "_add"
ON, DROP = "on", "drop"
Pair = tuple[str, str]


class _Absent:
    """No value at all, unlike null."""


ABSENT = _Absent()


class FieldKind(StrEnum):
    TEXT = "text"
    TEXTAREA = "textarea"
    NUMBER = "number"
    INTEGER = "integer"
    CHECKBOX = "checkbox"
    SELECT = "select"
    DATE = "date"
    DATETIME = "datetime"
    """Without a zone it is UTC."""
    JSON = "json"
    OBJECT = "object"
    LIST = "list"


@dataclass(frozen=True)
class Option:
    value: str
    label: str
    is_chosen: bool = False


@dataclass(frozen=True)
class Field:
    name: str
    label: str
    kind: FieldKind
    is_required: bool = False
    value: str = ""
    """What the control shows; of a checkbox, `on` or nothing."""
    help: str = ""
    error: str = ""
    format: str = ""
    """uuid, email, time, ...: of a text."""
    minimum: str = ""
    maximum: str = ""
    options: tuple[Option, ...] = ()
    fields: tuple[Field, ...] = ()
    """Of an object its members, of a list its rows: those that are there, and an empty one."""
    is_optional: bool = False
    """An object that need not be there: a checkbox with the object's name says whether it is."""
    is_present: bool = True

    def walk(self) -> Iterator[Field]:
        yield self
        for inner in self.fields:
            yield from inner.walk()


class FormData:
    """The pairs of a form."""

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        pairs = tuple(pairs)
        self._pairs = frozenset(pairs)
        self._texts = dict(reversed(pairs))  # the first of several counts
        self._names = sorted(self._texts)

    def text(self, name: str) -> str | None:
        text = self._texts.get(name)
        return None if text is None else text.replace("\r\n", "\n")

    def has(self, name: str, text: str) -> bool:
        return (name, text) in self._pairs

    def names_under(self, name: str) -> list[str]:
        """Names of what is in an object or a list."""
        start = bisect_left(self._names, f"{name}.")
        return self._names[start : bisect_left(self._names, f"{name}/", start)]  # a slash comes right after a dot

    def rows(self, name: str) -> list[int]:
        rows = {inner.removeprefix(f"{name}.").partition(".")[0] for inner in self.names_under(name)}
        return sorted(int(row) for row in rows if row.isascii() and row.isdecimal() and len(row) < 7)


@dataclass
class FormErrors:
    """Taken while a form is read."""

    errors: dict[str, str] = field(default_factory=dict)
    names: dict[Path, str] = field(default_factory=dict)
    """Of the fields that values came from: rows that were left out make places and names differ."""

    def name_of(self, path: Path) -> str:
        while path not in self.names:
            path = path[:-1]
        return self.names[path]


@dataclass(frozen=True)
class FieldSpec:
    """Where a value goes."""

    name: str
    label: str = ""
    help: str = ""
    is_required: bool = False
    is_nullable: bool = False
    default: Any = ABSENT

    def empty_value(self, notes: FormErrors) -> Any:
        """What it means that nothing was entered."""
        if self.is_nullable and (self.is_required or self.default not in (ABSENT, None)):
            return None
        if self.is_required:
            notes.errors[self.name] = "is required"
        return ABSENT


class Widget(Protocol):
    """How values of one schema are asked for."""

    def ask(self, slot: FieldSpec, given: FormData) -> Field: ...

    def read(self, slot: FieldSpec, given: FormData, path: Path, notes: FormErrors) -> Any: ...

    def write(self, name: str, value: Any) -> Iterator[Pair]:
        """What a form with this value would send."""
        ...


def new_field(slot: FieldSpec, kind: FieldKind, **more: Any) -> Field:
    return Field(slot.name, slot.label, kind, slot.is_required and not slot.is_nullable, help=slot.help, **more)
