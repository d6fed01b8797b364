"""Forms for values: from a JSON schema to fields, and from what was entered to the value.

A field's name is the path of its value, such as `data.items.0.sku`. What an empty control means follows from the
schema: nothing, null, or an error. What a schema says in ways that fields cannot is asked for as JSON.

Pairs that stand for no value: `data.address=on` says that an optional object is there, `data.address=drop` that it
is not; if neither is said, it is there as soon as anything in it was filled in. `_add=data.items` asks for one more
row. Rows of a list that are left empty do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edda.control.json_schema import References, Schema, find_errors, variants_of

from .model import ABSENT, ADD, DROP, ON, ROOT, Field, FieldKind, FieldSpec, FormData, FormErrors, Option, Pair, Widget
from .widgets import Checkbox, Choice, JsonWidget, ListWidget, Member, Object, Scalar, UnionWidget

__all__ = [
    "ABSENT",
    "ADD",
    "DROP",
    "ON",
    "Field",
    "FieldKind",
    "FormResult",
    "Option",
    "Pair",
    "read_form",
    "show_form",
]


@dataclass(frozen=True)
class FormResult:
    """What came of a form: the value, or what is wrong with it; and the form again, as it was filled in."""

    value: Any
    errors: Mapping[str, str]
    field: Field
    is_adding: bool = False
    """Only another row was asked for."""

    @property
    def is_good(self) -> bool:
        return not self.errors and not self.is_adding


def show_form(schema: Schema | None, value: Any = ABSENT, name: str = ROOT) -> Field:
    shape = _shape_of(schema)
    slot = FieldSpec(name, is_required=True)
    return shape.ask(slot, FormData(shape.write(name, value)))


def read_form(schema: Schema | None, pairs: Iterable[Pair], name: str = ROOT) -> FormResult:
    shape, given, notes = _shape_of(schema), FormData(pairs), FormErrors(names={(): name})
    slot = FieldSpec(name, is_required=True)
    value = shape.read(slot, given, (), notes)
    if value is ABSENT:
        value = None
    for error in find_errors(schema or {}, value):
        notes.errors.setdefault(notes.name_of(error.path), error.reason)
    asked = _with_errors(shape.ask(slot, given), notes.errors)
    return FormResult(value, notes.errors, asked, given.text(ADD) is not None)


def _with_errors(asked: Field, errors: Mapping[str, str]) -> Field:
    inner = tuple(_with_errors(one, errors) for one in asked.fields)
    return replace(asked, fields=inner, error=errors.get(asked.name, ""))


# From the schema


def _shape_of(schema: Schema | None) -> Widget:
    return JsonWidget() if schema is None else _WidgetFactory(References(schema)).make(schema, is_sure=True)[0]


_SCALARS = {"integer": FieldKind.INTEGER, "number": FieldKind.NUMBER, "string": FieldKind.TEXT}
_FORMATS = {"date": FieldKind.DATE, "date-time": FieldKind.DATETIME}


class _WidgetFactory:
    def __init__(self, references: References, around: frozenset[str] = frozenset()) -> None:
        self._references = references
        self._around = around
        """What it is within: a model that holds itself would never end."""

    def make(self, schema: Any, *, is_sure: bool) -> tuple[Widget, bool]:
        """Also whether it may be null. `is_sure`: what is left empty means one thing only, false for a checkbox."""
        references = _references_in(schema)
        if not isinstance(schema, Mapping) or references & self._around:
            return JsonWidget(), False
        schema, is_nullable = self._without_null(self._references.resolve(schema))
        inside = _WidgetFactory(self._references, self._around | references)
        return inside._make(schema, is_nullable, is_sure), is_nullable

    def _make(self, schema: Schema, is_nullable: bool, is_sure: bool) -> Widget:
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices:
            return Choice(choices)
        if variants_of(schema):
            return self._variants(schema)
        if schema.get("type") == "boolean":
            return Checkbox() if is_sure and not is_nullable else Choice([True, False])
        return self._typed(schema, is_nullable)

    def _without_null(self, schema: Schema) -> tuple[Schema, bool]:
        variants = [self._references.resolve(one) for one in variants_of(schema) if isinstance(one, Mapping)]
        rest = [one for one in variants if one.get("type") != "null"]
        if len(rest) == len(variants) or len(rest) != 1:
            return schema, len(rest) < len(variants)
        beside = {key: part for key, part in schema.items() if key not in ("anyOf", "oneOf")}
        return {**rest[0], **beside}, True

    def _typed(self, schema: Schema, is_nullable: bool) -> Widget:
        type, format = schema.get("type"), schema.get("format")
        if type == "string" and format in _FORMATS:
            return Scalar(schema, _FORMATS[format])
        if type in _SCALARS:
            return Scalar(schema, _SCALARS[type])
        if type == "object" and schema.get("properties") and not schema.get("additionalProperties"):
            return Object(self._members(schema))
        if type == "array" and not is_nullable and "prefixItems" not in schema:
            return self._listing(schema.get("items"))
        return JsonWidget()

    def _listing(self, items: Any) -> Widget:
        item, is_nullable = self.make(items, is_sure=False)
        if is_nullable or isinstance(item, ListWidget | JsonWidget):
            return JsonWidget()
        return ListWidget(item)

    def _members(self, schema: Schema) -> list[Member]:
        required = schema.get("required", ())
        return [self._member(key, one, key in required) for key, one in schema["properties"].items()]

    def _member(self, key: str, schema: Any, is_required: bool) -> Member:
        known = self._references.resolve(schema) if isinstance(schema, Mapping) else {}
        default = known.get("default", ABSENT)
        shape, is_nullable = self.make(schema, is_sure=is_required or isinstance(default, bool))
        label, help = known.get("title") or key, known.get("description") or ""
        return Member(key, shape, str(label), str(help), is_required, is_nullable, default)

    def _variants(self, schema: Schema) -> Widget:
        discriminator = schema.get("discriminator", {})
        key, mapping = discriminator.get("propertyName"), discriminator.get("mapping")
        if key and mapping:
            found = {name: self._references.resolve({"$ref": reference}) for name, reference in mapping.items()}
            if all(one.get("properties") for one in found.values()):
                kind = Member(key, Choice(list(found)), key, "", True, False, ABSENT)
                members = {name: [one for one in self._members(each) if one.key != key] for name, each in found.items()}
                return UnionWidget(kind, members)
        types = {one.get("type") for one in variants_of(schema) if isinstance(one, Mapping)}
        # A decimal: written as text, nothing of it is lost.
        return Scalar(schema, FieldKind.TEXT) if types == {"number", "string"} else JsonWidget()


def _references_in(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    parts = [schema, *variants_of(schema), *schema.get("allOf", ())]
    return frozenset(part["$ref"] for part in parts if isinstance(part, Mapping) and "$ref" in part)
