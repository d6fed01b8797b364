"""Widgets: one class for each kind of schema, which makes the field of a form and reads its value."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from math import isfinite
from typing import Any, Protocol

from edda.viewer.forms.validation import Path, Schema, is_same

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
    """In UTC if it has no zone."""
    JSON = "json"
    OBJECT = "object"
    LIST = "list"


@dataclass(frozen=True)
class Option:
    value: str
    label: str
    is_chosen: bool = False


@dataclass(frozen=True)
class FormField:
    name: str
    label: str
    kind: FieldKind
    is_required: bool = False
    value: str = ""
    """The text in the control; `on` or empty for a checkbox."""
    help: str = ""
    error: str = ""
    format: str = ""
    """Of a text: uuid, email, time, ..."""
    minimum: str = ""
    maximum: str = ""
    options: tuple[Option, ...] = ()
    fields: tuple[FormField, ...] = ()
    """The members of an object, or the rows of a list followed by an empty one."""
    is_optional: bool = False
    """An object that may be absent: a checkbox with the object's name decides."""
    is_present: bool = True

    def walk(self) -> Iterator[FormField]:
        yield self
        for inner in self.fields:
            yield from inner.walk()


class FormData:
    """The submitted name and value pairs of a form."""

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        pairs = tuple(pairs)
        self._pairs = frozenset(pairs)
        self._texts = dict(reversed(pairs))  # the first of several pairs with the same name counts
        self._names = sorted(self._texts)

    def text(self, name: str) -> str | None:
        text = self._texts.get(name)
        return None if text is None else text.replace("\r\n", "\n")

    def has(self, name: str, text: str) -> bool:
        return (name, text) in self._pairs

    def names_under(self, name: str) -> list[str]:
        """Field names below an object or a list."""
        start = bisect_left(self._names, f"{name}.")
        return self._names[start : bisect_left(self._names, f"{name}/", start)]  # "/" is the character after "."

    def rows(self, name: str) -> list[int]:
        rows = {inner.removeprefix(f"{name}.").partition(".")[0] for inner in self.names_under(name)}
        return sorted(int(row) for row in rows if row.isascii() and row.isdecimal() and len(row) < 7)


@dataclass
class FormErrors:
    """Collected while a form is read."""

    by_name: dict[str, str] = field(default_factory=dict)
    names: dict[Path, str] = field(default_factory=dict)
    """Field name of each value: skipped rows of a list make names and paths differ."""

    def name_of(self, path: Path) -> str:
        while path not in self.names:
            path = path[:-1]
        return self.names[path]


@dataclass(frozen=True)
class FieldSpec:
    """One value of the form: its field name, and what the schema says of it."""

    name: str
    label: str = ""
    help: str = ""
    is_required: bool = False
    is_nullable: bool = False
    default: Any = ABSENT

    def empty_value(self, errors: FormErrors) -> Any:
        """The value of an empty control."""
        if self.is_nullable and (self.is_required or self.default not in (ABSENT, None)):
            return None
        if self.is_required:
            errors.by_name[self.name] = "is required"
        return ABSENT


class Widget(Protocol):
    """The control for the values of one schema."""

    def to_field(self, spec: FieldSpec, data: FormData) -> FormField: ...

    def read(self, spec: FieldSpec, data: FormData, path: Path, errors: FormErrors) -> Any: ...

    def to_pairs(self, name: str, value: Any) -> Iterator[Pair]:
        """The pairs that a form with this value submits."""
        ...


def new_field(spec: FieldSpec, kind: FieldKind, **more: Any) -> FormField:
    return FormField(spec.name, spec.label, kind, spec.is_required and not spec.is_nullable, help=spec.help, **more)


# One value


class ScalarWidget:
    def __init__(self, schema: Schema, kind: FieldKind) -> None:
        self._schema = schema
        self._kind = kind

    def to_field(self, spec: FieldSpec, data: FormData) -> FormField:
        text = data.text(spec.name) or ""
        kind = FieldKind.TEXTAREA if self._kind is FieldKind.TEXT and "\n" in text else self._kind
        limits = {name: str(self._schema.get(name, "")) for name in ("format", "minimum", "maximum")}
        return new_field(spec, kind, value=text, **limits)

    def read(self, spec: FieldSpec, data: FormData, path: Path, errors: FormErrors) -> Any:
        text = data.text(spec.name) or ""
        if not text.strip() and (self._kind is not FieldKind.TEXT or not text):
            return spec.empty_value(errors)
        try:
            return _READ.get(self._kind, str)(text)
        except ValueError:
            errors.by_name[spec.name] = f"must be {_EXPECTED[self._kind]}"
            return ABSENT

    def to_pairs(self, name: str, value: Any) -> Iterator[Pair]:
        if value is not ABSENT and value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            yield name, _format_datetime(value) if self._kind is FieldKind.DATETIME else text


