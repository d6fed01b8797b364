"""`PayloadPresenter` and `Presenter`: stored values and records as the views of the control API.

Secrets are redacted and large values cut. No stored bytes raise: a text that names the reason replaces a value that
cannot be decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from math import isfinite
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edda.cloudevents import json_format
from edda.core.channels import is_message_body, unpack_message
from edda.core.codec import Codec
from edda.core.event_match import describe
from edda.core.exceptions import EncodedException
from edda.core.model import Entry, EntryKind, OutboxRow, RunRecord, StoredEvent
from edda.core.queries import Audit, Definition, WaitRow, WorkerRecord
from edda.core.redact import (
    MAX_DEPTH,
    REDACTED,
    Redaction,
    find_secrets,
    named_items,
    redact_credentials,
    split_key,
    write_int,
    write_value,
)
from edda.core.states import OPEN, WAITING, RunStatus
from edda.core.value_path import truncate
from edda.engine.open_runs import describe_lost_owner
from edda.workflow.children import ChildStarted
from edda.workflow.context import as_datetime

from .status_text import MAX_LENGTH, status_text
from .timeline import is_channel
from .views import (
    AuditView,
    DefinitionView,
    EntryView,
    ErrorView,
    EventView,
    OutboxView,
    RunView,
    WaitView,
    WorkerView,
)

MAX_BYTES = 256 * 1024
CUT_BYTES = 4096
MAX_INT = 2**53
"""JavaScript rounds larger numbers."""
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
        except Exception as error:  # cipher and codec may raise anything for a wrong key or broken data
            return self._unreadable_text(data, error)
        return self.present(value)

    def present(self, value: Any) -> Any:
        """A Python value, or decoded JSON."""
        shown = self._plain(value, (), 0)
        data = msgspec.json.encode(shown)
        if len(data) <= MAX_BYTES:
            return shown
        return f"{data[:CUT_BYTES].decode(errors='ignore')}… (the first {CUT_BYTES:,} of {len(data):,} bytes)"

    def event(self, body: bytes) -> Any:
        """An event with its attributes, or a message of a channel."""
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
        """The values of secret fields, to redact them in error texts."""
        found: set[str] = set()
        for data in inputs:
            with suppress(Exception):  # as in `value`
                found |= find_secrets(self._redaction, self._codec.decode(data))
        return frozenset(found)

    def error(self, data: bytes | None, known: frozenset[str] = frozenset()) -> ErrorView | None:
        """The error of a step or a run; `known` are the secret values of its input."""
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
        """A stored text; another value is shown as JSON."""
        value = self.value(data)
        return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()

    def _unreadable_text(self, data: bytes, error: Exception) -> str:
        if self._codec.is_sealing:
            return ENCRYPTED
        try:
            msgspec.json.decode(data)
        except (ValueError, RecursionError):
            return ENCRYPTED
        return f"not readable: {truncate(str(error), 200)}"

    def _plain(self, value: Any, path: Path, depth: int) -> Any:
        if isinstance(value, str):
            return redact_credentials(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if -MAX_INT <= value <= MAX_INT else write_int(value)
        if isinstance(value, float):
            return value if isfinite(value) else str(value)
        if depth >= MAX_DEPTH:
            return "…"
        if isinstance(value, dict):
            fields = {key: (item, (*path, *split_key(key))) for key, item in named_items(value)}
            return {
                key: REDACTED if self._redaction.hides(place) else self._plain(item, place, depth + 1)
                for key, (item, place) in fields.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self._plain(item, path, depth + 1) for item in value]
        return redact_credentials(write_value(value))


_ATTRIBUTES = ("id", "source", "type", "time", "subject", "datacontenttype", "dataschema")


def _traceback(recorded: EncodedException | None) -> Iterator[str]:
    """The traceback of the error, then those of its causes."""
    while recorded is not None:
        if recorded.traceback:
            yield f"{recorded.traceback.rstrip()}\n{recorded.qualname}: {recorded.message}"
        recorded = recorded.cause
        if recorded is not None and recorded.traceback:
            yield "\ncaused by\n"


ALLOWED_ACTIONS = {
    **dict.fromkeys(OPEN, ("cancel",)),
    RunStatus.PARKED: ("resume", "cancel"),
    **dict.fromkeys(WAITING, ("cancel", "resume")),
    RunStatus.COMPENSATING: (),
    RunStatus.COMPLETED: ("delete",),
    RunStatus.FAILED: ("retry", "delete"),
    RunStatus.CANCELLED: ("retry", "delete"),
}
"""A compensating run can be resumed while it waits, but its status does not show whether it does."""


def to_datetime(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else as_datetime(microseconds)


class DefinitionDetails(Struct, frozen=True):
    """The JSON in `Definition.details`."""

    schema: dict[str, Any] | None = None
    structure: dict[str, Any] | None = None
    documentation: str = ""


class Presenter:
    def __init__(self, codec: Codec, redaction: Redaction) -> None:
        self._codec = codec
        self._redaction = redaction
        self.payloads = PayloadPresenter(codec, redaction)

    # Runs

    def run(
        self,
        record: RunRecord,
        now: int,
        workers: Sequence[WorkerRecord],
        since: int | None = None,
        tried: Entry | None = None,
        max_length: int = MAX_LENGTH,
    ) -> RunView:
        """`workers` were read after the record; `since` is when the run began to wait, `tried` the last failed attempt
        of the step that it retries, if known; `max_length` is that of its text."""
        is_open = record.status in OPEN
        reason = record.reason
        if reason is not None:
            reason = self._redaction.censor(self._redaction.clean(reason), self.payloads.secrets(record.input))
        lost = None if record.owner is None or not is_open else describe_lost_owner(record.owner, now, workers)
        return RunView(
            id=record.run_id,
            workflow=record.workflow,
            status=record.status.value,
            words=status_text(
                replace(record, reason=reason),
                now,
                outcome=self._outcome(record, tried),
                since=since,
                lost=lost,
                max_length=max_length,
            ),
            generation=record.generation,
            created_at=as_datetime(record.created_at),
            ended_at=to_datetime(record.ended_at),
            due=to_datetime(record.ready_at or None) if is_open else None,
            deadline=to_datetime(record.deadline),
            parent=record.parent,
            owner=record.owner,
            deaths=record.deaths,
        )

    def _outcome(self, record: RunRecord, tried: Entry | None) -> str:
        if record.status is RunStatus.CANCELLED:
            return self.payloads.text(record.value)
        error = self.error(record)
        if tried is not None:
            error = self.payloads.error(tried.value, self.payloads.secrets(record.input))
        return "" if error is None else f"{error.type}: {error.message}"

    def error(self, record: RunRecord) -> ErrorView | None:
        if record.status is not RunStatus.FAILED:
            return None
        return self.payloads.error(record.value, self.payloads.secrets(record.input))

    def entry(self, entry: Entry, known: frozenset[str]) -> EntryView:
        """`known` are the secret values of the run's input."""
        is_event = entry.kind in (EntryKind.EVENT, EntryKind.MESSAGE) and entry.value
        show = self.payloads.event if is_event else self.payloads.value
        return EntryView(
            seq=entry.seq,
            kind=entry.kind.value,
            step=entry.step,
            name=redact_credentials(entry.name),  # the name of a CANCEL entry is the reason
            ok=entry.ok,
            at=as_datetime(entry.at),
            attempt=entry.attempt,
            input=self.payloads.value(entry.input),
            value=show(entry.value) if entry.ok else None,
            error=None if entry.ok else self.payloads.error(entry.value, known | self.payloads.secrets(entry.input)),
            event=entry.event,
        )

    def child_of(self, value: bytes) -> tuple[str, bool]:
        try:
            started = self._codec.decode(value, ChildStarted)
            return started.run_id, started.is_awaited
        except Exception:  # encrypted with a key that this process lacks: the id of the child is unknown
            return "", False

    # Waits

    def wait(self, row: WaitRow, schemas: Mapping[str, Any]) -> WaitView:
        wait = row.wait
        is_message = is_channel(wait.type)
        name = wait.type.partition("/")[2] if is_message else wait.type
        match = {} if is_message else self.payloads.value(wait.match)
        match = match if isinstance(match, dict) else {}
        return WaitView(
            run_id=row.run_id,
            workflow=row.workflow,
            step=wait.step,
            kind="message" if is_message else "event",
            type=name,
            words=f"a message on {name}" if is_message else self._redaction.clean(describe(name, match)),
            match=match,
            due=to_datetime(wait.due),
            schema=schemas.get(wait.type),
            mode=self.payloads.text(wait.match) if is_message else None,
        )

    # Events

    def event(self, stored: StoredEvent) -> EventView:
        event = stored.event
        return EventView(
            number=stored.seq,
            id=event.id,
            source=event.source,
            type=event.type,
            received_at=as_datetime(stored.received_at),
            target=event.target,
        )

    def attributes_and_data(self, stored: StoredEvent) -> tuple[dict[str, Any], Any]:
        shown = self.payloads.event(stored.event.body)
        if not isinstance(shown, dict):
            return {}, shown
        data = shown.pop("data", None)
        return shown, data

    def outbox_event(self, record: OutboxRow) -> OutboxView:
        event = record.event
        return OutboxView(
            number=record.seq,
            id=event.id,
            type=event.type,
            source=event.source,
            key=event.key,
            state=record.state.value,
            attempts=record.attempts,
            created_at=as_datetime(event.created_at),
            due=to_datetime(record.due or None),
            reason=None if record.reason is None else self._redaction.censor(record.reason),
            run_id=event.run_id,
        )

    # Workers, workflows, statistics, audit log

    def worker(self, record: WorkerRecord) -> WorkerView:
        info = record.info
        return WorkerView(
            id=info.id,
            service=info.service,
            host=info.host,
            pid=info.pid,
            started_at=as_datetime(record.started_at),
            expires_at=as_datetime(record.expires_at),
            is_alive=not record.is_lapsed,
            runs=record.runs,
        )

    def definition(self, known: Definition, names: Iterable[str]) -> DefinitionView:
        try:
            details = msgspec.json.decode(known.details, type=DefinitionDetails)
        except ValueError:  # written by another release
            details = DefinitionDetails()
        return DefinitionView(
            workflow=known.workflow,
            service=known.service,
            seen_at=as_datetime(known.seen_at),
            documentation=details.documentation,
            schema=details.schema,
            structure=details.structure,
            can_start=known.workflow in names,
        )

    def audit(self, one: Audit) -> AuditView:
        return AuditView(one.seq, as_datetime(one.at), one.who, one.action, one.subject, one.origin, one.details)
