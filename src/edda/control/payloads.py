"""Stored values as people are shown them: JSON, without secrets, and never too much of it.

Whatever is stored, showing it raises nothing: what cannot be read is said to be so in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

import msgspec

from edda.cloudevents import json_format
from edda.core.channels import is_message_body, unpack_message
from edda.core.codec import Codec
from edda.core.exceptions import EncodedException
from edda.core.redact import REDACTED, Redaction, redact_credentials
from edda.core.secrets import MAX_DEPTH, find_secrets, named_items, split_key, write_int, write_value
from edda.core.value_path import truncate

from .views import ErrorView

MOST_BYTES = 256 * 1024
SHOWN_OF_LARGE = 4096
LARGEST_INT = 2**53
"""Beyond it the numbers of JavaScript are no longer exact."""
ENCRYPTED = "encrypted: this process has no key for it"

Path = tuple[str, ...]


class PayloadPresenter:
    def __init__(self, codec: Codec, redaction: Redaction) -> None:
        self._codec = codec
        self._redaction = redaction

    def value(self, data: bytes | None) -> Any:
        if not data:
            return None
        try:
            value = self._codec.decode(data)
        except Exception as error:  # the key, the transform and the data may be wrong in any way
            return self._unreadable_text(data, error)
        return self.present(value)

    def present(self, value: Any) -> Any:
        """A value of Python's, or JSON that was read already."""
        shown = self._plain(value, (), 0)
        data = msgspec.json.encode(shown)
        return shown if len(data) <= MOST_BYTES else _cut(data)

    def event(self, body: bytes) -> Any:
        """An event of the log with its attributes, or a message of a channel."""
        try:
            data = self._codec.decrypt(body)
            if is_message_body(data):
                return self.present(msgspec.to_builtins(unpack_message(self._codec, body)))
            event = json_format.parse_stored(data)
            attributes = {name: getattr(event, name) for name in _ATTRIBUTES if getattr(event, name) is not None}
            return self.present({**attributes, **event.extensions, "data": json_format.value_of(event)})
        except Exception as error:  # as in `value`
            return self._unreadable_text(body, error)

    def secrets(self, *inputs: bytes) -> frozenset[str]:
        """The values of secret fields: they may stand in the text of an error, too."""
        return frozenset(value for data in inputs for value in self._secrets_in(data))

    def _secrets_in(self, data: bytes) -> frozenset[str]:
        try:
            value = self._codec.decode(data)
        except Exception:  # as in `value`
            return frozenset()
        return find_secrets(self._redaction, value)

    def error(self, data: bytes | None, known: frozenset[str] = frozenset()) -> ErrorView | None:
        """The failure of a step or a run, of which these secrets are known."""
        if not data:
            return None
        try:
            recorded = self._codec.decode(data, EncodedException)
        except Exception as error:  # as in `value`
            return ErrorView("unknown", str(self._unreadable_text(data, error)))
        if not isinstance(recorded, EncodedException):
            return ErrorView("unknown", truncate(str(self.present(recorded)), 500))
        traceback = "\n".join(_traceback(recorded))
        censor = self._redaction.censor
        return ErrorView(recorded.qualname, censor(recorded.message, known), censor(traceback, known) or None)

    def text(self, data: bytes | None) -> str:
        """A reason, which is a text; or whatever else is there, as one."""
        value = self.value(data)
        return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()

    def _unreadable_text(self, data: bytes, error: Exception) -> str:
        if self._codec.is_sealing or not _is_json(data):
            return ENCRYPTED
        return f"not readable: {truncate(str(error), 200)}"

    def _plain(self, value: Any, path: Path, depth: int) -> Any:
        if isinstance(value, str):
            return redact_credentials(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if -LARGEST_INT <= value <= LARGEST_INT else write_int(value)
        if isinstance(value, float):
            return value if isfinite(value) else str(value)
        if depth >= MAX_DEPTH:
            return "…"
        if isinstance(value, dict):
            return {key: self._field(item, (*path, *split_key(key)), depth + 1) for key, item in named_items(value)}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._plain(item, path, depth + 1) for item in value]
        return redact_credentials(write_value(value))

    def _field(self, value: Any, path: Path, depth: int) -> Any:
        return REDACTED if self._redaction.hides(path) else self._plain(value, path, depth)


_ATTRIBUTES = ("id", "source", "type", "time", "subject", "datacontenttype", "dataschema")


def _cut(data: bytes) -> str:
    beginning = data[:SHOWN_OF_LARGE].decode(errors="ignore")
    return f"{beginning}… (the first {SHOWN_OF_LARGE:,} of {len(data):,} bytes)"


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return False
    return True


def _traceback(recorded: EncodedException | None) -> Iterator[str]:
    """The error itself first, then what caused it."""
    while recorded is not None:
        if recorded.traceback:
            yield f"{recorded.traceback.rstrip()}\n{recorded.qualname}: {recorded.message}"
        recorded = recorded.cause
        if recorded is not None and recorded.traceback:
            yield "\ncaused by\n"
