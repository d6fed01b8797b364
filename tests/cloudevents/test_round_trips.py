"""An event is the same event, however often and in whichever mode it travels."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import CloudEvent, make
from edda.cloudevents.http_binding import ContentMode

RESERVED = {"id", "source", "type", "time", "subject", "specversion", "data", "datacontenttype", "dataschema"}
FORBIDDEN = [
    chr(code) for code in (*range(0xFDD0, 0xFDF0), *(p << 16 | n for p in range(17) for n in (0xFFFE, 0xFFFF)))
]
texts = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters=FORBIDDEN), max_size=40)
filled = texts.filter(bool)
sources = st.sampled_from(["/orders", "urn:a:b", "https://example.com/a%20b?c#d", "x", "//host:1/"])
times = st.datetimes(timezones=st.timezones()).map(lambda moment: moment.isoformat()[:19] + "Z")
names = st.from_regex(r"[a-z0-9]{1,25}", fullmatch=True).filter(lambda name: name not in RESERVED)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
).filter(lambda value: _is_text(value))
bodies = st.one_of(
    st.tuples(
        st.sampled_from(["application/json", "a/b+JSON; x=y"]), json_values.map(lambda v: json.dumps(v).encode())
    ),
    st.tuples(
        st.sampled_from([None, "text/plain", "text/x; charset=iso-8859-1", "image/png", "application/xml"]),
        st.binary(max_size=60) | st.text().filter(lambda text: _is_text(text)).map(str.encode),
    ),
)


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@st.composite
def binary_messages(draw: st.DrawFn) -> tuple[list[tuple[str, str]], bytes]:
    event = make(
        draw(filled),
        draw(sources),
        draw(filled),
        time=draw(st.none() | times),
        subject=draw(st.none() | filled),
        dataschema=draw(st.none() | st.just("https://example.com/s.json")),
        extensions=draw(st.dictionaries(names, texts, max_size=4)),
    )
    content_type, body = draw(bodies)
    headers, _ = http_binding.emit(event)
    return [*headers, *([] if content_type is None else [("content-type", content_type)])], body


def travel(event: CloudEvent, mode: ContentMode) -> CloudEvent:
    headers, body = http_binding.emit(event, mode)
    message = http_binding.parse([(name.encode(), value.encode()) for name, value in headers], body)
    assert message.mode is mode
    (arrived,) = message.events
    return arrived


@given(binary_messages())
def test_binary_to_structured_to_batch_to_binary_changes_nothing(message: tuple[list[tuple[str, str]], bytes]) -> None:
    headers, body = message
    (event,) = http_binding.parse([(name.encode(), value.encode()) for name, value in headers], body).events
    arrived = travel(travel(event, ContentMode.STRUCTURED), ContentMode.BATCH)
    assert arrived == event
    if event.datacontenttype is not None and "content-type" not in dict(headers):  # JSON: its type is made explicit
        headers, body = [*headers, ("content-type", "application/json")], body.strip()
    assert http_binding.emit(arrived, ContentMode.BINARY) == (headers, body)
    assert json_format.parse_stored(json_format.emit(event)) == event


@given(
    json_values,
    st.dictionaries(names, texts | st.integers(-(2**31), 2**31 - 1) | st.booleans(), max_size=4),
)
def test_structured_to_batch_to_structured_keeps_even_the_kinds_of_extensions(data: Any, extensions: Any) -> None:
    event = make("t", "/s", "1", data, extensions=extensions)
    arrived = travel(travel(event, ContentMode.STRUCTURED), ContentMode.BATCH)
    assert arrived == event
    assert {name: type(value) for name, value in arrived.extensions.items()} == {
        name: type(value) for name, value in extensions.items()
    }
    assert json_format.value_of(arrived) == data
