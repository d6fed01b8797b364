"""Forms: from a schema to fields, and from submitted pairs to a value."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from pydantic import Field as Of

from edda.viewer.forms.schema import FormResult, read_form, show_form
from edda.viewer.forms.validation import find_errors
from edda.viewer.forms.widgets import ABSENT, ADD, DROP, ON, FieldKind, FormField, Pair


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    sku: str
    count: int = Of(default=1, ge=1, description="How many of them.")


class Card(BaseModel):
    kind: Literal["card"]
    number: str


class Cash(BaseModel):
    kind: Literal["cash"]
    currency: str = "EUR"


class Address(BaseModel):
    street: str
    floor: int | None = None


class Order(BaseModel):
    id: UUID
    items: list[Item]
    colour: Colour
    payment: Annotated[Card | Cash, Of(discriminator="kind")]
    at: datetime
    total: Decimal
    address: Address | None = None
    day: date | None = None
    is_gift: bool = False
    is_known: bool | None = None
    labels: dict[str, int] = {}
    tags: list[str] = []
    other: int | str = 7


class Tree(BaseModel):
    name: str
    left: Tree | None = None
    branches: list[Tree] = []


SCHEMA = TypeAdapter(Order).json_schema()
ORDER = {
    "id": "8b3f9b3e-1111-4222-8333-444455556666",
    "items": [{"sku": "a", "count": 2}, {"sku": "b", "count": 1}],
    "colour": "blue",
    "payment": {"kind": "card", "number": "4711"},
    "at": "2026-07-31T18:00:00Z",
    "total": "19.99",
    "address": {"street": "Main Street"},
    "is_gift": True,
    "labels": {"x": 1},
    "tags": ["new"],
    "other": "eight",
}


def submit(field: FormField) -> Iterator[Pair]:
    """The pairs that a browser sends of an unchanged form."""
    if field.kind is FieldKind.CHECKBOX:
        yield from [(field.name, ON)] if field.value else []
    elif field.kind is FieldKind.SELECT:
        chosen = [option.value for option in field.options if option.is_chosen]
        yield field.name, (chosen or [field.options[0].value])[0]
    elif field.kind not in (FieldKind.OBJECT, FieldKind.LIST):
        yield field.name, field.value.replace("\n", "\r\n")
    elif field.is_optional and field.is_present:
        yield field.name, ON
    for inner in field.fields:
        yield from submit(inner)


def named(field: FormField) -> dict[str, FormField]:
    return {one.name: one for one in field.walk()}


def fill(schema: dict[str, Any], value: Any = ABSENT, **changes: str | None) -> FormResult:
    """Changes by name, with `__` for dots; None removes a pair."""
    new = {f"data.{name.replace('__', '.')}": text for name, text in changes.items()}
    pairs = [pair for pair in submit(show_form(schema, value)) if pair[0] not in new]
    return read_form(schema, [*pairs, *((name, text) for name, text in new.items() if text is not None)])


# Fields


def test_a_model_becomes_fields_named_by_their_paths() -> None:
    fields = named(show_form(SCHEMA, ORDER))
    kinds = {name.removeprefix("data."): str(field.kind) for name, field in fields.items() if name != "data"}
    assert kinds == {
        "id": "text",
        "items": "list",
        **{f"items.{row}": "object" for row in range(3)},
        **{f"items.{row}.sku": "text" for row in range(3)},
        **{f"items.{row}.count": "integer" for row in range(3)},
        "colour": "select",
        "payment": "object",
        "payment.kind": "select",
        "payment.number": "text",
        "at": "datetime",
        "total": "text",
        "address": "object",
        "address.street": "text",
        "address.floor": "integer",
        "day": "date",
        "is_gift": "checkbox",
        "is_known": "select",
        "labels": "json",
        "tags": "list",
        "tags.0": "text",
        "tags.1": "text",
        "other": "json",
    }
    assert (fields["data.id"].format, fields["data.id"].is_required) == ("uuid", True)
    assert (fields["data.items.0.count"].minimum, fields["data.items.0.count"].help) == ("1", "How many of them.")
    assert [option.value for option in fields["data.colour"].options] == ["red", "blue"]
    assert [option.value for option in fields["data.is_known"].options] == ["", "true", "false"]
    assert fields["data.at"].value == "2026-07-31T18:00:00"


def test_an_empty_form_shows_the_defaults_also_in_its_empty_rows() -> None:
    fields = named(show_form(SCHEMA))
    assert (fields["data.other"].value, fields["data.items.0.count"].value) == ("7", "1")
    assert not fields["data.items.0"].is_present
    assert not fields["data.address"].is_present


def test_a_value_comes_back_as_it_was() -> None:
    filled = fill(SCHEMA, ORDER)
    assert filled.errors == {}
    assert filled.value == ORDER
    assert filled.is_valid


def test_a_model_that_holds_itself_is_asked_for_as_json_below_the_first_level() -> None:
    schema = TypeAdapter(Tree).json_schema()
    fields = named(show_form(schema, {"name": "root"}))
    assert {name: str(field.kind) for name, field in fields.items()} == {
        "data": "object",
        "data.name": "text",
        "data.left": "json",
        "data.branches": "json",
    }


@pytest.mark.parametrize("schema", [None, {}, {"type": "array", "items": {}}, True])
def test_what_no_field_can_ask_for_is_asked_for_as_json(schema: Any) -> None:
    field = show_form(schema, [1, {"a": None}])
    assert field.kind is FieldKind.JSON
    assert read_form(schema, submit(field)).value == [1, {"a": None}]


def test_a_single_value_has_a_form_too() -> None:
    filled = read_form({"type": "integer"}, [("data", "5")])
    assert (filled.value, filled.errors) == (5, {})


# Reading


def test_every_error_stands_at_its_field_and_what_was_entered_stays() -> None:
    filled = fill(
        SCHEMA,
        ORDER,
        id="x",
        items__0__count="0",
        items__1__sku="",
        items__1__count="many",
        colour="green",
        at="soon",
        day="yesterday",
        address__street="",
        labels='{"x": ',
        payment__number=None,
    )
    assert {name.removeprefix("data."): reason for name, reason in filled.errors.items()} == {
        "id": "must be a UUID",
        "items.0.count": "must be at least 1",
        "items.1.sku": "is required",
        "items.1.count": "must be a whole number",
        "colour": "must be one of red, blue",
        "at": "must be a date and time such as 2026-07-31T18:00:00Z",
        "day": "must be a date such as 2026-07-31",
        "address.street": "is required",
        "labels": "is not JSON: Expecting value: line 1 column 7 (char 6)",
        "payment.number": "is required",
    }
    fields = named(filled.field)
    assert (fields["data.at"].value, fields["data.at"].error) == ("soon", filled.errors["data.at"])
    assert not filled.is_valid


def test_an_error_in_a_row_stands_there_though_rows_before_it_were_left_empty() -> None:
    filled = fill(SCHEMA, ORDER, items__0=DROP, items__1__count="-1")
    assert filled.value["items"] == [{"sku": "b", "count": -1}]
    assert filled.errors == {"data.items.1.count": "must be at least 1"}


def test_a_new_row_counts_as_soon_as_it_is_filled_in() -> None:
    filled = fill(SCHEMA, ORDER, items__2__sku="c", tags__1="late")
    assert filled.value["items"][2] == {"sku": "c", "count": 1}
    assert filled.value["tags"] == ["new", "late"]


def test_one_more_row_can_be_asked_for() -> None:
    pairs = [*submit(show_form(SCHEMA, ORDER)), (ADD, "data.tags")]
    filled = read_form(SCHEMA, pairs)
    assert (filled.is_adding, filled.is_valid) == (True, False)
    rows = [field.name for field in filled.field.walk() if field.name.startswith("data.tags.")]
    assert rows == ["data.tags.0", "data.tags.1", "data.tags.2"]


def test_an_optional_object_is_left_out_or_taken_in() -> None:
    assert "address" not in fill(SCHEMA, ORDER, address=DROP).value
    without = {key: part for key, part in ORDER.items() if key != "address"}
    assert fill(SCHEMA, without).value == without
    assert fill(SCHEMA, without, address__street="Elm").value["address"] == {"street": "Elm"}
    assert fill(SCHEMA, without, address=ON).errors == {"data.address.street": "is required"}


def test_another_kind_of_a_union_brings_its_own_fields() -> None:
    filled = fill(SCHEMA, ORDER, payment__kind="cash")
    assert filled.value["payment"] == {"kind": "cash"}
    assert "data.payment.currency" in named(filled.field)
    empty = fill(SCHEMA, {**ORDER, "payment": {}})
    assert empty.errors == {"data.payment.kind": "is required"}


def test_what_may_be_null_is_null_or_left_out_when_it_is_empty() -> None:
    class Choices(BaseModel):
        must: int | None
        may: int | None = None
        is_set: int | None = 5
        is_sure: bool | None = None

    schema = TypeAdapter(Choices).json_schema()
    assert fill(schema, {}, is_set="").value == {"must": None, "is_set": None}
    assert fill(schema, {"must": 0, "is_sure": False}).value == {"must": 0, "is_set": 5, "is_sure": False}


@pytest.mark.parametrize("text", ["NaN", "1e999", "[Infinity]", '"\\ud800"', "[" * 100_000])
def test_what_is_no_json_is_refused(text: str) -> None:
    assert read_form(None, [("data", text)]).errors["data"].startswith("is not JSON: ")


@pytest.mark.parametrize("text", ["nan", "inf", "1_000", "1e999", "9" * 5000 + "x"])
def test_what_is_no_number_is_refused(text: str) -> None:
    assert read_form({"type": "number"}, [("data", text)]).errors == {"data": "must be a number"}


def test_strange_names_do_no_harm() -> None:
    pairs = [
        ("data.items.99999999999.sku", "x"),
        ("data.items.x.sku", "x"),
        ("data.items.-1", "x"),
        ("", ""),
        (".", ""),
    ]
    assert read_form(SCHEMA, pairs).value["items"] == []


# Any schema, any value

texts = st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]), min_size=1)
keys = st.text("ab.%/ é0", min_size=1, max_size=3)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
SCALARS: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    ({"type": "string"}, texts),
    ({"type": "string", "maxLength": 3}, texts.filter(lambda text: len(text) <= 3)),
    ({"type": "integer"}, st.integers()),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 9}, st.integers(3, 8)),
    ({"type": "number"}, st.integers() | st.floats(allow_nan=False, allow_infinity=False)),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "string", "format": "date"}, st.dates().map(str)),
    ({"type": "string", "format": "date-time"}, st.datetimes().map(lambda time: f"{time.isoformat()}Z")),
    ({"type": "string", "format": "uuid"}, st.uuids().map(str)),
    ({"enum": ["a", "b", ""]}, st.sampled_from(["a", "b", ""])),
    ({"enum": [1, "1", None, True]}, st.sampled_from([1, "1", None, True])),
    ({"const": 3}, st.just(3)),
    ({}, plain),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, st.dictionaries(texts, st.integers())),
]


Case = tuple[dict[str, Any], st.SearchStrategy[Any]]


@st.composite
def cases(draw: st.DrawFn, depth: int = 3) -> Case:
    """A schema, and values in the one form that a form submits."""
    kind = draw(st.sampled_from(["scalar", "object", "list"])) if depth else "scalar"
    if kind == "scalar":
        scalar: Case = draw(st.sampled_from(SCALARS))
        return scalar
    if kind == "list":
        item, values = draw(cases(depth - 1))
        return {"type": "array", "items": item}, st.lists(values.filter(lambda one: one not in ("", [])), max_size=3)
    made: Case = draw(objects(depth))
    return made


@st.composite
def objects(draw: st.DrawFn, depth: int) -> Case:
    members = {key: draw(cases(depth - 1)) for key in draw(st.lists(keys, unique=True, min_size=1, max_size=4))}
    required = draw(st.sets(st.sampled_from(list(members))))
    nullable = draw(st.sets(st.sampled_from(list(members))))
    properties = {
        key: {"anyOf": [schema, {"type": "null"}]} if key in nullable else schema
        for key, (schema, _) in members.items()
    }
    must = {key: (st.none() | values if key in nullable else values) for key, (_, values) in members.items()}
    values = st.fixed_dictionaries(
        {key: one for key, one in must.items() if key in required},
        optional={key: values.filter(_is_told) for key, (_, values) in members.items() if key not in required},
    )
    return {"type": "object", "properties": properties, "required": sorted(required)}, values


def _is_told(value: Any) -> bool:
    """An empty value of an optional member is absent in a form."""
    return value not in (None, "", [])


@given(cases(), st.data())
def test_any_value_of_any_schema_comes_back_as_it_was(case: Case, data: st.DataObject) -> None:
    schema, values = case
    value = data.draw(values)
    filled = read_form(schema, submit(show_form(schema, value)))
    assert filled.errors == {}
    assert _typed(filled.value) == _typed(value)
    assert show_form(schema, value) == filled.field


def _typed(value: Any) -> str:
    """1 is not 1.0, and not true."""
    return repr(sorted(value.items()) if isinstance(value, dict) else value) if not value else _order(value)


def _order(value: Any) -> str:
    if isinstance(value, dict):
        return repr(sorted((key, _order(part)) for key, part in value.items()))
    return repr([_order(part) for part in value]) if isinstance(value, list) else repr(value)


@given(cases(), plain)
def test_errors_are_found_where_a_real_validator_finds_them(case: Case, value: Any) -> None:
    schema = _without_formats(case[0])
    assert (find_errors(schema, value) == ()) is jsonschema_rs.is_valid(schema, value)


small = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 4) | st.sampled_from([0.5, 1.0, 2.5, "", "a", "ab", "b1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c1"]), inner, max_size=3),
    max_leaves=6,
)
numbers = st.integers(-1, 4)
names = st.sampled_from(["a", "b", "c1"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A schema of any few keywords, which need not make sense together."""
    members = st.dictionaries(names, inner, max_size=2)
    some = st.lists(inner, min_size=1, max_size=3)
    types = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null"])
    sizes = st.integers(0, 3)
    known: dict[str, st.SearchStrategy[Any]] = {
        "type": types | st.lists(types, min_size=1, max_size=2, unique=True),
        "const": small,
        "enum": st.lists(small, min_size=1, max_size=3),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), numbers),
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        **{f"{end}{noun}": sizes for end in ("min", "max") for noun in ("Length", "Items", "Properties", "Contains")},
        "pattern": st.sampled_from(["^a", "[0-9]$"]),
        **dict.fromkeys(
            ("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else"), inner
        ),
        **dict.fromkeys(("prefixItems", "allOf", "anyOf"), some),
        "oneOf": some,
        "uniqueItems": st.booleans(),
        **dict.fromkeys(("properties", "dependentSchemas"), members),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "[0-9]$"]), inner, max_size=2),
        "required": st.lists(names, max_size=2, unique=True),
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=2),
    }
    chosen = st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True)
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({key: known[key] for key in keys}))


