"""What the locked rows decide: who gets an event, who may end or begin anew, and which letters are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from edda.core.model import AckInbox, End, Recur, RunId, RunWrite, Transition

from .batch_sql import INSERT_RESULT, GenerationWriter, LockedRun, SignalWriter, TransitionWriter, result_row
from .exclusive_messages import ExclusiveMessages
from .session import COMMIT, Row
from .statement import Statement, bind, inserts, quote_text
from .waits import WaitRegistration, registers_waits


def needs_locked_rows(bundle: RunWrite) -> bool:
    """Whether what it writes cannot be known before the rows are locked."""
    if bundle.letters or registers_waits(bundle):
        return True
    if bundle.start:
        return False
    return isinstance(bundle.move, Recur) or (isinstance(bundle.move, End) and bundle.move.watchers > 0)


def is_decided_later(bundle: RunWrite) -> bool:
    """Whether a batch that is judged leaves its move to that; a run that begins with it has nobody to wait for."""
    return registers_waits(bundle) or (bundle.start is None and isinstance(bundle.move, End | Recur))


class BatchDecision:
    def __init__(
        self,
        batch: Sequence[RunWrite],
        locked: Mapping[RunId, LockedRun],
        found: Sequence[tuple[int, int]],
        messages: Iterable[Row] = (),
    ) -> None:
        asking = [bundle for bundle in batch if registers_waits(bundle)]
        delivered = {run: row.delivered for run, row in locked.items()}
        self._registration = WaitRegistration(asking, delivered, found, ExclusiveMessages(messages))
        self._moves = TransitionWriter()
        self._generations = GenerationWriter()
        self._mail = SignalWriter(locked)
        self._results: list[bytes] = []
        self.unmet = dict(self._registration.unmet)
        for bundle in batch:
            self._judge(bundle, locked.get(bundle.run_id))

    def _judge(self, bundle: RunWrite, row: LockedRun | None) -> None:
        if row and _is_refused(bundle.move, row):
            self.unmet[bundle.run_id] = frozenset()
            absorbed = bundle.move.absorbed if isinstance(bundle.move, Recur | End) else None
            if absorbed is not None:
                self._moves.add(quote_text(bundle.run_id), AckInbox(absorbed))
            return
        if is_decided_later(bundle):
            self._close(bundle, row)
        self._mail.add(bundle.letters)

    def _close(self, bundle: RunWrite, row: LockedRun | None) -> None:
        run_id = quote_text(bundle.run_id)
        match bundle.move:
            case End() as end:
                self._results.append(result_row(run_id, bundle.gen, end))
            case Recur() as recur if row:
                self._generations.add(bundle, recur)
            case _:
                return
        if row:
            self._moves.add(run_id, bundle.move)

    def statements(self, limit: int) -> Iterator[Statement]:
        yield from self._registration.statements(limit)
        yield from self._generations.statements(limit)
        yield from self._moves.statements()
        yield from inserts(INSERT_RESULT, self._results, limit)
        yield from self._mail.statements(limit)
        yield bind(COMMIT)


def _is_refused(move: Transition | None, row: LockedRun) -> bool:
    match move:
        case End(watchers=known, settled=settled):
            return known != row.watchers or settled not in (None, row.delivered)
        case Recur(absorbed):
            return absorbed != row.delivered
    return False
