"""Forms from JSON schemas: a schema becomes fields, and the submitted pairs become a value or errors by field.

The name of a field is the path of its value, such as `data.items.0.sku`. An empty control means no value, null, or an
error, depending on the schema. A schema that has no matching control gets a text area for JSON.

Some pairs control the form: `data.address=on` states that an optional object is present, `data.address=drop` that it is
absent; without either, it is present if any field in it was filled in. `_add=data.items` requests one more row. Empty
rows of a list are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .validation import References, Schema, find_errors, variants_of
from .widgets import (
    ABSENT,
    ADD,
    ROOT,
    CheckboxWidget,
    ChoiceWidget,
    FieldKind,
    FieldSpec,
    FormData,
    FormErrors,
    FormField,
    JsonWidget,
    ListWidget,
    Member,
    ObjectWidget,
    Pair,
    ScalarWidget,
    UnionWidget,
    Widget,
)


@dataclass(frozen=True)
class FormResult:
    """The value or the errors by field name, and the form as it was filled in."""

    value: Any
    errors: Mapping[str, str]
    field: FormField
    is_adding: bool = False
    """The submit button was that for another row."""

    @property
    def is_valid(self) -> bool:
        return not self.errors and not self.is_adding


def show_form(schema: Schema | None, value: Any = ABSENT, name: str = ROOT) -> FormField:
    widget = _widget_for(schema)
    spec = FieldSpec(name, is_required=True)
    return widget.to_field(spec, FormData(widget.to_pairs(name, value)))


def read_form(schema: Schema | None, pairs: Iterable[Pair], name: str = ROOT) -> FormResult:
    widget, data, errors = _widget_for(schema), FormData(pairs), FormErrors(names={(): name})
    spec = FieldSpec(name, is_required=True)
    value = widget.read(spec, data, (), errors)
    if value is ABSENT:
        value = None
    for error in find_errors(schema or {}, value):
        errors.by_name.setdefault(errors.name_of(error.path), error.reason)
    form = _with_errors(widget.to_field(spec, data), errors.by_name)
    return FormResult(value, errors.by_name, form, data.text(ADD) is not None)


def _with_errors(field: FormField, errors: Mapping[str, str]) -> FormField:
    inner = tuple(_with_errors(one, errors) for one in field.fields)
    return replace(field, fields=inner, error=errors.get(field.name, ""))


def _widget_for(schema: Schema | None) -> Widget:
    return JsonWidget() if schema is None else _WidgetFactory(References(schema)).make(schema, is_sure=True)[0]


_SCALARS = {"integer": FieldKind.INTEGER, "number": FieldKind.NUMBER, "string": FieldKind.TEXT}
_FORMATS = {"date": FieldKind.DATE, "date-time": FieldKind.DATETIME}


class _WidgetFactory:
    def __init__(self, references: References, around: frozenset[str] = frozenset()) -> None:
        self._references = references
        self._around = around
        """References of the enclosing schemas: a model that contains itself gets a text area for JSON there."""

    def make(self, schema: Any, *, is_sure: bool) -> tuple[Widget, bool]:
        """The widget, and whether the value may be null. `is_sure`: an empty control can only mean false, so a checkbox
        is possible."""
        references = _references_in(schema)
        if not isinstance(schema, Mapping) or references & self._around:
            return JsonWidget(), False
        schema, is_nullable = self._without_null(self._references.resolve(schema))
        inside = _WidgetFactory(self._references, self._around | references)
        return inside._make(schema, is_nullable, is_sure), is_nullable

    def _make(self, schema: Schema, is_nullable: bool, is_sure: bool) -> Widget:
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices:
            return ChoiceWidget(choices)
        if variants_of(schema):
            return self._variants(schema)
        if schema.get("type") == "boolean":
            return CheckboxWidget() if is_sure and not is_nullable else ChoiceWidget([True, False])
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
            return ScalarWidget(schema, _FORMATS[format])
        if type in _SCALARS:
            return ScalarWidget(schema, _SCALARS[type])
        if type == "object" and schema.get("properties") and not schema.get("additionalProperties"):
            return ObjectWidget(self._members(schema))
        if type == "array" and not is_nullable and "prefixItems" not in schema:
            return self._list(schema.get("items"))
        return JsonWidget()

    def _list(self, items: Any) -> Widget:
        item, is_nullable = self.make(items, is_sure=False)
        if is_nullable or isinstance(item, ListWidget | JsonWidget):
            return JsonWidget()
        return ListWidget(item)

    def _members(self, schema: Schema) -> list[Member]:
        required = schema.get("required", ())
        return [self._member(key, one, key in required) for key, one in schema["properties"].items()]

    def _member(self, key: str, schema: Any, is_required: bool) -> Member:
        resolved = self._references.resolve(schema) if isinstance(schema, Mapping) else {}
        default = resolved.get("default", ABSENT)
        widget, is_nullable = self.make(schema, is_sure=is_required or isinstance(default, bool))
        label, help = resolved.get("title") or key, resolved.get("description") or ""
        return Member(key, widget, str(label), str(help), is_required, is_nullable, default)

    def _variants(self, schema: Schema) -> Widget:
        discriminator = schema.get("discriminator", {})
        key, mapping = discriminator.get("propertyName"), discriminator.get("mapping")
        if key and mapping:
            found = {name: self._references.resolve({"$ref": reference}) for name, reference in mapping.items()}
            if all(one.get("properties") for one in found.values()):
                kind = Member(key, ChoiceWidget(list(found)), key, "", True, False, ABSENT)
                members = {name: [one for one in self._members(each) if one.key != key] for name, each in found.items()}
                return UnionWidget(kind, members)
        types = {one.get("type") for one in variants_of(schema) if isinstance(one, Mapping)}
        # pydantic describes a Decimal so; as text it keeps all digits.
        return ScalarWidget(schema, FieldKind.TEXT) if types == {"number", "string"} else JsonWidget()


def _references_in(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    parts = [schema, *variants_of(schema), *schema.get("allOf", ())]
    return frozenset(part["$ref"] for part in parts if isinstance(part, Mapping) and "$ref" in part)
