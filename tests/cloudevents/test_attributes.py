"""What attributes may be, in headers, in JSON and in events of our own: rows C13 to C20."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import CloudEvent, make
from edda.errors import EventError

from .messages import ABSENT, binary, both_refused, both_taken, parse, refused, refused_json, structured

REQUIRED = ("specversion", "id", "source", "type")


def refused_by_make(**changes: Any) -> EventError:
    with pytest.raises(EventError) as caught:
        make(**{"type": "order.paid", "source": "/orders", "id": "A-1", **changes})
    return caught.value


def extended(**extensions: Any) -> CloudEvent:
    return make("order.paid", "/orders", "A-1", extensions=extensions)


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", [ABSENT, None, "", 1, True, 1.0, {}, []])
def test_a_required_attribute_is_a_string_that_is_not_empty(name: str, value: Any) -> None:
    """C13: nothing is invented for it either."""
    error = refused_json(structured(**{name: value}))
    assert (error.status, error.attribute) == (400, name)


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", ["", '""', " "])
def test_a_required_header_is_not_empty(name: str, value: str) -> None:
    """C13."""
    error = refused(*binary(**{name: value}))
    assert (error.status, error.attribute) == (400, name)


@pytest.mark.parametrize("name", ["id", "source", "type"])
@pytest.mark.parametrize("value", [None, "", 1, b"1"])
def test_an_event_of_our_own_needs_them_as_well(name: str, value: Any) -> None:
    """C13, emitting."""
    assert refused_by_make(**{name: value}).attribute == name


@pytest.mark.parametrize("emit", [json_format.emit, http_binding.emit])
def test_what_is_no_event_is_not_emitted(emit: Any) -> None:
    """C13, emitting."""
    with pytest.raises(EventError):
        emit(CloudEvent(id="", source="/orders", type="order.paid"))


@pytest.mark.parametrize("value", ["1", "1.1", "0.3", "1.0.2", "2.0", "v1.0", " 1.0x"])
def test_only_version_1_0_is_taken(value: str) -> None:
    """C14."""
    both_refused("specversion", value)


def test_what_is_emitted_says_version_1_0() -> None:
    """C14, emitting."""
    event = make("order.paid", "/orders", "A-1")
    assert dict(http_binding.emit(event)[0])["ce-specversion"] == "1.0"
    assert b'"specversion":"1.0"' in json_format.emit(event)


@pytest.mark.parametrize(
    "value",
    [
        "/orders",
        "orders",
        "./a:b",
        "?q=1",
        "#top",
        "//host/path",
        "urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66",
        "mailto:cncf@example.com",
        "https://user:pw@example.com:8080/a/b;c=d/e?f=g/?h#i/?j",
        "https://[2001:db8::7]:443/x",
        "https://example.com/~a/b_c/d.e/%20",
        "http://",
        "file:///etc/x",
        "a//b",
        "tel:+1-816-555-1212",
        "//[v1.a:b]",
    ],
)
def test_a_source_is_any_uri_reference(value: str) -> None:
    """C15."""
    assert json_format.parse(structured(source=value)).source == value
    event = make("order.paid", value, "A-1")
    headers, body = http_binding.emit(event)
    assert parse(([(name.encode(), text.encode()) for name, text in headers], body)).source == value


@pytest.mark.parametrize(
    "value",
    [
        "my orders",
        "1a:b",
        ":a",
        "/a\\b",
        "/a|b",
        "/ä",
        "https://exa mple.com",
        "https://[::1",
        "https://a]b",
        "https://host:port/",
        "/a#b#c",
        "<urn:x>",
        "{a}",
        "/a^b",
        "a`b",
    ],
)
def test_a_source_that_is_no_uri_reference_is_refused(value: str) -> None:
    """C15."""
    both_refused("source", value)


def test_a_percent_in_a_source_has_two_digits() -> None:
    """C15."""
    for value in ("/100%", "/%zz", "/%4"):
        assert refused_json(structured(source=value)).attribute == "source"


@pytest.mark.parametrize("value", ["https://example.com/order.json", "urn:x:y", "https://example.com/s#/definitions/A"])
def test_a_dataschema_is_an_absolute_uri(value: str) -> None:
    """C15."""
    both_taken("dataschema", value)


@pytest.mark.parametrize("value", ["", "/order.json", "order.json", "//example.com/x", "https://exa mple.com", "1:x"])
def test_a_dataschema_that_is_relative_or_empty_is_refused(value: str) -> None:
    """C15."""
    both_refused("dataschema", value)


def test_a_subject_is_any_text_but_none_at_all() -> None:
    """C15."""
    both_taken("subject", "order 17 of 3 | €")
    both_refused("subject", "")


@pytest.mark.parametrize(
    "value",
    [
        "application/json",
        "APPLICATION/JSON",
        "text/plain;charset=utf-8",
        'text/plain ; charset="utf-8" ; format=flowed',
        "multipart/form-data; boundary=----x",
        "application/json;",
        "application/vnd.a.b-c+json",
        r'text/plain; a="b\"c;d"',
    ],
)
def test_a_datacontenttype_is_a_media_type(value: str) -> None:
    """C15."""
    assert parse(binary(b"1", value)).datacontenttype == value
    assert json_format.parse(structured(datacontenttype=value)).datacontenttype == value
    assert make("t", "/s", "1", b"1", datacontenttype=value).datacontenttype == value


@pytest.mark.parametrize(
    "value", ["xyz", "a/b/c", "/json", "text/", "text /plain", "text/plain; charset", 'text/plain; a="b', "a/b c"]
)
def test_a_datacontenttype_that_is_no_media_type_is_refused(value: str) -> None:
    """C15."""
    assert refused(*binary(b"1", value)).attribute == "datacontenttype"
    assert refused_json(structured(datacontenttype=value)).attribute == "datacontenttype"
    assert refused_by_make(datacontenttype=value).attribute == "datacontenttype"


@pytest.mark.parametrize(
    "value",
    [
        "2018-04-05T17:31:00Z",
        "2018-04-05T17:31:00.123456789Z",
        "2018-04-05T17:31:00+05:30",
        "2018-04-05T17:31:00-23:59",
        "2018-04-05t17:31:00z",
        "2016-12-31T23:59:60Z",
        "2024-02-29T00:00:00Z",
        "0000-02-29T00:00:00Z",
        "9999-12-31T23:59:59.999999999999Z",
    ],
)
def test_a_time_is_kept_as_the_text_that_came(value: str) -> None:
    """C16."""
    both_taken("time", value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "lunchtime",
        "2018-04-05T18:31Z",
        "2018-04-05T17:31:00",
        "2018-04-05T17:31:00+05",
        "2018-04-05T17:31:00+0500",
        "2018-04-05T17:31:00+25:00",
        "2018-04-05T17:31:00+05:60",
        "2018-04-05 17:31:00Z",
        "2018-02-30T17:31:00Z",
        "2023-02-29T17:31:00Z",
        "2018-13-05T17:31:00Z",
        "2018-00-05T17:31:00Z",
        "2018-04-00T17:31:00Z",
        "2018-04-05T24:00:00Z",
        "2018-04-05T17:60:00Z",
        "2018-04-05T17:31:61Z",
        "2018-04-05T17:31:00.Z",
        "18-04-05T17:31:00Z",
        "2018-04-05",
        "1522949460",
        "２018-04-05T17:31:00Z",
    ],
)
def test_a_time_that_is_not_as_in_rfc_3339_is_refused(value: str) -> None:
    """C16."""
    both_refused("time", value)


def test_a_datetime_becomes_a_time_and_one_without_a_zone_is_refused() -> None:
    """C16, emitting."""
    noon = datetime(2026, 1, 31, 12)
    written = [
        make("t", "/s", "1", time=noon.replace(tzinfo=zone)).time for zone in (UTC, timezone(timedelta(hours=5.5)))
    ]
    assert written == ["2026-01-31T12:00:00Z", "2026-01-31T12:00:00+05:30"]
    assert refused_by_make(time=noon).attribute == "time"
    assert refused_by_make(time="lunchtime").attribute == "time"


@pytest.mark.parametrize("name", ["a", "7", "tenant", "7days", "x" * 21, "x" * 200])
def test_long_names_and_names_with_a_leading_digit_are_taken(name: str) -> None:
    """C17."""
    both_taken(name, "blue")
    assert extended(**{name: "blue"}).extensions == {name: "blue"}


@pytest.mark.parametrize("name", ["", "my-tenant", "my_tenant", "my.tenant", "tenant!", "ténant"])
def test_other_names_are_refused(name: str) -> None:
    """C17."""
    assert refused(*binary(**{name: "blue"})).status == 400
    assert refused_json(structured(**{name: "blue"})).status == 400
    with pytest.raises(EventError):
        extended(**{name: "blue"})


def test_capitals_in_a_name_are_refused_where_they_can_be_seen() -> None:
    """C17: in HTTP they say nothing."""
    assert refused_json(structured(Tenant="blue")).status == 400
    with pytest.raises(EventError):
        extended(Tenant="blue")


def test_data_is_no_name_for_an_attribute() -> None:
    """C17."""
    assert refused(*binary(data="x")).attribute == "data"


@pytest.mark.parametrize("name", ["data", "id", "specversion", "datacontenttype"])
def test_an_extension_cannot_stand_for_an_attribute_of_every_event(name: str) -> None:
    """C17, emitting."""
    with pytest.raises(EventError) as caught:
        extended(**{name: "x"})
    assert caught.value.attribute == name


FORBIDDEN = [0x00, 0x0A, 0x1F, 0x7F, 0x80, 0x9F, 0xFDD0, 0xFDEF, 0xFFFE, 0xFFFF, 0x1FFFE, 0x10FFFF]


@pytest.mark.parametrize("code", FORBIDDEN)
@pytest.mark.parametrize("name", ["id", "type", "subject", "tenant"])
def test_control_characters_and_noncharacters_are_refused(name: str, code: int) -> None:
    """C18."""
    encoded = "".join(f"%{byte:02X}" for byte in chr(code).encode())
    assert refused(*binary(**{name: f"a{encoded}b"})).attribute == name
    assert refused_json(structured(**{name: f"a{chr(code)}b"})).attribute == name
    fields = {name: f"a{chr(code)}b"} if name != "tenant" else {"extensions": {name: chr(code)}}
    assert refused_by_make(**fields).attribute == name


def test_half_a_surrogate_pair_is_refused() -> None:
    """C18."""
    assert refused_json(structured(subject="\ud800")).status == 400
    assert refused_json(structured(subject="\udc00\ud800")).status == 400
    assert refused_by_make(subject="\ud800").attribute == "subject"
    assert json_format.parse(structured(subject="😀")).subject == "😀"


@pytest.mark.parametrize("value", ["\xa0", "\ufdcf", "\ufdf0", "\ufffd", "\U0001fffd", "日本語"])
def test_every_other_character_is_taken(value: str) -> None:
    """C18."""
    both_taken("tenant", value)


@pytest.mark.parametrize("value", [0, -1, 2**31 - 1, -(2**31), True, False, "", "5"])
def test_an_extension_is_a_string_an_integer_of_32_bits_or_a_boolean(value: Any) -> None:
    """C19."""
    event = json_format.parse(structured(tenant=value))
    assert event.extensions == {"tenant": value}
    assert type(event.extensions["tenant"]) is type(value)
    assert json_format.parse(json_format.emit(event)) == event
    assert json_format.parse_stored(json_format.emit(event)) == event


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 10**30, 1.0, 1.5, 1e300, {}, {"a": 1}, [], [1]])
def test_other_values_of_an_extension_are_refused(value: Any) -> None:
    """C19."""
    error = refused_json(structured(tenant=value))
    assert (error.status, error.attribute) == (400, "tenant")
    with pytest.raises(EventError):
        extended(tenant=value)


def test_in_headers_integers_and_booleans_are_their_text() -> None:
    """C19."""
    headers = dict(http_binding.emit(extended(count=-5, urgent=True, late=False))[0])
    assert (headers["ce-count"], headers["ce-urgent"], headers["ce-late"]) == ("-5", "true", "false")


def test_bytes_and_times_as_extensions_are_written_as_the_specification_says() -> None:
    """C19, emitting."""
    event = extended(token=b"\x00\xff", expirytime=datetime(2026, 1, 31, tzinfo=UTC))
    assert event.extensions == {"token": "AP8=", "expirytime": "2026-01-31T00:00:00Z"}
    with pytest.raises(EventError, match="expirytime"):
        extended(expirytime=datetime(2026, 1, 31))


def test_unknown_extensions_are_kept_and_passed_on() -> None:
    """C20."""
    known = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "partitionkey": "A-17",
        "sequence": "0000042",
        "dataref": "https://example.com/big/1",
    }
    extensions = {**known, "somethingelse": "Blå"}
    for event in (parse(binary(**extensions)), json_format.parse(structured(**extensions))):
        assert event.extensions == extensions
        headers, body = http_binding.emit(event)
        assert parse(([(name.encode(), value.encode()) for name, value in headers], body)) == event


def test_the_target_of_an_event_is_an_extension() -> None:
    """C20."""
    assert extended(eddainstanceid="run-1").target == "run-1"
    assert extended(eddainstanceid=17).target == "17"
    assert extended().target is None


def test_ids_and_types_longer_than_the_database_takes_are_refused() -> None:
    for name, longest in (("id", "é" * 512), ("source", "s" * 1024), ("type", "é" * 255)):
        assert getattr(json_format.parse(structured(**{name: longest})), name) == longest
        both_refused(name, longest + "a")
        assert refused_by_make(**{name: longest + "a"}).attribute == name


@pytest.mark.parametrize("name", ["id", "source", "type", "time", "subject", "dataschema", "datacontenttype", "tenant"])
def test_an_error_has_nothing_of_what_was_sent_but_the_name(name: str) -> None:
    error = refused_json(structured(**{name: "SECRET \x00 <script>"}))
    assert error.attribute == name
    assert "SECRET" not in str(error)
    assert "script" not in str(error)


def test_a_name_that_is_wrong_is_not_repeated_and_a_long_one_is_cut() -> None:
    assert "script" not in str(refused_json(structured(**{"<script>": "x"})))
    error = refused_json(structured(**{"x" * 100_000: 1.5}))
    assert len(str(error)) < 200
    assert len(error.attribute or "") < 100
