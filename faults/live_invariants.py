"""The cheap invariants, looked at every second while the noise goes on, and what is remembered of each look."""

from __future__ import annotations

from typing import Any

from .audit_triggers import FIND_TAMPERING
from .sql_client import Line, text

# Each is one statement, so each is one consistent look; every row it returns is a violation.
FORBIDDEN = {
    "open though it has a result": "SELECT s.run_id FROM edda_open_run s JOIN edda_result r ON r.run_id = s.run_id",
    "owned by a worker without a fence": """SELECT s.run_id FROM edda_open_run s LEFT JOIN edda_fence f
        ON f.worker = s.owner WHERE s.owner IS NOT NULL AND f.worker IS NULL""",
    "has read mail that was not delivered": "SELECT run_id FROM edda_open_run WHERE inbox_read > inbox_count",
    "unowned, with mail, and not ready": """SELECT run_id FROM edda_open_run
        WHERE owner IS NULL AND inbox_count > inbox_read AND ready_at IS NULL AND suspect_at IS NULL""",
    "stored without its row": """SELECT s.run_id FROM edda_open_run s LEFT JOIN edda_run r
        ON r.id = s.run_id AND r.generation = s.generation WHERE r.id IS NULL""",
    "read its mail otherwise than its history says": """SELECT s.run_id FROM edda_open_run s WHERE s.inbox_read <>
        (SELECT COALESCE(MAX(h.inbox_no), 0) FROM edda_history h WHERE h.run_id = s.run_id)""",
    "without a letter that was delivered": """SELECT s.run_id FROM edda_open_run s WHERE s.inbox_count - s.inbox_read <>
        (SELECT count(*) FROM edda_inbox d WHERE d.run_id = s.run_id AND d.inbox_no > s.inbox_read)""",
    "in a generation that is not its last, or not its own": """SELECT s.run_id FROM edda_open_run s
        WHERE s.generation <>
        (SELECT count(*) - 1 FROM edda_run r WHERE r.id = s.run_id)""",
    "began anew without what was left to it": """SELECT s.run_id FROM edda_open_run s LEFT JOIN edda_history h
        ON h.run_id = s.run_id AND h.generation = s.generation AND h.seq = 1 AND h.kind = 'recur'
        WHERE s.generation > 0 AND h.run_id IS NULL""",
    "watched by others than it knows": """SELECT s.run_id FROM edda_open_run s WHERE s.watchers <>
        (SELECT count(*) FROM edda_watcher w WHERE w.run_id = s.run_id)""",
    "watched though it has ended": """SELECT w.run_id FROM edda_watcher w LEFT JOIN edda_open_run s
        ON s.run_id = w.run_id WHERE s.run_id IS NULL""",
    "waits though its waiting has an outcome": """SELECT w.run_id FROM edda_wait w
        JOIN edda_open_run s ON s.run_id = w.run_id
        JOIN edda_history h ON h.run_id = w.run_id AND h.generation = s.generation AND h.step = w.step
            WHERE h.kind = 'event'""",
    "waits though it has ended": """SELECT w.run_id FROM edda_wait w LEFT JOIN edda_open_run s
        ON s.run_id = w.run_id WHERE s.run_id IS NULL""",
    "asleep with nothing to wake it": """SELECT s.run_id FROM edda_open_run s
        WHERE s.owner IS NULL AND s.ready_at IS NULL AND s.suspect_at IS NULL
        AND NOT EXISTS (SELECT 1 FROM edda_wait w WHERE w.run_id = s.run_id)
        AND NOT EXISTS (SELECT 1 FROM edda_watcher w WHERE w.watcher = s.run_id)
        AND NOT EXISTS (SELECT 1 FROM edda_run r JOIN edda_open_run c ON c.run_id = r.id
                        WHERE r.parent = s.run_id AND r.parent_step IS NOT NULL)""",
    "changed after it was written": FIND_TAMPERING,
}
LATELY = "SELECT run_id, generation, seq, epoch, kind, step, value FROM edda_history WHERE at > {since}"
ENDED_LATELY = "SELECT run_id, generation, 0, 0, status, '', value FROM edda_result WHERE ended_at > {since}"
OVERLAP = 10_000_000
"""Microseconds that each look reaches back beyond the one before: rows are committed later than they are dated."""


class LiveInvariants:
    def __init__(self) -> None:
        self._remembered: dict[tuple[str, int, int], tuple[Any, ...]] = {}
        self._since = 0
        self.violations: list[str] = []

    async def look(self, line: Line, now: int) -> None:
        for what, statement in FORBIDDEN.items():
            for (run_id,) in await line.rows(statement):
                self.violations.append(f"run {text(run_id)}: {what}")
        await self._compare(line, self._since)
        self._since = now - OVERLAP

    async def look_back(self, line: Line) -> None:
        """At the end: everything that was ever seen is still there, and the same."""
        seen = set(self._remembered)
        self._remembered, remembered = {}, self._remembered
        await self._compare(line, 0)
        for key in seen:
            if self._remembered.get(key) != remembered[key]:
                self._changed(key, remembered[key], self._remembered.get(key))

    async def _compare(self, line: Line, since: int) -> None:
        for statement in (LATELY, ENDED_LATELY):
            for run_id, generation, seq, *facts in await line.rows(statement.format(since=since)):
                key, row = (text(run_id), generation, seq), tuple(facts)
                if self._remembered.setdefault(key, row) != row:
                    self._changed(key, self._remembered[key], row)

    def _changed(self, key: tuple[str, int, int], old: object, new: object) -> None:
        self.violations.append(f"run {key[0]}, generation {key[1]}, entry {key[2]}: was {old}, now {new}")