schemas = st.recursive(keywords(st.booleans()), lambda inner: keywords(inner | st.booleans()), max_leaves=6)


@settings(max_examples=500)
@given(schemas, small)
def test_the_keywords_of_json_schema_mean_what_a_full_validator_makes_of_them(schema: Any, value: Any) -> None:
    assert (find_errors(schema, value) == ()) is jsonschema_rs.is_valid(schema, value)


@pytest.mark.parametrize(("value", "is_valid"), [([[], [[]]], True), ([[], [1]], False), ([], False)])
def test_references_are_followed_within_each_other(value: Any, is_valid: bool) -> None:
    tree = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Leaf"}, {"$ref": "#/$defs/Tree"}]}, "minItems": 1}
    leaf = {"not": {"contains": {}}, "$ref": "#/$defs/Circle"}
    circle = {"type": "array", "$ref": "#/$defs/Circle"}
    schema = {"$ref": "#/$defs/Tree", "$defs": {"Tree": tree, "Leaf": leaf, "Circle": circle}}
    assert (find_errors(schema, value) == ()) is is_valid


def test_a_value_nested_too_deeply_is_an_error_of_the_form() -> None:
    schema = {"$ref": "#/$defs/Tree", "$defs": {"Tree": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}
    deep = "[" * 500 + "]" * 500
    assert read_form(schema, [("data", deep)]).errors == {"data": "is nested too deeply"}


def _without_formats(schema: Any) -> Any:
    """jsonschema-rs ignores formats."""
    if isinstance(schema, dict):
        return {key: _without_formats(part) for key, part in schema.items() if key != "format"}
    return [_without_formats(part) for part in schema] if isinstance(schema, list) else schema


@given(cases(), st.lists(st.tuples(st.text(max_size=8).map(lambda name: f"data.{name}"), st.text(max_size=5))))
def test_any_pairs_give_a_value_or_errors_at_fields_that_are_there(case: Case, pairs: list[Pair]) -> None:
    schema, _ = case
    filled = read_form(schema, pairs)
    assert set(filled.errors) <= set(named(filled.field))
