"""Messages to start from: a valid one of each mode, with what the test wants different."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import CloudEvent
from edda.errors import EventError

ABSENT = object()

ATTRIBUTES: dict[str, Any] = {"specversion": "1.0", "id": "A-1", "source": "/orders", "type": "order.paid"}

Headers = list[tuple[bytes, bytes]]


def binary(body: bytes = b"", content_type: str | None = None, /, **changes: Any) -> tuple[Headers, bytes]:
    """A binary message whose attributes are these; the values stand in the headers as they are given."""
    headers = [(b"ce-" + name.encode(), value.encode()) for name, value in _changed(ATTRIBUTES, changes).items()]
    if content_type is not None:
        headers.append((b"content-type", content_type.encode()))
    return headers, body


def structured(**changes: Any) -> bytes:
    return json.dumps(_changed(ATTRIBUTES, changes)).encode()


def structured_text(members: str) -> bytes:
    """A structured event with these members, written by hand, after the required ones."""
    return f"{json.dumps(ATTRIBUTES)[:-1]}, {members}}}".encode()


def content_type(value: str) -> Headers:
    return [(b"content-type", value.encode())]


STRUCTURED = content_type("application/cloudevents+json")
BATCH = content_type("application/cloudevents-batch+json")


def parse(message: tuple[Headers, bytes]) -> CloudEvent:
    (event,) = http_binding.parse(*message).events
    return event


def refused(headers: Headers, body: bytes, **options: Any) -> EventError:
    with pytest.raises(EventError) as caught:
        http_binding.parse(headers, body, **options)
    return caught.value


def refused_json(body: bytes) -> EventError:
    with pytest.raises(EventError) as caught:
        json_format.parse(body)
    return caught.value


def both_refused(attribute: str, value: str) -> None:
    """The value is refused in a header and in JSON, with 400 and the attribute's name."""
    from_header = refused(*binary(**{attribute: value}))
    from_json = refused_json(structured(**{attribute: value}))
    assert [error.status for error in (from_header, from_json)] == [400, 400]
    assert [error.attribute for error in (from_header, from_json)] == [attribute, attribute]


def both_taken(attribute: str, value: str) -> None:
    for event in (parse(binary(**{attribute: value})), json_format.parse(structured(**{attribute: value}))):
        assert attributes_of(event)[attribute] == value


def attributes_of(event: CloudEvent) -> dict[str, Any]:
    return {**{name: getattr(event, name) for name in ("id", "source", "type", "time", "subject")}} | {
        "datacontenttype": event.datacontenttype,
        "dataschema": event.dataschema,
        **event.extensions,
    }


def _changed(attributes: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**attributes, **changes}.items() if value is not ABSENT}
