"""Data from outside becomes the model that was asked for, or every part that does not fit is named."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import typing
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Generic, Literal, NewType, NotRequired, Required, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pydantic.dataclasses
import pytest
import typing_extensions

from edda.core.validation import ValidationFailure, validate

T = TypeVar("T")


class Colour(Enum):
    RED = "red"


class Payment(pydantic.BaseModel):
    amount: float
    paid_at: datetime
    note: str = ""

    @pydantic.field_validator("note")
    @classmethod
    def is_polite(cls, note: str) -> str:
        if note == "rude":
            raise ValueError("be polite")
        return note


class Strict(pydantic.BaseModel, strict=True):
    paid_at: datetime


@dataclasses.dataclass
class Item:
    name: str
    price: Decimal


@pydantic.dataclasses.dataclass
class Box:
    size: int = pydantic.Field(gt=0)


class Struct(msgspec.Struct):
    size: int


class Row(typing.TypedDict):
    id: int
    children: NotRequired[list[Row]]


class WideRow(Row, total=False):
    colour: Colour
    name: Required[str]


class ModernRow(typing_extensions.TypedDict):
    id: int
    children: NotRequired[list[ModernRow]]


class Page(typing.TypedDict, Generic[T]):
    items: list[T]


@pydantic.with_config(pydantic.ConfigDict(extra="forbid"))
class StrictRow(typing.TypedDict):
    id: int


@dataclasses.dataclass
class Sheet:
    row: Row
    page: Page[int]


class RenamedRow(typing.TypedDict):
    id: int


@dataclasses.dataclass
class RenamedSheet:
    row: RenamedRow


class AliasedRow(typing.TypedDict):
    id: int


SecretSheet = NewType("SecretSheet", RenamedSheet)
Rows = typing_extensions.TypeAliasType("Rows", list[AliasedRow])


def read(raw: str, model: Any) -> Any:
    return validate(json.loads(raw), raw.encode(), model)


def complaints(raw: str, model: Any) -> dict[str, str]:
    with pytest.raises(ValidationFailure) as caught:
        read(raw, model)
    return dict(caught.value.errors)


NOW = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
NOT_AN_INTEGER = "Input should be a valid integer, unable to parse string as an integer"


@pytest.mark.parametrize(
    ("raw", "model", "value"),
    [
        ('{"amount": 1, "paid_at": "2024-05-06T07:08:09Z"}', Payment, Payment(amount=1, paid_at=NOW)),
        ('{"name": "tea", "price": "1.50"}', Item, Item("tea", Decimal("1.50"))),
        ('{"size": 2}', Box, Box(2)),
        ('{"size": 2}', Struct, Struct(2)),
        ('{"id": 1, "children": [{"id": 2}]}', Row, {"id": 1, "children": [{"id": 2}]}),
        ('{"id": 1, "children": [{"id": 2}]}', ModernRow, {"id": 1, "children": [{"id": 2}]}),
        ('{"id": 1, "name": "a", "colour": "red"}', WideRow, {"id": 1, "name": "a", "colour": Colour.RED}),
        ('{"id": 1, "name": "a"}', WideRow, {"id": 1, "name": "a"}),
        ('{"items": ["2024-05-06T07:08:09Z"]}', Page[datetime], {"items": [NOW]}),
        ('{"items": ["1"]}', Page[int], {"items": [1]}),
        ('{"items": ["1"]}', Page, {"items": ["1"]}),
        ('{"row": {"id": 1}, "page": {"items": [2]}}', Sheet, Sheet({"id": 1}, {"items": [2]})),
        ('{"row": {"id": 1}}', SecretSheet, RenamedSheet({"id": 1})),
        ('[{"id": 1}]', Rows, [{"id": 1}]),
        ('[{"size": 2}]', list[Box], [Box(2)]),
        ('[{"size": 2}]', list[Struct], [Struct(2)]),
        ('{"name": "tea", "price": 2}', Box | Item, Item("tea", Decimal(2))),
        ("null", Item | None, None),
        ("null", None, None),
        ('"a"', Literal["a", "b"], "a"),
        ('"a"', str, "a"),
        ('"a"', bytes, b"a"),
        ("7", int, 7),
        ('{"a": 1}', dict[str, int], {"a": 1}),
        ('{"a": [1.5]}', Any, {"a": [1.5]}),
        ('"1.50"', Decimal, Decimal("1.50")),
        ('"2024-05-06T07:08:09Z"', datetime, NOW),
        ('"red"', Colour, Colour.RED),
        ('"00000000-0000-0000-0000-000000000001"', UUID, UUID(int=1)),
        ("5", Annotated[int, pydantic.Field(gt=0)], 5),
    ],
)
def test_json_becomes_what_the_model_says(raw: str, model: Any, value: Any) -> None:
    got = read(raw, model)
    assert (type(got), got) == (type(value), value)


def test_a_strict_model_takes_from_json_what_json_can_only_say_as_text() -> None:
    assert read('{"paid_at": "2024-05-06T07:08:09Z"}', Strict) == Strict(paid_at=NOW)


def test_data_that_is_not_json_is_taken_as_it_is() -> None:
    assert validate(b"\x00", None, bytes) == b"\x00"
    assert validate("text", None, str) == "text"
    assert validate(None, None, Item | None) is None


def test_every_field_of_a_model_that_does_not_fit_is_named() -> None:
    assert complaints('{"amount": "abc", "note": "rude"}', Payment) == {
        "amount": "Input should be a valid number, unable to parse string as a number, got str",
        "paid_at": "Field required",
        "note": "Value error, be polite, got str",
    }


@pytest.mark.parametrize("model", [Row, ModernRow])
def test_every_item_of_a_typed_dict_that_does_not_fit_is_named(model: Any) -> None:
    assert complaints('{"id": "x", "children": [{"id": 1}, {"id": "y"}, {}]}', model) == {
        "id": f"{NOT_AN_INTEGER}, got str",
        "children[1].id": f"{NOT_AN_INTEGER}, got str",
        "children[2].id": "Field required",
    }


def test_a_typed_dict_keeps_its_required_items_when_inherited() -> None:
    assert complaints("{}", WideRow) == {"id": "Field required", "name": "Field required"}


def test_a_typed_dict_inside_a_dataclass_is_validated_like_one_outside() -> None:
    assert complaints('{"row": {"id": "x"}, "page": {"items": [1, "y"]}}', Sheet) == {
        "row.id": f"{NOT_AN_INTEGER}, got str",
        "page.items[1]": f"{NOT_AN_INTEGER}, got str",
    }


def test_a_typed_dict_keeps_its_configuration() -> None:
    assert complaints('{"id": 1, "more": 2}', StrictRow) == {"more": "Extra inputs are not permitted, got int"}


@pytest.mark.parametrize(
    ("raw", "model", "expected"),
    [
        ("[1]", int, {"$": "Input should be a valid integer, got list"}),
        ('{"size": 0}', Box, {"size": "Input should be greater than 0, got int"}),
        ('{"a b": "x"}', dict[str, int], {"['a b']": f"{NOT_AN_INTEGER}, got str"}),
        ('["x", 1, "y"]', list[int], {"[0]": f"{NOT_AN_INTEGER}, got str", "[2]": f"{NOT_AN_INTEGER}, got str"}),
        ('{"size": "x"}', Struct, {"size": "expected int, got str"}),
        ('[{"size": "x"}]', list[Struct], {"[0].size": "expected int, got str"}),
        ("{}", Struct, {"$": "Struct refuses the value: Missing required argument 'size'"}),
        ("2", Annotated[int, pydantic.Field(gt=3)], {"$": "Input should be greater than 3, got int"}),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(raw: str, model: Any, expected: dict[str, str]) -> None:
    assert complaints(raw, model) == expected


def test_a_misfit_reads_as_one_line_for_each_field() -> None:
    with pytest.raises(ValidationFailure) as caught:
        read('{"id": "x", "name": 5}', WideRow)
    assert str(caught.value) == f"id: {NOT_AN_INTEGER}, got str\nname: Input should be a valid string, got int"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


Tagged = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


@pytest.mark.parametrize(
    "model", [int, Box, Struct, list[int], dict[str, int], Annotated[int, pydantic.Field(gt=3)], Tagged]
)
@pytest.mark.parametrize(
    "data",
    [
        "hunter2",
        ["hunter2"],
        {"password": "hunter2"},
        {"size": "hunter2"},
        {"size": {"a": ["hunter2"]}},
        {"kind": "hunter2"},
    ],
)
def test_no_value_is_repeated(model: Any, data: Any) -> None:
    """It may be that of a field which is redacted."""
    with pytest.raises(ValidationFailure) as caught:
        read(json.dumps(data), model)
    assert "hunter2" not in f"{caught.value!s}{caught.value!r}"


def test_of_very_many_errors_the_first_are_shown_and_the_others_counted() -> None:
    with pytest.raises(ValidationFailure) as caught:
        read(json.dumps(["x"] * 1_234), list[int])
    assert len(caught.value.errors) == 101
    assert caught.value.errors[-1] == ("…", "1,134 more")


def test_of_two_unions_each_keeps_its_own_order() -> None:
    @dataclasses.dataclass
    class Crate:
        size: int

    for first, second in ((Box, Crate), (Crate, Box)):
        assert type(read('{"size": 1}', first | second)) is first


def test_a_broken_model_is_its_author_s_error_and_no_misfit() -> None:
    fields: dict[str, Any] = {"part": ("Nowhere", ...)}
    Broken = pydantic.create_model("Broken", **fields)
    with pytest.raises(pydantic.errors.PydanticUserError, match="Broken"):
        read("{}", Broken)


def test_pydantic_is_loaded_only_when_something_is_validated() -> None:
    check = "import sys, edda.core.validation; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
