"""Rows of the database as records."""

from __future__ import annotations

import asyncpg

from edda.core.model import (
    EndWatcher,
    Entry,
    EntryKind,
    Event,
    InboxItem,
    OutboxEvent,
    OutboxRow,
    OutboxState,
    RunRecord,
    StagedEventRow,
    StagedKind,
    StepCommit,
    StoredEvent,
    Wait,
)
from edda.core.states import RunStatus


def entry_of(row: asyncpg.Record) -> Entry:
    return Entry(
        seq=row["seq"],
        kind=EntryKind(row["kind"]),
        step=row["step"],
        name=row["name"],
        ok=row["ok"],
        at=row["at"],
        input=row["input"],
        value=row["value"],
        attempt=row["attempt"],
        n=row["n"],
        event=row["event"],
    )


def delivery_of(row: asyncpg.Record) -> InboxItem:
    return InboxItem(
        run_id=row["run_id"],
        n=row["n"],
        kind=EntryKind(row["kind"]),
        at=row["at"],
        step=row["step"],
        value=row["value"],
        event=row["event"],
    )


def event_of(row: asyncpg.Record) -> StoredEvent:
    event = Event(row["source"], row["id"], row["type"], row["target"], row["body"])
    return StoredEvent(row["seq"], row["received_at"], event)


def wait_of(row: asyncpg.Record) -> Wait:
    return Wait(row["step"], row["key"], row["own_key"], row["type"], row["match"], row["due"], once=row["once"])


def watcher_of(row: asyncpg.Record) -> EndWatcher:
    return EndWatcher(row["watcher"], row["step"])


def done_of(row: asyncpg.Record) -> StepCommit:
    return StepCommit(row["step"], row["attempt"], row["value"], row["at"])


def dispatch_of(row: asyncpg.Record) -> StagedEventRow:
    return StagedEventRow(row["seq"], StagedKind(row["kind"]), row["body"])


def outgoing_of(row: asyncpg.Record) -> OutboxRow:
    event = OutboxEvent(
        row["id"], row["order_key"], row["type"], row["source"], row["body"], row["created_at"], row["run_id"]
    )
    state = OutboxState(row["state"])
    return OutboxRow(row["seq"], event, state, row["attempts"], row["due"], row["reason"], row["ended_at"])


def record_of(row: asyncpg.Record) -> RunRecord:
    return RunRecord(
        run_id=row["id"],
        workflow=row["workflow"],
        gen=row["gen"],
        status=RunStatus(row["status"]),
        input=row["input"],
        created_at=row["created_at"],
        deadline=row["deadline"],
        owner=row["owner"],
        ready_at=row["ready_at"],
        reason=row["reason"],
        ended_at=row["ended_at"],
        value=row["value"],
        parent=row["parent"],
        deaths=row["deaths"],
        has_cancel=row["has_cancel"],
    )
