"""How values are asked for and read: one shape for each kind of schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from edda.control.json_schema import Path, Schema, is_same

from .model import (
    ABSENT,
    ADD,
    DROP,
    ON,
    Field,
    FieldKind,
    FieldSpec,
    FormData,
    FormErrors,
    Option,
    Pair,
    Widget,
    new_field,
)

# One value


class Scalar:
    def __init__(self, schema: Schema, kind: FieldKind) -> None:
        self._schema = schema
        self._kind = kind

    def ask(self, slot: FieldSpec, given: FormData) -> Field:
        text = given.text(slot.name) or ""
        kind = FieldKind.TEXTAREA if self._kind is FieldKind.TEXT and "\n" in text else self._kind
        limits = {name: str(self._schema.get(name, "")) for name in ("format", "minimum", "maximum")}
        return new_field(slot, kind, value=text, **limits)

    def read(self, slot: FieldSpec, given: FormData, path: Path, notes: FormErrors) -> Any:
        text = given.text(slot.name) or ""
        if not text.strip() and (self._kind is not FieldKind.TEXT or not text):
            return slot.empty_value(notes)
        try:
            return _READ.get(self._kind, str)(text)
        except ValueError:
            notes.errors[slot.name] = f"must be {_WANTED[self._kind]}"
            return ABSENT

    def write(self, name: str, value: Any) -> Iterator[Pair]:
        if value is not ABSENT and value is not None:
            yield name, _show_moment(value) if self._kind is FieldKind.DATETIME else _show_scalar(value)


def _read_integer(text: str) -> int:
    if "_" in text:  # Python's, and nobody else's
        raise ValueError(text)
    return int(text)


def _read_number(text: str) -> int | float:
    try:
        return _read_integer(text)
    except ValueError:
        return _read_float(text)


def _read_float(text: str) -> float:
    number = float(text)
    if not isfinite(number) or "_" in text:
        raise ValueError(f"{text} is no number in JSON")
    return number


def _read_moment(text: str) -> str:
    """As a page's own control gives it: without a zone."""
    moment = datetime.fromisoformat(text.strip())
    return text.strip() if moment.tzinfo is not None else f"{text.strip()}Z"


def _show_moment(value: Any) -> str:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return str(value)
    return (moment if moment.tzinfo is None else moment.astimezone(UTC)).replace(tzinfo=None).isoformat()


