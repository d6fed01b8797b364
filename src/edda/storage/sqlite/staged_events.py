"""Events and messages on their way into the log."""

from __future__ import annotations

import json
from collections.abc import Sequence

from edda.core.model import StagedEventRow, StagedKind
from edda.errors import StorageConflictError

from .connection import Connection

INSERT = "INSERT INTO edda_dispatch (kind, body) VALUES (?, ?)"
_FIRST_DUE = "SELECT min(due) FROM edda_dispatch"
# Few are not due, so they are passed by: those that are come by their numbers, and no more of them than are wanted.
_LOWEST = """
SELECT seq, kind, body FROM edda_dispatch NOT INDEXED WHERE seq > 0 AND due <= ? ORDER BY seq LIMIT ?"""
_FIRST_KEPT = """
SELECT k.seq, k.key, e.body FROM edda_event_key k CROSS JOIN edda_event e ON e.seq = k.seq
 WHERE k.key = ? ORDER BY k.seq LIMIT 1"""
_TAKE = "DELETE FROM edda_event_key WHERE seq = ? AND key = ?"
_OFFER = "INSERT INTO edda_dispatch (kind, body, due) VALUES ('offer', ?, ?) RETURNING seq"
_FORWARDED = "DELETE FROM edda_dispatch WHERE seq IN (SELECT value FROM json_each(?))"


def first_due(db: Connection) -> int | None:
    due: int | None = db.rows(_FIRST_DUE)[0][0]
    return due


def lowest(db: Connection, limit: int, now: int) -> tuple[StagedEventRow, ...]:
    return tuple(StagedEventRow(seq, StagedKind(kind), body) for seq, kind, body in db.rows(_LOWEST, (now, limit)))


def remove(db: Connection, forwarded: Sequence[int]) -> None:
    numbers = set(forwarded)
    if numbers and db.run(_FORWARDED, (json.dumps(sorted(numbers)),)) != len(numbers):
        raise StorageConflictError("somebody else has forwarded some of these dispatches")


def is_kept(db: Connection, key: bytes) -> bool:
    return db.row(_FIRST_KEPT, (key,)) is not None


def take(db: Connection, key: bytes, due: int) -> StagedEventRow | None:
    """The first message of a key, to be offered again when it is due."""
    first = db.row(_FIRST_KEPT, (key,))
    if first is None:
        return None
    *place, body = first
    db.run(_TAKE, place)
    ((seq,),) = db.rows(_OFFER, (body, due))
    return StagedEventRow(seq, StagedKind.OFFER, body)