def _read_integer(text: str) -> int:
    if "_" in text:  # int() and float() accept it, JSON does not
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
        raise ValueError(f"{text} is not a number in JSON")
    return number


def _read_datetime(text: str) -> str:
    """Browsers submit a date and time without a zone: it is UTC."""
    has_zone = datetime.fromisoformat(text.strip()).tzinfo is not None
    return text.strip() if has_zone else f"{text.strip()}Z"


def _format_datetime(value: Any) -> str:
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return str(value)
    return (time if time.tzinfo is None else time.astimezone(UTC)).replace(tzinfo=None).isoformat()


_READ: dict[FieldKind, Any] = {
    FieldKind.INTEGER: _read_integer,
    FieldKind.NUMBER: _read_number,
    FieldKind.DATETIME: _read_datetime,
}
_EXPECTED = {
    FieldKind.INTEGER: "a whole number",
    FieldKind.NUMBER: "a number",
    FieldKind.DATETIME: "a date and time such as 2026-07-31T18:00:00Z",
}


class CheckboxWidget:
    """Only if false and absent mean the same; else a `ChoiceWidget` of true and false."""

    def to_field(self, spec: FieldSpec, data: FormData) -> FormField:
        return new_field(spec, FieldKind.CHECKBOX, value=data.text(spec.name) or "")

    def read(self, spec: FieldSpec, data: FormData, path: Path, errors: FormErrors) -> Any:
        return data.text(spec.name) is not None

    def to_pairs(self, name: str, value: Any) -> Iterator[Pair]:
        if value is True:
            yield name, ON


class ChoiceWidget:
    def __init__(self, choices: Sequence[Any]) -> None:
        self._choices = choices
        self._is_text = all(isinstance(choice, str) and choice for choice in choices)
        """Else each choice is shown as JSON: 1 differs from "1", and an empty text from no value."""

    def _has_one_value(self, spec: FieldSpec) -> bool:
        return len(self._choices) == 1 and spec.is_required and not spec.is_nullable

    def _format(self, choice: Any) -> str:
        return choice if self._is_text else json.dumps(choice)

    def to_field(self, spec: FieldSpec, data: FormData) -> FormField:
        chosen = data.text(spec.name)
        if chosen is None and self._has_one_value(spec):
            chosen = self._format(self._choices[0])
        options = [Option(text, text, text == chosen) for text in map(self._format, self._choices)]
        if not spec.is_required or spec.is_nullable or chosen is None:
            options.insert(0, Option("", "", not chosen))
        return new_field(spec, FieldKind.SELECT, value=chosen or "", options=tuple(options))

    def read(self, spec: FieldSpec, data: FormData, path: Path, errors: FormErrors) -> Any:
        text = data.text(spec.name)
        if text is None and self._has_one_value(spec):
            return self._choices[0]
        for choice in self._choices:
            if self._format(choice) == text:
                return choice
        if not text:
            return spec.empty_value(errors)
        errors.by_name[spec.name] = f"must be one of {', '.join(map(self._format, self._choices))}"
        return ABSENT

    def to_pairs(self, name: str, value: Any) -> Iterator[Pair]:
        for choice in self._choices:
            if is_same(value, choice):
                yield name, self._format(choice)
                return


class JsonWidget:
    def to_field(self, spec: FieldSpec, data: FormData) -> FormField:
        return new_field(spec, FieldKind.JSON, value=data.text(spec.name) or "")

    def read(self, spec: FieldSpec, data: FormData, path: Path, errors: FormErrors) -> Any:
        text = data.text(spec.name) or ""
        if not text.strip():
            return spec.empty_value(errors)
        try:
            value = json.loads(text, parse_constant=_read_float, parse_float=_read_float)
            json.dumps(value, ensure_ascii=False).encode()  # rejects half of a surrogate pair
        except (ValueError, RecursionError) as error:
            errors.by_name[spec.name] = f"is not JSON: {error}"
            return ABSENT
        return value

    def to_pairs(self, name: str, value: Any) -> Iterator[Pair]:
        if value is not ABSENT:
            yield name, json.dumps(value, indent=2, ensure_ascii=False)


# Objects and lists


@dataclass(frozen=True)
class Member:
    key: str
    widget: Widget
    label: str
    help: str
    is_required: bool
    is_nullable: bool
    default: Any

    def spec(self, owner: str) -> FieldSpec:
        name = f"{owner}.{self.key.replace('%', '%25').replace('.', '%2E')}"
        return FieldSpec(name, self.label, self.help, self.is_required, self.is_nullable, self.default)