def _show_scalar(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_READ: dict[FieldKind, Any] = {
    FieldKind.INTEGER: _read_integer,
    FieldKind.NUMBER: _read_number,
    FieldKind.DATETIME: _read_moment,
}
_WANTED = {
    FieldKind.INTEGER: "a whole number",
    FieldKind.NUMBER: "a number",
    FieldKind.DATETIME: "a date and time such as 2026-07-31T18:00:00Z",
}


class Checkbox:
    """Only where false and nothing are the same; elsewhere there is a choice."""

    def ask(self, slot: FieldSpec, given: FormData) -> Field:
        return new_field(slot, FieldKind.CHECKBOX, value=given.text(slot.name) or "")

    def read(self, slot: FieldSpec, given: FormData, path: Path, notes: FormErrors) -> Any:
        return given.text(slot.name) is not None

    def write(self, name: str, value: Any) -> Iterator[Pair]:
        if value is True:
            yield name, ON


class Choice:
    def __init__(self, choices: Sequence[Any]) -> None:
        self._choices = choices
        self._is_text = all(isinstance(choice, str) and choice for choice in choices)
        """Else as JSON: 1 is not "1", and an empty text is not nothing."""

    def _is_settled(self, slot: FieldSpec) -> bool:
        return len(self._choices) == 1 and slot.is_required and not slot.is_nullable

    def _show(self, choice: Any) -> str:
        return choice if self._is_text else json.dumps(choice)

    def ask(self, slot: FieldSpec, given: FormData) -> Field:
        chosen = given.text(slot.name)
        if chosen is None and self._is_settled(slot):
            chosen = self._show(self._choices[0])
        options = [Option(text, text, text == chosen) for text in map(self._show, self._choices)]
        if not slot.is_required or slot.is_nullable or chosen is None:
            options.insert(0, Option("", "", not chosen))
        return new_field(slot, FieldKind.SELECT, value=chosen or "", options=tuple(options))

    def read(self, slot: FieldSpec, given: FormData, path: Path, notes: FormErrors) -> Any:
        text = given.text(slot.name)
        if text is None and self._is_settled(slot):
            return self._choices[0]
        for choice in self._choices:
            if self._show(choice) == text:
                return choice
        if not text:
            return slot.empty_value(notes)
        notes.errors[slot.name] = f"must be one of {', '.join(map(self._show, self._choices))}"
        return ABSENT

    def write(self, name: str, value: Any) -> Iterator[Pair]:
        if any(is_same(value, choice) for choice in self._choices):
            yield name, self._show(value)


class JsonWidget:
    def ask(self, slot: FieldSpec, given: FormData) -> Field:
        return new_field(slot, FieldKind.JSON, value=given.text(slot.name) or "")

    def read(self, slot: FieldSpec, given: FormData, path: Path, notes: FormErrors) -> Any:
        text = given.text(slot.name) or ""
        if not text.strip():
            return slot.empty_value(notes)
        try:
            value = json.loads(text, parse_constant=_read_float, parse_float=_read_float)
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            notes.errors[slot.name] = f"is not JSON: {error}"
            return ABSENT
        return value

    def write(self, name: str, value: Any) -> Iterator[Pair]:
        if value is not ABSENT:
            yield name, json.dumps(value, indent=2, ensure_ascii=False)


# Values that hold others


@dataclass(frozen=True)
class Member:
    key: str
    shape: Widget
    label: str
    help: str
    is_required: bool
    is_nullable: bool
    default: Any

    def slot(self, owner: str) -> FieldSpec:
        name = f"{owner}.{self.key.replace('%', '%25').replace('.', '%2E')}"
        return FieldSpec(name, self.label, self.help, self.is_required, self.is_nullable, self.default)


class Object:
    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    def _members_of(self, name: str, given: FormData) -> Sequence[Member]:
        return self._members

    def ask(self, slot: FieldSpec, given: FormData) -> Field:
        is_optional = slot.is_nullable or not slot.is_required
        is_present = not is_optional or self.is_present(slot, given)
        fields = self._ask_members(slot.name, given) if is_present else self._ask_blank(slot.name)
        return new_field(slot, FieldKind.OBJECT, fields=fields, is_optional=is_optional, is_present=is_present)

    def _ask_members(self, name: str, given: FormData) -> tuple[Field, ...]:
        return tuple(one.shape.ask(one.slot(name), given) for one in self._members_of(name, given))

    def _ask_blank(self, name: str) -> tuple[Field, ...]:
        return self._ask_members(name, FormData(self.write(name, ABSENT)))

    def is_present(self, slot: FieldSpec, given: FormData) -> bool:
        if given.has(slot.name, DROP):
            return False
        if given.has(slot.name, ON):
            return True
        filled = [name for name in given.names_under(slot.name) if given.text(name)]
        if not filled:
            return False
        blank = {inner.name: inner.value for one in self._ask_blank(slot.name) for inner in one.walk()}
        return any(given.text(name) != blank.get(name) for name in filled)

    def read(self, slot: FieldSpec, given: FormData, path: Path, notes: FormErrors) -> Any:
        notes.names[path] = slot.name
        if (slot.is_nullable or not slot.is_required) and not self.is_present(slot, given):
            return slot.empty_value(notes)
        value = {}
        for member in self._members_of(slot.name, given):
            inner, place = member.slot(slot.name), (*path, member.key)
            notes.names[place] = inner.name
            read = member.shape.read(inner, given, place, notes)
            if read is not ABSENT:
                value[member.key] = read
        return value

    def write(self, name: str, value: Any) -> Iterator[Pair]:
        """Of nothing, what an empty form shows: the defaults."""
        if isinstance(value, Mapping):
            yield name, ON
        known = value if isinstance(value, Mapping) else {}
        for member in self._members:
            inner = known.get(member.key, member.default)
            yield from member.shape.write(member.slot(name).name, inner)


class UnionWidget(Object):
    """Objects of several kinds, told apart by one member."""

    def __init__(self, kind: Member, variants: Mapping[str, Sequence[Member]]) -> None:
        super().__init__([kind])
        self._kind = kind
        self._variants = variants

    def _members_of(self, name: str, given: FormData) -> Sequence[Member]:
        chosen = given.text(self._kind.slot(name).name) or ""
        return [self._kind, *self._variants.get(chosen, ())]

    def write(self, name: str, value: Any) -> Iterator[Pair]:
        chosen = value.get(self._kind.key) if isinstance(value, Mapping) else None
        members = self._variants.get(chosen, ()) if isinstance(chosen, str) else ()
        yield from Object([self._kind, *members]).write(name, value)


class ListWidget:
    def __init__(self, item: Widget) -> None:
        self._item = item

    def _slot(self, name: str, row: int) -> FieldSpec:
        return FieldSpec(f"{name}.{row}", f"{row + 1}")

    def _rows(self, name: str, given: FormData) -> list[int]:
        """Those that are filled in."""
        item = self._item
        if isinstance(item, Object):
            return [row for row in given.rows(name) if item.is_present(self._slot(name, row), given)]
        return [row for row in given.rows(name) if given.text(self._slot(name, row).name)]

    def ask(self, slot: FieldSpec, given: FormData) -> Field:
        rows = self._rows(slot.name, given)
        end = rows[-1] + 1 if rows else 0
        more = 2 if given.text(ADD) == slot.name else 1
        blanks = [self._slot(slot.name, row) for row in range(end, end + more)]
        fields = [self._item.ask(self._slot(slot.name, row), given) for row in rows]
        fields += [self._item.ask(blank, FormData(self._item.write(blank.name, ABSENT))) for blank in blanks]
        return new_field(slot, FieldKind.LIST, fields=tuple(fields))

    def read(self, slot: FieldSpec, given: FormData, path: Path, notes: FormErrors) -> Any:
        notes.names[path] = slot.name
        items: list[Any] = []
        for row in self._rows(slot.name, given):
            inner, place = self._slot(slot.name, row), (*path, len(items))
            notes.names[place] = inner.name
            read = self._item.read(inner, given, place, notes)
            if read is not ABSENT:
                items.append(read)
        if items or slot.is_required or slot.default not in (ABSENT, None):
            return items
        return ABSENT

    def write(self, name: str, value: Any) -> Iterator[Pair]:
        for row, item in enumerate(value if isinstance(value, list) else ()):
            inner = self._slot(name, row).name
            yield from self._item.write(inner, item)
