"""A database in dictionaries: one method is one transaction, and what it does is what every adapter has to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import astuple

from edda.core.model import (
    Absorb,
    Bundle,
    CancelOutcome,
    Claim,
    ClaimedRun,
    Delivery,
    End,
    Entry,
    EntryKind,
    Fence,
    Release,
    RunFilter,
    RunId,
    RunRecord,
    Start,
    Takeover,
    WorkerId,
    WorkerInfo,
)
from edda.core.states import ENDED, WAITING, RunStatus
from edda.errors import StorageRejectedError

TAKEOVER_LIMIT = 5_000
_RESTING = WAITING | {RunStatus.PARKED}
_INT64 = range(-(2**63), 2**63)


def wall_clock() -> int:
    return time.time_ns() // 1_000


class _Sched(Struct):
    """The row of an open run, as `edda_sched` has it."""

    run_id: RunId
    workflow: str
    gen: int
    epoch: int
    owner: WorkerId | None
    ready_at: int | None
    status: RunStatus = RunStatus.RUNNING
    delivered: int = 0
    absorbed: int = 0
    cancelled: bool = False
    attempts: int = 0
    reason: str | None = None

    def free(self, ready_at: int) -> None:
        self.owner, self.ready_at, self.status = None, ready_at, RunStatus.RUNNING

    def release(self, move: Release) -> bool:
        """Whether mail had come, so that the run is ready again at once."""
        mail = self.delivered != move.absorbed
        self.owner, self.absorbed = None, move.absorbed
        self.attempts = self.attempts + 1 if move.status is RunStatus.PARKED else 0
        self.ready_at, self.status, self.reason = move.ready_at, move.status, move.reason
        if mail:
            self.ready_at, self.status, self.reason = 0, RunStatus.RUNNING, None
        return mail

    def status_at(self, now: int) -> RunStatus:
        due = self.owner is None and self.ready_at is not None and self.ready_at <= now
        return RunStatus.RUNNING if due and self.status in _RESTING else self.status


class _Result(Struct, frozen=True):
    gen: int
    status: RunStatus
    value: bytes
    ended_at: int


class MemoryDatabase:
    def __init__(self, now: Callable[[], int] = wall_clock) -> None:
        self.now = now
        self.workers: dict[WorkerId, int] = {}
        self.infos: dict[WorkerId, WorkerInfo] = {}
        """Worker -> end of its lease."""
        self.fences: dict[WorkerId, Fence] = {}
        self.runs: dict[RunId, dict[int, Start]] = {}
        """Run -> generation -> how it was started."""
        self.histories: dict[tuple[RunId, int], dict[int, Entry]] = {}
        self.results: dict[RunId, _Result] = {}
        self.scheds: dict[RunId, _Sched] = {}
        self.inboxes: dict[RunId, list[Delivery]] = {}
        self.listeners: set[asyncio.Event] = set()

    # The journal

    def write(self, fence: Fence, batch: Sequence[Bundle]) -> frozenset[RunId] | None:
        if self.fences.get(fence.worker) != fence:
            return None
        for bundle in batch:  # all of them before the first change: a batch goes in whole or not at all
            self._check(bundle)
        self.fences[fence.worker] = Fence(fence.worker, fence.batch_no + 1, fence.moves)
        return frozenset(bundle.run_id for bundle in batch if self._apply(fence.worker, bundle))

    def _check(self, bundle: Bundle) -> None:
        for record in (bundle, bundle.start, bundle.move, *bundle.entries):
            if record is not None:
                _check_values(record)
        seqs = {entry.seq for entry in bundle.entries}
        recorded = self.histories.get((bundle.run_id, bundle.gen), {})
        if len(seqs) < len(bundle.entries) or not seqs.isdisjoint(recorded):
            raise StorageRejectedError(f"run {bundle.run_id}: a history row with this number exists")
        if bundle.start and (bundle.run_id in self.scheds or bundle.gen in self.runs.get(bundle.run_id, {})):
            raise StorageRejectedError(f"run {bundle.run_id} exists")
        if isinstance(bundle.move, End) and bundle.run_id in self.results:
            raise StorageRejectedError(f"run {bundle.run_id} has a result")

    def _apply(self, worker: WorkerId, bundle: Bundle) -> bool:
        if bundle.start:
            owner = worker if bundle.start.ready_at is None else None
            self._insert(bundle.start, bundle.gen, bundle.epoch, owner, bundle.start.ready_at)
        history = self.histories.setdefault((bundle.run_id, bundle.gen), {})
        history.update((entry.seq, entry) for entry in bundle.entries)
        sched = self.scheds.get(bundle.run_id)
        match bundle.move:
            case End(status, value, at):
                self.results[bundle.run_id] = _Result(bundle.gen, status, value, at)
                self.scheds.pop(bundle.run_id, None)
            case Absorb(absorbed) if sched:
                sched.absorbed = absorbed
            case Release() as move if sched:
                return sched.release(move)
        return False

    def _insert(self, start: Start, gen: int, epoch: int, owner: WorkerId | None, ready_at: int | None) -> None:
        self.runs.setdefault(start.run_id, {})[gen] = start
        self.scheds[start.run_id] = _Sched(start.run_id, start.workflow, gen, epoch, owner, ready_at)

    def read_fence(self, worker: WorkerId) -> Fence | None:
        return self.fences.get(worker)

    def owned(self, worker: WorkerId) -> dict[RunId, int]:
        return {sched.run_id: sched.epoch for sched in self._owned_by(worker)}

    def _owned_by(self, worker: WorkerId) -> list[_Sched]:
        return [sched for sched in self.scheds.values() if sched.owner == worker]

    # Workers

    def register(self, worker: WorkerInfo, lease: int) -> int:
        if worker.id in self.fences or worker.id in self.workers:
            raise StorageRejectedError(f"worker {worker.id} is registered already")
        now = self.now()
        self.fences[worker.id] = Fence(worker.id, 0, 0)
        self.workers[worker.id] = now + lease
        self.infos[worker.id] = worker
        return now

    def neighbours(self, host: str) -> tuple[WorkerInfo, ...]:
        return tuple(info for id, info in self.infos.items() if id in self.workers and info.host == host)

    def retire(self, worker: WorkerId) -> None:
        self.fences.pop(worker, None)
        self.workers.pop(worker, None)
        self._free(self._owned_by(worker))

    def take_over(self, me: WorkerId) -> Takeover | None:
        now = self.now()
        lapsed = [(expires, worker) for worker, expires in self.workers.items() if expires < now and worker != me]
        if not lapsed:
            return None
        _, worker = min(lapsed)
        del self.workers[worker]
        self.fences.pop(worker, None)
        return Takeover(worker, self._free(self._owned_by(worker)[:TAKEOVER_LIMIT]))

    def free_orphans(self) -> int:
        return self._free([s for s in self.scheds.values() if s.owner is not None and s.owner not in self.fences])

    def _free(self, scheds: Sequence[_Sched]) -> int:
        now = self.now()
        for sched in scheds:
            sched.free(now)
        return len(scheds)

    def disown(self, run_id: RunId) -> bool:
        sched = self.scheds.get(run_id)
        if sched is None or sched.owner is None:
            return False
        if fence := self.fences.get(sched.owner):
            self.fences[sched.owner] = Fence(fence.worker, fence.batch_no, fence.moves + 1)
        self._free([sched])
        return True

    def beat(self, worker: WorkerId, lease: int) -> int | None:
        if worker not in self.workers:
            return None
        now = self.now()
        self.workers[worker] = now + lease
        return now

    # The queue

    def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int) -> Claim:
        now = self.now()
        if worker not in self.fences:
            return Claim(now, ())
        due = [(ready_at, sched.run_id) for ready_at, sched in self._unowned(workflows) if ready_at <= now]
        return Claim(now, tuple(self._claim(worker, self.scheds[run_id]) for _, run_id in sorted(due)[:limit]))

    def _unowned(self, workflows: Sequence[str]) -> Iterable[tuple[int, _Sched]]:
        for sched in self.scheds.values():
            if sched.owner is None and sched.ready_at is not None and sched.workflow in workflows:
                yield sched.ready_at, sched

    def _claim(self, worker: WorkerId, sched: _Sched) -> ClaimedRun:
        sched.owner, sched.epoch, sched.ready_at = worker, sched.epoch + 1, None
        sched.status, sched.reason = RunStatus.RUNNING, None
        start = self.runs[sched.run_id][sched.gen]
        return ClaimedRun(
            run_id=sched.run_id,
            workflow=sched.workflow,
            gen=sched.gen,
            epoch=sched.epoch,
            input=start.input,
            created_at=start.created_at,
            deadline=start.deadline,
            absorbed=sched.absorbed,
            attempts=sched.attempts,
            entries=self.history(sched.run_id, sched.gen),
            mail=self._mail(sched),
        )

    def next_due(self, workflows: Sequence[str]) -> int | None:
        first = min((ready_at for ready_at, _ in self._unowned(workflows)), default=None)
        return None if first is None else max(0, first - self.now())

    def unpark(self, workflows: Sequence[str]) -> int:
        parked = [
            sched
            for sched in self.scheds.values()
            if sched.status is RunStatus.PARKED and sched.owner is None and sched.workflow in workflows
        ]
        now = self.now()
        for sched in parked:  # still parked for the reader: its reason stays until somebody claims it
            sched.ready_at = now
        return len(parked)

    def mail(self, worker: WorkerId) -> tuple[Delivery, ...]:
        owned = sorted(self._owned_by(worker), key=lambda sched: sched.run_id)
        return tuple(letter for sched in owned for letter in self._mail(sched))

    def _mail(self, sched: _Sched) -> tuple[Delivery, ...]:
        return tuple(letter for letter in self.inboxes.get(sched.run_id, ()) if letter.n > sched.absorbed)

    # Runs

    def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        for start in starts:
            _check_values(start)
        new = {start.run_id: start for start in reversed(starts) if start.run_id not in self.runs}
        now = self.now()
        for start in new.values():
            self._insert(start, 0, 0, None, now if start.ready_at is None else start.ready_at)
        return frozenset(new)

    def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        sched = self.scheds.get(run_id)
        if sched is None:
            return CancelOutcome.ENDED if run_id in self.runs else CancelOutcome.MISSING
        if sched.cancelled:
            return CancelOutcome.ALREADY
        sched.cancelled = True
        sched.delivered += 1
        letter = Delivery(run_id, sched.delivered, EntryKind.CANCEL, self.now(), value=value)
        self.inboxes.setdefault(run_id, []).append(letter)
        if sched.owner is None:
            sched.ready_at, sched.status, sched.reason = 0, RunStatus.RUNNING, None
        return CancelOutcome.REQUESTED

    def get(self, run_id: RunId) -> RunRecord | None:
        return self._record(run_id, self.now()) if run_id in self.runs else None

    def history(self, run_id: RunId, gen: int | None = None) -> tuple[Entry, ...]:
        if gen is None:
            gen = max(self.runs.get(run_id, (0,)))
        history = self.histories.get((run_id, gen), {})
        return tuple(history[seq] for seq in sorted(history))

    def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        now = self.now()
        records = [record for run_id in self.runs if _fits(record := self._record(run_id, now), filter)]
        records.sort(key=lambda record: (record.created_at, record.run_id), reverse=True)
        return tuple(records[: filter.limit])

    def _record(self, run_id: RunId, now: int) -> RunRecord:
        gen, start = max(self.runs[run_id].items(), key=lambda item: item[0])
        result, sched = self.results.get(run_id), self.scheds.get(run_id)
        return RunRecord(
            run_id=run_id,
            workflow=start.workflow,
            gen=gen,
            status=result.status if result else self.scheds[run_id].status_at(now),
            input=start.input,
            created_at=start.created_at,
            deadline=start.deadline,
            owner=sched.owner if sched else None,
            ready_at=sched.ready_at if sched else None,
            reason=sched.reason if sched else None,
            ended_at=result.ended_at if result else None,
            value=result.value if result else None,
        )

    # News

    def announce(self) -> None:
        for listener in self.listeners:
            listener.set()


def _check_values(record: Struct) -> None:
    """Refuse what no real database takes: NUL or half a surrogate pair in text, a number beyond 64 bits."""
    for value in astuple(record):
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, int) and value not in _INT64:
            raise StorageRejectedError(f"{value} does not fit into 64 bits")
    if isinstance(record, End | Release) and (record.status in ENDED) is not isinstance(record, End):
        raise StorageRejectedError(f"{record.status} is no status for {type(record).__name__}")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise StorageRejectedError(f"{text!r} has a NUL in it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StorageRejectedError(f"{text!r} is not valid text") from error


def _fits(record: RunRecord, filter: RunFilter) -> bool:
    return (
        (filter.status is None or record.status is filter.status)
        and (filter.workflow is None or record.workflow == filter.workflow)
        and (filter.created_from is None or record.created_at >= filter.created_from)
        and (filter.created_to is None or record.created_at < filter.created_to)
        and (filter.before is None or (record.created_at, record.run_id) < filter.before)
    )