class ObjectWidget:
    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    def _members_of(self, name: str, data: FormData) -> Sequence[Member]:
        return self._members

    def to_field(self, spec: FieldSpec, data: FormData) -> FormField:
        is_optional = spec.is_nullable or not spec.is_required
        is_present = not is_optional or self.is_present(spec, data)
        fields = self._member_fields(spec.name, data) if is_present else self._blank_fields(spec.name)
        return new_field(spec, FieldKind.OBJECT, fields=fields, is_optional=is_optional, is_present=is_present)

    def _member_fields(self, name: str, data: FormData) -> tuple[FormField, ...]:
        return tuple(one.widget.to_field(one.spec(name), data) for one in self._members_of(name, data))

    def _blank_fields(self, name: str) -> tuple[FormField, ...]:
        return self._member_fields(name, FormData(self.to_pairs(name, ABSENT)))

    def is_present(self, spec: FieldSpec, data: FormData) -> bool:
        if data.has(spec.name, DROP):
            return False
        if data.has(spec.name, ON):
            return True
        filled = [name for name in data.names_under(spec.name) if data.text(name)]
        if not filled:
            return False
        blank = {inner.name: inner.value for one in self._blank_fields(spec.name) for inner in one.walk()}
        return any(data.text(name) != blank.get(name) for name in filled)

    def read(self, spec: FieldSpec, data: FormData, path: Path, errors: FormErrors) -> Any:
        errors.names[path] = spec.name
        if (spec.is_nullable or not spec.is_required) and not self.is_present(spec, data):
            return spec.empty_value(errors)
        value = {}
        for member in self._members_of(spec.name, data):
            inner, item_path = member.spec(spec.name), (*path, member.key)
            errors.names[item_path] = inner.name
            read = member.widget.read(inner, data, item_path, errors)
            if read is not ABSENT:
                value[member.key] = read
        return value

    def to_pairs(self, name: str, value: Any) -> Iterator[Pair]:
        """The defaults, if there is no value."""
        if isinstance(value, Mapping):
            yield name, ON
        members = value if isinstance(value, Mapping) else {}
        for member in self._members:
            inner = members.get(member.key, member.default)
            yield from member.widget.to_pairs(member.spec(name).name, inner)


class UnionWidget(ObjectWidget):
    """Objects of several kinds; the value of one member decides which."""

    def __init__(self, kind: Member, variants: Mapping[str, Sequence[Member]]) -> None:
        super().__init__([kind])
        self._kind = kind
        self._variants = variants

    def _members_of(self, name: str, data: FormData) -> Sequence[Member]:
        chosen = data.text(self._kind.spec(name).name) or ""
        return [self._kind, *self._variants.get(chosen, ())]

    def to_pairs(self, name: str, value: Any) -> Iterator[Pair]:
        chosen = value.get(self._kind.key) if isinstance(value, Mapping) else None
        members = self._variants.get(chosen, ()) if isinstance(chosen, str) else ()
        yield from ObjectWidget([self._kind, *members]).to_pairs(name, value)


class ListWidget:
    def __init__(self, item: Widget) -> None:
        self._item = item

    def _row_spec(self, name: str, row: int) -> FieldSpec:
        return FieldSpec(f"{name}.{row}", f"{row + 1}")

    def _rows(self, name: str, data: FormData) -> list[int]:
        """Numbers of the rows that were filled in."""
        item = self._item
        if isinstance(item, ObjectWidget):
            return [row for row in data.rows(name) if item.is_present(self._row_spec(name, row), data)]
        return [row for row in data.rows(name) if data.text(self._row_spec(name, row).name)]

    def to_field(self, spec: FieldSpec, data: FormData) -> FormField:
        rows = self._rows(spec.name, data)
        end = rows[-1] + 1 if rows else 0
        more = 2 if data.text(ADD) == spec.name else 1
        blanks = [self._row_spec(spec.name, row) for row in range(end, end + more)]
        fields = [self._item.to_field(self._row_spec(spec.name, row), data) for row in rows]
        fields += [self._item.to_field(blank, FormData(self._item.to_pairs(blank.name, ABSENT))) for blank in blanks]
        return new_field(spec, FieldKind.LIST, fields=tuple(fields))

    def read(self, spec: FieldSpec, data: FormData, path: Path, errors: FormErrors) -> Any:
        errors.names[path] = spec.name
        items: list[Any] = []
        for row in self._rows(spec.name, data):
            inner, item_path = self._row_spec(spec.name, row), (*path, len(items))
            errors.names[item_path] = inner.name
            read = self._item.read(inner, data, item_path, errors)
            if read is not ABSENT:
                items.append(read)
        if items or spec.is_required or spec.default not in (ABSENT, None):
            return items
        return ABSENT

    def to_pairs(self, name: str, value: Any) -> Iterator[Pair]:
        for row, item in enumerate(value if isinstance(value, list) else ()):
            inner = self._row_spec(name, row).name
            yield from self._item.to_pairs(inner, item)
