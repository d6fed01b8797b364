"""Events in JSON: rows C21 to C28."""

from __future__ import annotations

import base64
from decimal import Decimal
from typing import Any

import pytest
from msgspec import Raw

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import make
from edda.cloudevents.json_format import exact_value_of, value_of

from .messages import binary, parse, refused, refused_json, structured, structured_text

JSON_TYPES = ["application/json", "text/json", "application/vnd.x+json", "APPLICATION/JSON; charset=utf-8", "a/B+JSON"]


def with_data(text: str) -> bytes:
    return structured_text(f'"data": {text}')


@pytest.mark.parametrize("name", ["subject", "time", "dataschema", "datacontenttype", "tenant", "data_base64"])
def test_null_is_the_same_as_absent(name: str) -> None:
    """C21."""
    assert json_format.parse(structured(**{name: None})) == json_format.parse(structured())


def test_what_is_absent_is_not_emitted_as_null() -> None:
    """C21, emitting."""
    assert b"null" not in json_format.emit(make("t", "/s", "1"))


@pytest.mark.parametrize("data", [{"a": 1}, "text", None])
def test_data_and_data_base64_exclude_each_other(data: Any) -> None:
    """C22."""
    error = refused_json(structured(data=data, data_base64="AA=="))
    assert (error.status, error.attribute) == (400, "data_base64")


@pytest.mark.parametrize("datacontenttype", [None, "image/png", "application/octet-stream"])
def test_data_base64_is_bytes(datacontenttype: str | None) -> None:
    """C23: without a type that is no guess, even if it looks like JSON."""
    for content in (b"", b"\x00\xff", b'{"looks": "like JSON"}'):
        encoded = base64.b64encode(content).decode()
        event = json_format.parse(structured(datacontenttype=datacontenttype, data_base64=encoded))
        assert (event.data, event.datacontenttype) == (content, datacontenttype)
        assert json_format.parse(json_format.emit(event)) == event


@pytest.mark.parametrize(
    "value", ["!!!", "AA", "AA=", "AAAA=", "AAAA====", "A A=", "AA==AA==", "AA\n==", "_-8=", "é", 5, {}, True]
)
def test_data_base64_that_is_not_base64_is_refused(value: Any) -> None:
    """C23."""
    error = refused_json(structured(data_base64=value))
    assert (error.status, error.attribute) == (400, "data_base64")


def test_json_in_base64_is_the_same_data_as_json_in_a_body() -> None:
    """C23, C24."""
    content = b'{"amount": 1.10}'
    encoded = base64.b64encode(content).decode()
    event = json_format.parse(structured(datacontenttype="application/json", data_base64=encoded))
    assert event == parse(binary(content, "application/json"))
    broken = base64.b64encode(b"{").decode()
    assert refused_json(structured(datacontenttype="application/json", data_base64=broken)).attribute == "data"


def test_text_in_base64_is_the_same_data_as_text() -> None:
    """C23, C26."""
    encoded = base64.b64encode("café".encode()).decode()
    assert json_format.parse(structured(datacontenttype="text/plain", data_base64=encoded)) == json_format.parse(
        structured(datacontenttype="text/plain", data="café")
    )


@pytest.mark.parametrize("datacontenttype", JSON_TYPES)
@pytest.mark.parametrize("text", ['{"a": [1, 2.50]}', "[]", '"text"', '"{\\"not\\": \\"parsed\\"}"', "1.10", "true"])
def test_data_of_a_json_type_is_the_json_value(datacontenttype: str, text: str) -> None:
    """C24: a string stays a string, also if it looks like another value."""
    event = json_format.parse(structured_text(f'"datacontenttype": "{datacontenttype}", "data": {text}'))
    assert event.data == Raw(text.encode())
    assert json_format.parse(json_format.emit(event)) == event
    assert http_binding.emit(event)[1] == text.encode()


