"""Letters from run to run, for inboxes whose sched rows are locked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from edda.core.model import EntryKind, RunId, RunSignal

from .clock import NOW
from .history import KINDS
from .letters import IS_PARKED, set_inbox_count
from .moves import LockedRun
from .statement import Statement, inserts, join_values, quote_bytes, quote_text

INSERT_MAIL = b"INSERT INTO edda_delivery (run_id, n, kind, step, at, value) VALUES "
CANCEL = b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET s.cancelled = TRUE"
CANCEL_PARKED = (
    b"UPDATE (%%b) v STRAIGHT_JOIN edda_sched s FORCE INDEX (PRIMARY) ON s.run_id = v.run_id AND %b"
    b" SET s.ready_at = 0, s.end_if_parked = TRUE" % IS_PARKED
)


class SignalWriter:
    """Numbers the letters in the order in which they are added."""

    def __init__(self, locked: Mapping[RunId, LockedRun]) -> None:
        self._locked = locked
        self._last: dict[RunId, int] = {}
        self._cancelled: set[RunId] = set()
        self._rows: list[bytes] = []

    def add(self, letters: Iterable[RunSignal]) -> None:
        for letter in letters:
            target = self._locked.get(letter.run_id)
            if target and self._lets_in(letter, target):
                n = self._last[letter.run_id] = self._last.get(letter.run_id, target.delivered) + 1
                row = (
                    quote_text(letter.run_id),
                    n,
                    KINDS[letter.kind],
                    quote_text(letter.step),
                    NOW,
                    quote_bytes(letter.value),
                )
                self._rows.append(b"(%b,%d,%b,%b,%b,%b)" % row)

    def _lets_in(self, letter: RunSignal, target: LockedRun) -> bool:
        if letter.kind is not EntryKind.CANCEL:
            return True
        is_first = not target.cancelled and letter.run_id not in self._cancelled
        if is_first:
            self._cancelled.add(letter.run_id)
        return is_first

    def statements(self, limit: int) -> Iterator[Statement]:
        yield from inserts(INSERT_MAIL, self._rows, limit)
        yield from set_inbox_count(self._last)
        cancelled = [b"SELECT %b AS run_id" % quote_text(run) for run in sorted(self._cancelled)]
        yield from join_values(CANCEL, cancelled)
        yield from join_values(CANCEL_PARKED, cancelled)
