"""Which of the three ways a message carries its events: rows C1 to C5."""

from __future__ import annotations

import pytest

from edda.cloudevents import http_binding
from edda.cloudevents.event import make
from edda.cloudevents.http_binding import ContentMode

from .messages import ABSENT, BATCH, STRUCTURED, binary, content_type, parse, refused, structured


@pytest.mark.parametrize(
    ("value", "body", "mode"),
    [
        ("application/cloudevents+json", structured(), ContentMode.STRUCTURED),
        ("Application/CloudEvents+JSON; charset=UTF-8", structured(), ContentMode.STRUCTURED),
        ("application/cloudevents-batch+json", b"[" + structured() + b"]", ContentMode.BATCH),
        ("APPLICATION/CLOUDEVENTS-BATCH+JSON", b"[" + structured() + b"]", ContentMode.BATCH),
    ],
)
def test_the_content_type_tells_the_mode_in_any_case(value: str, body: bytes, mode: ContentMode) -> None:
    """C1."""
    assert http_binding.parse(content_type(value), body).mode is mode


def test_any_other_content_type_or_none_means_binary() -> None:
    """C1."""
    for value in ("application/json", "application/x-cloudevents+json", None):
        assert http_binding.parse(*binary(b"1", value)).mode is ContentMode.BINARY


@pytest.mark.parametrize("mode", list(ContentMode))
def test_what_is_emitted_in_a_mode_is_read_in_that_mode(mode: ContentMode) -> None:
    """C1, emitting."""
    headers, body = http_binding.emit(make("order.paid", "/orders", "A-1", {"x": 1}), mode)
    assert http_binding.parse([(name.encode(), value.encode()) for name, value in headers], body).mode is mode


def test_a_mode_is_also_taken_by_its_name_and_an_unknown_one_is_refused() -> None:
    event = make("order.paid", "/orders", "A-1")
    assert http_binding.emit(event, "structured") == http_binding.emit(event, ContentMode.STRUCTURED)
    with pytest.raises(ValueError, match="pigeon"):
        http_binding.emit(event, "pigeon")


def test_in_structured_mode_the_body_counts_and_the_headers_do_not() -> None:
    """C2."""
    headers, _ = binary(id="from-the-header", source="not a uri")
    event = parse((headers + headers + STRUCTURED, structured(id="from-the-body")))
    assert (event.id, event.source) == ("from-the-body", "/orders")


def test_a_structured_message_is_emitted_without_headers_that_could_contradict_it() -> None:
    """C2, emitting."""
    headers, _ = http_binding.emit(make("order.paid", "/orders", "A-1"), ContentMode.STRUCTURED)
    assert [name for name, _ in headers] == ["content-type"]


@pytest.mark.parametrize(
    "value",
    [
        "application/cloudevents",
        "application/cloudevents+avro",
        "application/cloudevents+xml",
        "application/cloudevents-batch",
        "application/cloudevents-batch+avro",
        "application/cloudeventsfoo",
        "application/cloudevents+json x",
    ],
)
def test_an_unknown_format_of_cloudevents_is_answered_with_415(value: str) -> None:
    """C3: also where headers of a binary event are there."""
    assert refused([*binary()[0], *content_type(value)], structured()).status == 415


@pytest.mark.parametrize("headers", [STRUCTURED, BATCH])
def test_another_charset_than_utf8_is_answered_with_415(headers: list[tuple[bytes, bytes]]) -> None:
    """C4."""
    value = headers[0][1].decode()
    body = structured() if headers is STRUCTURED else b"[]"
    for charset in ("utf-8", "UTF-8", '"utf-8"'):
        http_binding.parse(content_type(f"{value}; charset={charset}"), body)
    for charset in ("iso-8859-1", "utf-16", '"utf-7"', "utf8"):
        assert refused(content_type(f"{value};charset={charset}"), body).status == 415


@pytest.mark.parametrize("name", ["specversion", "id", "source", "type"])
def test_a_binary_message_without_a_required_header_is_answered_with_400(name: str) -> None:
    """C5."""
    error = refused(*binary(**{name: ABSENT}))
    assert (error.status, error.attribute) == (400, name)
    assert "is missing" in str(error)


@pytest.mark.parametrize("value", ["application/json", "text/html", "nonsense", ""])
def test_what_has_no_sign_of_a_cloudevent_is_answered_with_415(value: str) -> None:
    """C5."""
    assert refused(content_type(value), b'{"id": "1"}').status == 415
    assert refused([], b"").status == 415


@pytest.mark.parametrize(
    "value", ["application/cloudevents+json", "application/cloudevents-batch+json", "application/cloudeventsx"]
)
def test_an_event_whose_data_is_of_a_format_of_cloudevents_is_sent_structured(value: str) -> None:
    """C1: in binary mode the type of its data would say what the message is."""
    event = make("order.paid", "/orders", "A-1", b"[1]", datacontenttype=value)
    headers, body = http_binding.emit(event, ContentMode.BINARY)
    message = http_binding.parse([(name.encode(), text.encode()) for name, text in headers], body)
    assert (message.mode, message.events) == (ContentMode.STRUCTURED, (event,))
