"""Several events at once, and sizes: rows C29 to C31."""

from __future__ import annotations

import pytest

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import CloudEvent, make
from edda.errors import EventError

from .messages import BATCH, binary, parse, refused, structured


def batch(*items: bytes) -> bytes:
    return b"[" + b",".join(items) + b"]"


def test_a_batch_is_an_array_of_events_in_their_order() -> None:
    """C29."""
    body = batch(structured(id="1"), structured(id="2", data={"a": 1}), structured(id="1"))
    assert [event.id for event in http_binding.parse(BATCH, body).events] == ["1", "2", "1"]


def test_an_empty_batch_is_valid() -> None:
    """C29."""
    assert http_binding.parse(BATCH, b" [] ").events == ()
    assert http_binding.emit_batch([])[1] == b"[]"


def test_the_events_of_a_batch_may_be_of_different_kinds() -> None:
    """C29, both ways."""
    events = (
        make("a", "/s", "1", {"x": 1}, extensions={"n": 5}),
        make("b", "/s", "2", b"\x00"),
        make("c", "/s", "3", "text", datacontenttype="text/plain"),
        make("d", "/s", "4"),
    )
    headers, body = http_binding.emit_batch(events)
    assert http_binding.parse([(name.encode(), value.encode()) for name, value in headers], body).events == events


def test_every_event_that_is_not_valid_is_named_by_its_number_counted_from_1() -> None:
    """C29: with the reasons of the first of them."""
    body = batch(structured(), structured(id=""), b"5", structured(), structured(specversion="0.3"), b'{"a":1,"a":1}')
    error = refused(BATCH, body)
    assert error.status == 400
    assert "of its 6 events, counted from 1, invalid are: 2, 3, 5, 6 (event 2: id " in str(error)
    assert "event 5: specversion" in str(error)
    assert "event 6: " not in str(error)


def test_events_of_another_version_are_refused_in_a_batch_as_well() -> None:
    """C29."""
    assert "invalid are: 2 (event 2: specversion" in str(
        refused(BATCH, batch(structured(), structured(specversion="1.1")))
    )


@pytest.mark.parametrize("body", [b"{}", structured(), b"null", b"", b"[", b"[1,]", b"[]]", b"\xff", b"[" * 100_000])
def test_a_batch_that_is_no_array_is_refused(body: bytes) -> None:
    """C29."""
    assert refused(BATCH, body).status == 400


def test_a_batch_with_a_bad_event_is_not_emitted() -> None:
    """C29, emitting."""
    with pytest.raises(EventError):
        json_format.emit_batch([make("a", "/s", "1"), CloudEvent(id="", source="/s", type="a")])


def test_a_batch_of_more_events_than_the_receiver_takes_is_answered_with_413() -> None:
    """C30."""
    assert len(http_binding.parse(BATCH, batch(*[structured()] * 100)).events) == 100
    assert refused(BATCH, batch(*[structured()] * 101)).status == 413
    assert len(http_binding.parse(BATCH, batch(structured(), structured()), max_batch=2).events) == 2
    assert refused(BATCH, batch(structured(), structured(), structured()), max_batch=2).status == 413


def test_batches_can_be_switched_off() -> None:
    """C30."""
    assert refused(BATCH, batch(structured()), max_batch=0).status == 415


@pytest.mark.parametrize("size", [64 << 10, 1 << 20])
def test_large_events_are_taken(size: int) -> None:
    """C31: how large the whole message may be is the endpoint's to say."""
    text = "x" * size
    assert json_format.parse(structured(data=text)).data == parse(binary(f'"{text}"'.encode(), "application/json")).data
    assert parse(binary(subject=text[: 60 << 10])).subject == text[: 60 << 10]
