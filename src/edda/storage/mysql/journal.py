"""The journal: one message is one batch is one commit, behind a compare-and-set on the worker's fence.

Only a batch in which runs ask for events takes two, because what is written depends on what is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from edda.core.model import Bundle, Fence, Release, RunId, WorkerId, Written
from edda.errors import StorageConflictError

from .batch import compose
from .moves import LOCK_SCHED
from .pool import Pool
from .rows import run_id
from .session import ExpectationMissedError, Session
from .waits import FIND_EVENT, Registration, asks

READ_FENCE = b"SELECT batch_no, moves FROM edda_fence WHERE worker = %b"
OWNED = b"SELECT run_id, epoch FROM edda_sched WHERE owner = %b"


class MySQLJournal:
    _journal: Pool
    """A line of its own: a batch never waits behind a reader."""
    _pool: Pool

    async def write(self, fence: Fence, batch: Sequence[Bundle]) -> Written | None:
        try:
            async with self._journal.session() as session:
                # All of it before the first is sent: bad data is refused here.
                statements = list(compose(fence, batch, session.limit))
                answers = await session.ask(*statements)
                delivered = {run_id(run): n for run, n in answers.to(LOCK_SCHED)}
                asking = [bundle for bundle in batch if asks(bundle)]
                registration = Registration(asking, delivered, answers.to(FIND_EVENT))
                if asking:
                    await _finish(session, registration)
        except ExpectationMissedError:
            return None
        return Written(frozenset(_with_mail(batch, delivered)), registration.unmet)

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        rows = (await self._pool.run(READ_FENCE, worker)).rows
        return Fence(worker, *rows[0]) if rows else None

    async def owned(self, worker: WorkerId) -> dict[RunId, int]:
        return {run_id(run): epoch for run, epoch in (await self._pool.run(OWNED, worker)).rows}


async def _finish(session: Session, registration: Registration) -> None:
    try:
        await session.send(*registration.statements(session.limit))
    except ExpectationMissedError as error:
        raise StorageConflictError("an event that was found has been pruned meanwhile") from error


def _with_mail(batch: Sequence[Bundle], delivered: Mapping[RunId, int]) -> Iterable[RunId]:
    for bundle in batch:
        if (
            isinstance(bundle.move, Release)
            and not bundle.waits
            and delivered.get(bundle.run_id, bundle.move.absorbed) != bundle.move.absorbed
        ):
            yield bundle.run_id