def test_a_json_string_is_read_once() -> None:
    """C24."""
    assert value_of(json_format.parse(with_data('"{\\"a\\": 1}"'))) == '{"a": 1}'
    assert value_of(make("t", "/s", "1", '{"a": 1}')) == '{"a": 1}'


@pytest.mark.parametrize("datacontenttype", ["application/jsonx", "application/x-json", "json/plain", "text/json-seq"])
def test_types_that_only_look_like_json_are_not(datacontenttype: str) -> None:
    """C24, C26."""
    assert json_format.parse(structured(datacontenttype=datacontenttype, data="x")).data == "x"


def test_null_data_is_not_the_same_as_no_data() -> None:
    """C25."""
    null, none = json_format.parse(with_data("null")), json_format.parse(structured())
    assert (null.data, none.data) == (Raw(b"null"), None)
    assert b'"data":null' in json_format.emit(null)
    assert b"data" not in json_format.emit(none)
    assert http_binding.emit(null)[1] == b"null"
    assert make("t", "/s", "1", None).data == Raw(b"null")
    assert make("t", "/s", "1").data is None


@pytest.mark.parametrize("datacontenttype", ["text/plain", "application/xml", "application/octet-stream"])
def test_data_of_another_type_is_a_string(datacontenttype: str) -> None:
    """C26."""
    event = json_format.parse(structured(datacontenttype=datacontenttype, data="<a>é</a>"))
    assert event.data == "<a>é</a>"
    assert json_format.parse(json_format.emit(event)) == event
    assert http_binding.emit(event)[1] == "<a>é</a>".encode()


@pytest.mark.parametrize("data", [1, True, None, {"a": 1}, ["x"]])
def test_data_of_another_type_that_is_no_string_is_refused(data: Any) -> None:
    """C26."""
    error = refused_json(structured(datacontenttype="text/plain", data=data))
    assert (error.status, error.attribute) == (400, "data")


def test_data_without_a_type_is_json_and_says_so_when_it_is_emitted() -> None:
    """C27."""
    event = json_format.parse(with_data('{"a": 1}'))
    assert event.data == Raw(b'{"a": 1}')
    assert b'"datacontenttype":"application/json"' in json_format.emit(event)
    assert dict(http_binding.emit(event)[0])["content-type"] == "application/json"


def test_without_data_no_type_is_invented() -> None:
    """C27."""
    assert json_format.parse(structured()).datacontenttype is None


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": 1, "\\u0061": 1}',
        '[[{"x": {"b": 1, "c": 2, "b": 1}}]]',
        "NaN",
        "[Infinity]",
        '{"a": -Infinity}',
        '"\\ud800"',
        '{"\\udc00": 1}',
        '["\\ud83dx"]',
        "01",
        "1.",
        "+1",
        "[1,]",
        "{'a': 1}",
        '"a\tb"',
        "",
        "{",
    ],
)
def test_json_that_could_mean_two_things_or_nothing_is_refused(text: str) -> None:
    """C28: wherever it stands, and as the body of a binary event as well."""
    assert refused_json(with_data(text)).status == 400
    if text:
        assert refused(*binary(text.encode(), "application/json")).status == 400


def test_a_key_that_comes_twice_is_refused_in_the_event_itself() -> None:
    """C28."""
    for members in ('"id": "A-1"', '"subject": "x", "subject": "y"', '"data": 1, "data": 1', '"a": null, "a": null'):
        assert refused_json(structured_text(members)).status == 400


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"1", b"null", b"", b" ", b"[1", b"\x00", b"{}x"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    """C28."""
    assert refused_json(body).status == 400


def test_other_encodings_and_a_byte_order_mark_are_refused() -> None:
    """C28."""
    text = structured(subject="x").decode()
    for body in (
        text.encode("utf-16"),
        text.encode("utf-32"),
        b"\xef\xbb\xbf" + text.encode(),
        text.encode().replace(b'"x"', b'"\xe9"'),
        with_data('"x"').replace(b'"x"', b'"\xed\xa0\x80"'),
    ):
        assert refused_json(body).status == 400


