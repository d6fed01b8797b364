"""Rows of the database as records."""

from __future__ import annotations

import asyncpg

from edda.core.model import Delivery, Entry, EntryKind, Event, RunRecord, StoredEvent, Wait, Watcher
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


def delivery_of(row: asyncpg.Record) -> Delivery:
    return Delivery(
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
    return Wait(row["step"], row["key"], row["own_key"], row["type"], row["match"], row["due"])


def watcher_of(row: asyncpg.Record) -> Watcher:
    return Watcher(row["watcher"], row["step"])


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
    )
