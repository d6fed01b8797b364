"""Runs that start, tell and follow each other."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence

from edda.core.model import End, Recur, RunId, RunWrite

from . import inbox, runs
from .connection import Connection

_WATCHED = """
SELECT s.run_id FROM json_each(?) i CROSS JOIN edda_sched s ON s.run_id = i.key WHERE s.watchers <> i.value"""
_MAILED = """
SELECT s.run_id FROM json_each(?) i CROSS JOIN edda_sched s ON s.run_id = i.key WHERE s.delivered <> i.value"""


def refused_runs(db: Connection, batch: Sequence[RunWrite]) -> frozenset[RunId]:
    """Ends that do not know all who watch, and what would leave mail unread."""
    watched: dict[RunId, int] = {}
    mailed: dict[RunId, int] = {}
    for bundle in batch:
        match bundle.move:
            case End(watchers=watchers, settled=settled) if bundle.start is None:
                watched[bundle.run_id] = watchers
                if settled is not None:
                    mailed[bundle.run_id] = settled
            case Recur(absorbed=absorbed) if bundle.start is None:
                mailed[bundle.run_id] = absorbed
    return frozenset(_differing(db, _WATCHED, watched) + _differing(db, _MAILED, mailed))


def _differing(db: Connection, sql: str, believed: dict[RunId, int]) -> list[RunId]:
    return [run_id for (run_id,) in db.rows(sql, (json.dumps(believed),))] if believed else []


def write_to_other_runs(db: Connection, batch: Sequence[RunWrite], refused: Container[RunId], now: int) -> None:
    """What a batch brings to other runs."""
    if children := [child for bundle in batch for child in bundle.children]:
        runs.start(db, children, now)
    for bundle in batch:
        for letter in bundle.letters if bundle.run_id not in refused else ():
            inbox.put(db, letter, now)
