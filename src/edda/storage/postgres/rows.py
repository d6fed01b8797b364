"""Rows of the database as records."""

from __future__ import annotations

import asyncpg

from edda.core.model import Delivery, Entry, EntryKind, RunRecord
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
    )


def delivery_of(row: asyncpg.Record) -> Delivery:
    return Delivery(row["run_id"], row["n"], EntryKind(row["kind"]), row["at"], row["step"], row["value"])


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
    )
