"""`PayloadPresenter`: JSON without secrets, cut to a size, for any stored bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edda.cloudevents import json_format
from edda.cloudevents.event import make
from edda.control.presenters import ENCRYPTED, MAX_BYTES, PayloadPresenter
from edda.core.channels import Message, pack_message
from edda.core.codec import Codec
from edda.core.exceptions import encode_failure
from edda.core.redact import REDACTED, Redaction

CODEC = Codec()
PAYLOADS = PayloadPresenter(CODEC, Redaction(["iban", "card.number", "*.note"]))


class Mask:
    """Not JSON any more, and not to be read without it."""

    def seal(self, data: bytes) -> bytes:
        return b"\x01" + bytes(byte ^ 0x5A for byte in data)

    def open(self, data: bytes) -> bytes:
        return bytes(byte ^ 0x5A for byte in data[1:])


class WrongKey(Mask):
    def open(self, data: bytes) -> bytes:
        raise KeyError("no such key")


@dataclass
class Item:
    sku: str
    price: Decimal


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        ({"a": [1, 2.5, True, "x"]}, {"a": [1, 2.5, True, "x"]}),
        (datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "2026-01-02 03:04:00+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (timedelta(minutes=5), "0:05:00"),
        (Decimal("1.10"), "1.10"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (b"\x00\xff", "AP8="),
        ((1, 2), [1, 2]),
        ({3}, [3]),
        (2**53 + 1, "9007199254740993"),
        pytest.param(10**5000, hex(10**5000), id="huge"),
        ({1: "one", (1, 2): "two"}, {"1": "one", "(1, 2)": "two"}),
        (Item("A", Decimal("2.50")), {"sku": "A", "price": "2.50"}),
        ({"$": "dollar"}, {"$": "dollar"}),
    ],
)
def test_values_without_a_json_form_are_shown_as_text(value: Any, shown: Any) -> None:
    assert PAYLOADS.value(CODEC.encode(value)) == shown


def test_secrets_are_hidden_at_every_depth() -> None:
    value = {
        "user": {"name": "Ann", "password": "p", "accessToken": "t", "API-Key": "k"},
        "payments": [{"card": {"number": "4111", "holder": "Ann"}, "IBAN": "DE1"}],
        "note": "mine",
        "number": 7,
    }
    assert PAYLOADS.value(CODEC.encode(value)) == {
        "user": {"name": "Ann", "password": REDACTED, "accessToken": REDACTED, "API-Key": REDACTED},
        "payments": [{"card": {"number": REDACTED, "holder": "Ann"}, "IBAN": REDACTED}],
        "note": "mine",
        "number": 7,
    }
    assert PAYLOADS.value(CODEC.encode({"order": {"note": "theirs"}})) == {"order": {"note": REDACTED}}


def test_secrets_of_events_and_messages_are_hidden_too() -> None:
    event = make("paid", "/shop", "1", {"token": "t", "by": "card"}, extensions={"secret": "s"})
    shown = PAYLOADS.event(json_format.emit_stored(event))
    assert shown["data"] == {"token": REDACTED, "by": "card"}
    assert (shown["type"], shown["secret"]) == ("paid", REDACTED)
    message = Message("1", "news", None, {"password": "p"}, {"token": "t"}, 0)
    shown = PAYLOADS.event(pack_message(CODEC, message))
    assert (shown["data"], shown["metadata"]) == ({"password": REDACTED}, {"token": REDACTED})


def test_secrets_among_the_paths_of_a_match_are_hidden_too() -> None:
    match = {"card.number": "4111", "order.user.token": "t", "@authorization": "a", "order.id": "A"}
    hidden = {"card.number": REDACTED, "order.user.token": REDACTED, "@authorization": REDACTED, "order.id": "A"}
    assert PAYLOADS.value(CODEC.encode(match)) == hidden


def test_a_large_value_is_cut_and_its_size_is_named() -> None:
    shown = PAYLOADS.value(CODEC.encode({"password": "p" * 9, "text": "x" * MAX_BYTES}))
    assert isinstance(shown, str)
    assert len(shown) < 5000
    assert "262," in shown
    assert "ppp" not in shown


def test_encrypted_values_are_named_as_such() -> None:
    sealed = Codec(transform=Mask()).encode({"a": 1})
    error = encode_failure(Codec(transform=Mask()), ValueError("x"))
    for codec in (CODEC, Codec(transform=WrongKey())):
        payloads = PayloadPresenter(codec, Redaction())
        assert payloads.value(sealed) == ENCRYPTED
        assert payloads.event(sealed) == ENCRYPTED
        shown = payloads.error(error)
        assert shown is not None
        assert shown.message == ENCRYPTED
    assert PayloadPresenter(Codec(transform=Mask()), Redaction()).value(sealed) == {"a": 1}


def test_values_of_a_newer_release_are_named_as_unreadable() -> None:
    assert "not readable" in PAYLOADS.value(b'{"$":"quaternion","v":1}')


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(msgspec.json.encode))
def test_showing_never_raises(data: bytes) -> None:
    for show in (PAYLOADS.value, PAYLOADS.event, PAYLOADS.error, PAYLOADS.text):
        msgspec.json.encode(show(data))


def test_deep_nesting_is_cut() -> None:
    assert "…" in str(PAYLOADS.value(b"[" * 90 + b"]" * 90))


def test_an_error_has_its_traceback_and_its_cause() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as cause:
            raise ValueError("outer") from cause
    except ValueError as error:
        shown = PAYLOADS.error(encode_failure(CODEC, error))
    assert shown is not None
    assert (shown.type, shown.message) == ("ValueError", "outer")
    assert shown.traceback is not None
    assert "caused by" in shown.traceback
    assert "KeyError: 'inner'" in shown.traceback
    assert 'raise ValueError("outer")' in shown.traceback


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://me:hunter2@example.org/a?b=1", f"GET https://me:{REDACTED}@example.org/a?b=1"),
        ("postgresql://:hunter2@db", f"postgresql://:{REDACTED}@db"),
        ("Authorization: Bearer abc.def-1234", f"Authorization: Bearer {REDACTED}"),
        ("{'Authorization': 'Basic aGVsbG8='}", f"{{'Authorization': 'Basic {REDACTED}'}}"),
        ('{"api_key": "abc", "order": "A-17"}', f'{{"api_key": {REDACTED}, "order": "A-17"}}'),
        ("token=abc&order=17", f"token={REDACTED}&order=17"),
        ("iban: DE02 is refused", f"iban: {REDACTED} is refused"),
        ("order 17 was refused: no money", "order 17 was refused: no money"),
        ("see https://example.org/a:b for tokens", "see https://example.org/a:b for tokens"),
        ("a bearer of news", "a bearer of news"),
    ],
)
def test_the_text_of_an_error_is_shown_without_credentials(text: str, shown: str) -> None:
    assert Redaction(["iban"]).censor(text) == shown


def test_the_text_of_an_error_is_shown_without_the_secrets_of_its_run() -> None:
    codec = Codec()
    payloads = PayloadPresenter(codec, Redaction(["card.number"]))
    given = {
        "password": "it's \n odd",
        "card": {"number": 4111111111111111, "holder": "Smith"},
        "pins": {"token": ["x1y2"]},
    }
    known = payloads.secrets(codec.encode(given))
    error = ValueError(f"{given!r} is refused: {given['password']}, 4111111111111111, Smith, x1y2")
    shown = payloads.error(encode_failure(codec, error), known)
    assert shown is not None
    assert "Smith" in shown.message
    assert not {"odd", "4111111111111111", "x1y2"} & set(re.split(r"[^\w]+", shown.message))


@pytest.mark.parametrize("text", ["a" * 50_000, "://:" * 20_000, "a.a-" * 20_000, "bearer " * 10_000, "'a" * 20_000])
def test_no_text_takes_long_to_look_through(text: str) -> None:
    assert Redaction().censor(text)


@pytest.mark.parametrize("unit", ["a:", "a=", "a: ", "a='", "'a': {", "a.b="])
def test_a_long_text_of_pairs_within_pairs_is_read_to_its_end(unit: str) -> None:
    """A recursion of its own depth would end in a RecursionError, in the middle of a page or of a log line."""
    assert "S3CRET" not in Redaction().censor(unit * 20_000 + "password=S3CRET")