def nested(depth: int) -> str:
    return '[{"a":' * (depth // 2) + "[" * (depth % 2) + "]" * (depth % 2) + "}]" * (depth // 2)


def filled(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


def test_data_is_taken_to_64_levels_and_not_deeper() -> None:
    """C28: the same in every mode."""
    assert value_of(json_format.parse(with_data(filled(64)))) == value_of(
        parse(binary(filled(64).encode(), "application/json"))
    )
    assert "64 levels" in str(refused_json(with_data(filled(65))))
    assert "64 levels" in str(refused(*binary(filled(65).encode(), "application/json")))
    for depth in (100, 1_000, 100_000):
        assert "64 levels" in str(refused_json(with_data(filled(depth))))
        assert refused_json(b"[" * depth).status == 400
        assert refused_json(b'{"a":' * depth).status == 400


def test_brackets_in_strings_and_side_by_side_are_not_depth() -> None:
    """C28."""
    for text in (
        '"' + "[{" * 500 + '"',
        "[" + "[]," * 500 + "{}]",
        '"\\"' + "[" * 100 + '\\\\"',
        '{"' + "[" * 99 + '":1}',
    ):
        json_format.parse(with_data(text))
    assert refused_json(with_data('["]]]]", ' + filled(64) + "]")).status == 400


def test_numbers_are_taken_to_4300_digits_and_not_longer() -> None:
    """C28."""
    longest = "1" * 4300
    event = json_format.parse(with_data(longest))
    assert value_of(event) == exact_value_of(event) == int(longest)
    for text in ("1" * 4301, "-" + "1" * 4300, "0." + "1" * 4300, "1" * 500_000, "1e" + "1" * 5000):
        assert "digits" in str(refused_json(with_data(text)))
        assert "digits" in str(refused(*binary(f"[{text}]".encode(), "application/json")))


def test_an_exponent_that_no_decoder_takes_is_refused() -> None:
    """C28: what is taken can be read afterwards."""
    for text in ("1e999999999", "1E-999999999", "-1.5e+999999999"):
        assert exact_value_of(json_format.parse(with_data(text))) == Decimal(text)
    for text in ("1e9999999999", "1e-99999999999999999999999", "0e0000000001"):
        assert "exponent" in str(refused_json(with_data(text)))


def test_numbers_keep_their_text() -> None:
    text = b'{"a":1.10,"b":1e2,"c":12345678901234567890123,"d":-0}'
    event = json_format.parse(with_data(text.decode()))
    assert event.data == Raw(text)
    assert json_format.parse_stored(json_format.emit(event)).data == Raw(text)


def test_the_data_is_read_as_python_reads_json_or_without_losing_a_digit() -> None:
    event = json_format.parse(with_data('[1, 1.10, 1e400, 0.1, "x", null, true]'))
    assert value_of(event) == [1, 1.1, Decimal("1e400"), 0.1, "x", None, True]
    exact = exact_value_of(event)
    assert exact == [1, Decimal("1.10"), Decimal("1e400"), Decimal("0.1"), "x", None, True]
    assert str(exact[1]) == "1.10"


def test_text_and_bytes_and_no_data_are_their_own_value() -> None:
    for data in ("text", b"bytes"):
        event = make("t", "/s", "1", data, datacontenttype="text/x" if data == "text" else "image/png")
        assert value_of(event) == exact_value_of(event) == data
    assert value_of(make("t", "/s", "1")) is None


def test_errors_about_json_have_nothing_of_it() -> None:
    for text in ('{"SECRET": 1, "SECRET": 2}', '["SECRET"', '{"SECRET": NaN}', '{"SECRET": "\\ud800"}'):
        assert "SECRET" not in str(refused_json(with_data(text)))
