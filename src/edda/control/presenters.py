"""Records of the database as what people are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edda.core.codec import Codec
from edda.core.event_match import describe
from edda.core.model import Entry, EntryKind, OutboxRow, RunRecord, StoredEvent
from edda.core.queries import Audit, Definition, EventReceiver, Generation, TimeBucket, WaitRow, WorkerRecord
from edda.core.redact import Redaction, redact_credentials
from edda.core.states import OPEN, WAITING, RunStatus
from edda.engine.open_runs import say_lost
from edda.workflow.children import ChildStarted
from edda.workflow.context import as_datetime

from .payloads import PayloadPresenter
from .status_text import status_text
from .timeline import is_channel
from .views import (
    AuditView,
    BucketView,
    ConsumerView,
    DefinitionView,
    EntryView,
    ErrorView,
    EventView,
    GenerationView,
    OutgoingView,
    RunView,
    WaitView,
    WorkerView,
)

ALLOWED_ACTIONS = {
    RunStatus.PARKED: ("resume", "cancel"),
    **dict.fromkeys(WAITING, ("cancel", "resume")),
    RunStatus.COMPENSATING: (),
    RunStatus.COMPLETED: ("delete",),
    RunStatus.FAILED: ("retry", "delete"),
    RunStatus.CANCELLED: ("retry", "delete"),
}
"""What can be done with a run; with any other that is open: cancel. One that compensates can be resumed too while it
waits, but its status does not tell whether it does."""


def allowed_actions(status: RunStatus) -> tuple[str, ...]:
    return ALLOWED_ACTIONS.get(status, ("cancel",) if status in OPEN else ())


def to_datetime(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else as_datetime(microseconds)


class DefinitionDetails(Struct, frozen=True):
    """What is kept of a definition as JSON."""

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
        crew: Sequence[WorkerRecord],
        since: int | None = None,
        tried: Entry | None = None,
    ) -> RunView:
        """`crew` are the workers, read after the record; `since` says when it began to wait, and `tried` how a step
        went that is tried again, if that is known."""
        is_open = record.status in OPEN
        lost = None if record.owner is None or not is_open else say_lost(record.owner, now, crew)
        clean = replace(record, reason=None if record.reason is None else self._reason(record.reason, record.input))
        return RunView(
            id=record.run_id,
            workflow=record.workflow,
            status=record.status.value,
            words=status_text(clean, now, outcome=self._outcome(record, tried), since=since, lost=lost),
            generation=record.gen,
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

    def _reason(self, reason: str, input: bytes) -> str:
        return self._redaction.censor(self._redaction.clean(reason), self.payloads.secrets(input))

    def generation(self, one: Generation) -> GenerationView:
        return GenerationView(one.gen, as_datetime(one.created_at), one.entries)

    def entry(self, entry: Entry, known: frozenset[str]) -> EntryView:
        """With what is known to be secret in its run."""
        return EntryView(
            seq=entry.seq,
            kind=entry.kind.value,
            step=entry.step,
            name=redact_credentials(entry.name),  # of one that cancels it is the reason
            ok=entry.ok,
            at=as_datetime(entry.at),
            attempt=entry.attempt,
            input=self.payloads.value(entry.input),
            value=self._value_of(entry) if entry.ok else None,
            error=None if entry.ok else self.payloads.error(entry.value, known | self.payloads.secrets(entry.input)),
            event=entry.event,
        )

    def _value_of(self, entry: Entry) -> Any:
        if entry.kind in (EntryKind.EVENT, EntryKind.MESSAGE) and entry.value:
            return self.payloads.event(entry.value)
        return self.payloads.value(entry.value)

    def child_of(self, value: bytes) -> tuple[str, bool]:
        try:
            started = self._codec.decode(value, ChildStarted)
            return started.run_id, started.is_awaited
        except Exception:  # the key may be missing: then nobody knows which run it was
            return "", False

    # Waits

    def wait(self, standing: WaitRow, schemas: Mapping[str, Any]) -> WaitView:
        wait = standing.wait
        is_message = is_channel(wait.type)
        name = wait.type.partition("/")[2] if is_message else wait.type
        match = {} if is_message else self._match(wait.match)
        return WaitView(
            run_id=standing.run_id,
            workflow=standing.workflow,
            step=wait.step,
            kind="message" if is_message else "event",
            type=name,
            words=f"a message on {name}" if is_message else self._redaction.clean(describe(name, match)),
            match=match,
            due=to_datetime(wait.due),
            schema=schemas.get(wait.type),
            mode=self.payloads.text(wait.match) if is_message else None,
        )

    def _match(self, data: bytes) -> dict[str, Any]:
        value = self.payloads.value(data)
        return value if isinstance(value, dict) else {}

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
        """Attributes and data."""
        shown = self.payloads.event(stored.event.body)
        if not isinstance(shown, dict):
            return {}, shown
        data = shown.pop("data", None)
        return shown, data

    def consumer(self, one: EventReceiver) -> ConsumerView:
        return ConsumerView(one.run_id, one.workflow, one.step, as_datetime(one.at))

    def outgoing(self, record: OutboxRow) -> OutgoingView:
        event = record.event
        return OutgoingView(
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

    # The whole

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
        details = read_details(known.details)
        return DefinitionView(
            workflow=known.workflow,
            service=known.service,
            seen_at=as_datetime(known.seen_at),
            documentation=details.documentation,
            schema=details.schema,
            structure=details.structure,
            can_start=known.workflow in names,
        )

    def bucket(self, one: TimeBucket) -> BucketView:
        return BucketView(as_datetime(one.since), one.started, one.completed, one.failed, one.cancelled)

    def audit(self, one: Audit) -> AuditView:
        return AuditView(one.seq, as_datetime(one.at), one.who, one.action, one.subject, one.origin, one.details)


def read_details(data: bytes) -> DefinitionDetails:
    try:
        return msgspec.json.decode(data, type=DefinitionDetails)
    except ValueError:  # another release said it in another way
        return DefinitionDetails()
