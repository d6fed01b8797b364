"""Events of our own: from Python values to what the rest of the world reads; row C32."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pydantic
import pytest
from msgspec import Raw

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import CloudEvent, make
from edda.errors import EventError


class Colour(Enum):
    RED = "red"


class Size(IntEnum):
    LARGE = 3


class Kind(StrEnum):
    NEW = "new"


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal


class Order(pydantic.BaseModel):
    order_id: str = pydantic.Field(alias="orderId")
    amount: Decimal
    at: datetime | None = None


class Point(NamedTuple):
    x: int
    y: int


class Pair(msgspec.Struct):
    a: int
    b: Any = None


def text_of(value: Any, **options: Any) -> str:
    data = make("t", "/s", "1", value, **options).data
    assert isinstance(data, Raw)
    return bytes(data).decode()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, "x", None, True, 1.5]}, '{"a":[1,"x",null,true,1.5]}'),
        ({"$": "uuid", "v": 1}, '{"$":"uuid","v":1}'),
        ((1, 2), "[1,2]"),
        ({5}, "[5]"),
        (deque([1]), "[1]"),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
        (
            {1: "a", Kind.NEW: "b", Size.LARGE: "c", date(2026, 1, 31): "d"},
            '{"1":"a","new":"b","3":"c","2026-01-31":"d"}',
        ),
        (10**30, "1" + "0" * 30),
        (Decimal("1.10"), "1.10"),
        (Decimal("1E+5"), "1E+5"),
        ([Colour.RED, Size.LARGE, Kind.NEW], '["red",3,"new"]'),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), '"2026-01-31T12:00:00Z"'),
        ([date(2026, 1, 31), time(12, 30)], '["2026-01-31","12:30:00"]'),
        (timedelta(seconds=90), '"PT90S"'),
        (UUID(int=5), '"00000000-0000-0000-0000-000000000005"'),
        ({"nested": b"\x00\xff"}, '{"nested":"AP8="}'),
        (Line("S-1", Decimal("1.10")), '{"sku":"S-1","price":1.10}'),
        (Point(1, 2), '{"x":1,"y":2}'),
        ([Pair(1, Line("S", Decimal(2)))], '[{"a":1,"b":{"sku":"S","price":2}}]'),
        (Raw(b'{"a": 1.10}'), '{"a": 1.10}'),
        ("text", '"text"'),
        (None, "null"),
    ],
)
def test_python_values_become_plain_json(value: Any, text: str) -> None:
    event = make("t", "/s", "1", value)
    assert (text_of(value), event.datacontenttype) == (text, "application/json")
    assert json_format.parse(json_format.emit(event)) == event


def test_a_pydantic_model_is_written_by_itself_under_the_names_it_reads() -> None:
    order = Order(orderId="A-17", amount=Decimal("1.10"), at=datetime(2026, 1, 31, tzinfo=UTC))
    text = '{"orderId":"A-17","amount":"1.10","at":"2026-01-31T00:00:00Z"}'
    assert text_of(order) == text
    assert text_of({"orders": [order]}) == f'{{"orders":[{text}]}}'
    assert Order.model_validate_json(text) == order


def test_a_json_type_that_is_given_is_kept() -> None:
    event = make("t", "/s", "1", {"a": 1}, datacontenttype="application/vnd.order+json")
    assert (event.data, event.datacontenttype) == (Raw(b'{"a":1}'), "application/vnd.order+json")


def test_bytes_are_binary_unless_their_type_says_json_or_text() -> None:
    for value in (b"\x00", bytearray(b"\x00"), memoryview(b"\x00")):
        event = make("t", "/s", "1", value)
        assert (event.data, event.datacontenttype) == (b"\x00", "application/octet-stream")
    assert make("t", "/s", "1", b"\x00", datacontenttype="image/png").data == b"\x00"
    assert make("t", "/s", "1", b'{"a": 1}', datacontenttype="application/json").data == Raw(b'{"a": 1}')
    assert make("t", "/s", "1", b"text", datacontenttype="text/plain").data == "text"


def test_a_string_of_another_type_is_text() -> None:
    event = make("t", "/s", "1", "<a/>", datacontenttype="application/xml")
    assert event.data == "<a/>"
    with pytest.raises(EventError, match="string or bytes"):
        make("t", "/s", "1", {"a": 1}, datacontenttype="application/xml")


def loop() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def deep(levels: int) -> Any:
    value: Any = Decimal(1)
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"items": [{"price": float("nan")}]}, r"data\.items\[0\]\.price is not a finite number"),
        ([Decimal("Infinity")], r"data\[0\] is not a finite number"),
        ({"a": object()}, r"data\.a is of object"),
        ({"a": {1.5: "x"}}, r"data\.a\[1\.5\] is a key of float"),
        ({True: "x"}, "is a key of bool"),
        ({1: "a", "1": "b"}, "text of two keys"),
        ((item for item in "ab"), "data is of generator"),
        ("\ud800", "surrogate"),
        ({"a": ("\ud800",)}, "surrogate"),
        ({"\ud800": 1}, "surrogate"),
        (loop(), "64 levels"),
        ([loop(), Decimal(1)], "64 levels"),
        (deep(65), "64 levels"),
        ([10**5000], "digits"),
        (Decimal("1E+9999999999"), "exponent"),
        (Raw(b"{"), "not JSON"),
        ({"a": Raw(b"1,")}, "not JSON"),
        (Raw(b'{"a":1,"a":2}'), "twice"),
    ],
)
def test_a_value_that_json_cannot_say_is_refused_with_its_place(value: Any, problem: str) -> None:
    with pytest.raises(EventError, match=problem) as caught:
        make("t", "/s", "1", value)
    assert caught.value.attribute == "data"


def test_a_model_that_cannot_be_written_is_refused() -> None:
    class Odd(pydantic.BaseModel):
        thing: Any

    with pytest.raises(EventError, match=r"data\[0\] cannot be written by its model"):
        make("t", "/s", "1", [Odd(thing=object())])


def test_data_as_deep_as_is_taken_can_be_made() -> None:
    event = make("t", "/s", "1", deep(64))
    assert json_format.parse(json_format.emit(event)) == event


@pytest.mark.parametrize(
    "wrong",
    [
        CloudEvent(id="1", source="/s", type="t", data=Raw(b"1")),
        CloudEvent(id="1", source="/s", type="t", data=Raw(b"1"), datacontenttype="text/plain"),
        CloudEvent(id="1", source="/s", type="t", data=b"1", datacontenttype="application/json"),
        CloudEvent(id="1", source="/s", type="t", data="1", datacontenttype="application/json"),
        CloudEvent(id="1", source="/s", type="t", data="1"),
    ],
)
@pytest.mark.parametrize("emit", [json_format.emit, http_binding.emit])
def test_data_that_is_not_what_its_type_says_is_not_emitted(wrong: CloudEvent, emit: Any) -> None:
    with pytest.raises(EventError) as caught:
        emit(wrong)
    assert caught.value.attribute == "data"


def test_what_is_sent_again_has_every_attribute_it_had_at_first() -> None:
    """C32: the stored form is the event, whole."""
    event = make(
        "order.paid",
        "https://example.com/orders",
        "A-1",
        {"amount": Decimal("1.10")},
        time="2018-04-05T17:31:00.123456789+05:30",
        subject="order 17",
        datacontenttype="application/vnd.order+json; v=2",
        dataschema="https://example.com/order.json",
        extensions={"tenant": "blå", "count": 5, "urgent": True},
    )
    stored = json_format.emit(event)
    first = [http_binding.emit(event, mode) for mode in http_binding.ContentMode]
    again = [http_binding.emit(json_format.parse_stored(stored), mode) for mode in http_binding.ContentMode]
    assert again == first
    assert json_format.parse_stored(stored) == event


@pytest.mark.parametrize(
    "event",
    [
        make("t", "/s", "1"),
        make("t", "/s", "1", None),
        make("t", "/s", "1", b""),
        make("t", "/s", "1", b"\x00\xff"),
        make("t", "/s", "1", "", datacontenttype="text/plain"),
        make("t", "/s", "1", "text", datacontenttype="text/plain"),
        make("t", "/s", "1", b"caf\xe9", datacontenttype="text/plain"),
        make("t", "/s", "1", datacontenttype="application/json"),
    ],
)
def test_what_was_stored_is_what_is_read(event: CloudEvent) -> None:
    assert json_format.parse_stored(json_format.emit(event)) == event
    assert json_format.parse(json_format.emit(event)) == event
