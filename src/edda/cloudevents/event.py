"""CloudEvent, and the rules for every event, received or sent."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import UNSET, Raw, Struct

from edda.errors import EventError

from . import data as contents
from .attributes import (
    check_datacontenttype,
    check_dataschema,
    check_filled,
    check_id,
    check_name,
    check_source,
    check_text,
    check_time,
    check_type,
    media_type,
    refusal,
)

SPECVERSION = "1.0"
TARGET = "eddainstanceid"
"""The extension that names the only run that may receive the event."""

_CHECKS = {
    "time": check_time,
    "subject": lambda value: check_filled("subject", value),
    "datacontenttype": check_datacontenttype,
    "dataschema": check_dataschema,
}
CORE = ("id", "source", "type", *_CHECKS)
_RESERVED = frozenset({*CORE, "specversion", "data"})
_INTEGERS = range(-(2**31), 2**31)


class CloudEvent(Struct, frozen=True, kw_only=True):
    """One event. `time` and JSON data are kept as the text that was received, and parsed on demand."""

    id: str
    source: str
    type: str
    time: str | None = None
    subject: str | None = None
    datacontenttype: str | None = None
    dataschema: str | None = None
    extensions: Mapping[str, str | int | bool] = {}
    data: Raw | str | bytes | None = None
    """Raw: the text of a JSON value; str: text of another media type; bytes: other data; None: no data."""

    @property
    def target(self) -> str | None:
        value = self.extensions.get(TARGET)
        return None if value is None else attribute_text(value)


def make(
    type: str,
    source: str,
    id: str,
    data: Any = UNSET,
    *,
    time: datetime | str | None = None,
    subject: str | None = None,
    datacontenttype: str | None = None,
    dataschema: str | None = None,
    extensions: Mapping[str, Any] | None = None,
) -> CloudEvent:
    """Create an event from Python values. Without `data` it has none; with None its data is the JSON value null."""
    if datacontenttype is not None:
        check_datacontenttype(datacontenttype)
    content, datacontenttype = (None, datacontenttype) if data is UNSET else contents.write(data, datacontenttype)
    event = CloudEvent(
        id=id,
        source=source,
        type=type,
        time=_write_time(time) if isinstance(time, datetime) else time,
        subject=subject,
        datacontenttype=datacontenttype,
        dataschema=dataschema,
        extensions={name: _write_extension(name, value) for name, value in (extensions or {}).items()},
        data=content,
    )
    check(event)
    return event


def assemble(attributes: dict[str, Any]) -> CloudEvent:
    """The event with these attributes and no data; changes the dict."""
    version = attributes.pop("specversion", None)
    if version != SPECVERSION:
        check_filled("specversion", version)
        raise refusal("specversion", f"must be {SPECVERSION}")
    core = {name: attributes.pop(name, None) for name in CORE}
    event = CloudEvent(**core, extensions=attributes)
    check(event)
    return event


def check(event: CloudEvent) -> None:
    """Raise EventError if the event is invalid. JSON data was checked when it became Raw, and is not read again."""
    check_id(event.id)
    check_source(event.source)
    check_type(event.type)
    for name, check_value in _CHECKS.items():
        if (value := getattr(event, name)) is not None:
            check_value(value)
    for name, value in event.extensions.items():
        _check_extension(name, value)
    if event.data is None:
        return
    media = None if event.datacontenttype is None else media_type(event.datacontenttype)
    if isinstance(event.data, Raw) is not (media is not None and media.is_json):
        raise EventError("data must be JSON text exactly if datacontenttype says JSON", attribute="data")
    if isinstance(event.data, str) and media is None:
        raise EventError("data that is text needs a datacontenttype, such as text/plain", attribute="data")


def _check_extension(name: str, value: Any) -> None:
    check_name(name)
    if name in _RESERVED:
        raise refusal(name, "cannot be the name of an extension; it is reserved for an attribute")
    kind = type(value)
    if kind is int:
        if value not in _INTEGERS:
            raise refusal(name, "must be an integer of 32 bits; send a larger one as a string")
    elif kind is str:
        check_text(name, value)
    elif kind is not bool:
        raise refusal(name, "must be a string, an integer or a boolean")


def attribute_text(value: str | int | bool) -> str:
    """The canonical text of an attribute's value."""
    return value if isinstance(value, str) else str(value).lower()


def _write_extension(name: str, value: Any) -> Any:
    if isinstance(value, datetime):
        return _write_time(value, name)
    return b64encode(value).decode() if isinstance(value, bytes) else value


def _write_time(value: datetime, name: str = "time") -> str:
    if value.utcoffset() is None:
        raise refusal(name, "has no time zone; give a datetime with tzinfo, such as datetime.now(UTC)")
    return value.isoformat().replace("+00:00", "Z")
