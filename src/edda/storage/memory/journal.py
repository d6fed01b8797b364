"""Batches of runs in dictionaries: entries, transitions, children, watchers, claims and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from edda.core.model import (
    NO_CRASHES,
    AckInbox,
    BatchResult,
    CancelOutcome,
    Claim,
    ClaimedRun,
    End,
    EndWatcher,
    Entry,
    EntryKind,
    Fence,
    InboxItem,
    OutboxState,
    Recur,
    RunFilter,
    RunId,
    RunRecord,
    RunSignal,
    RunWrite,
    Start,
    Suspend,
    Takeover,
    WorkerId,
    WorkerInfo,
    WorkerStatus,
    suspect_groups,
    unpark_pause,
)
from edda.core.states import RunStatus
from edda.errors import StorageDuplicateError
from edda.storage.ports import AT_ONCE, RECLAIM

from .admin import MemorySteering
from .outbox import MemoryOutbox
from .queries import MemorySurvey
from .tables import OpenRun, Result, Tables, check_values, wall_clock


class MemoryJournal(Tables):
    # Watching

    def _insert_watcher(self, run_id: RunId, watcher: EndWatcher) -> None:
        sched, known = self.scheds.get(run_id), self.watching.get(run_id, set())
        if sched and watcher not in known:
            self.watching[run_id] = known | {watcher}
            sched.watchers += 1

    def watchers(self, run_id: RunId) -> tuple[EndWatcher, ...]:
        return tuple(sorted(self.watching.get(run_id, ()), key=lambda watcher: (watcher.run_id, watcher.step)))

    # What the journal asks for, inside its own transaction

    def is_refused(self, bundle: RunWrite) -> bool:
        """An end that does not know all who watch, an end or a next generation that would leave mail unread."""
        sched = self.scheds.get(bundle.run_id)
        if sched is None or bundle.start:
            return False
        match bundle.move:
            case End(watchers=known, settled=settled):
                return known != sched.watchers or settled not in (None, sched.delivered)
            case Recur(absorbed):
                return absorbed != sched.delivered
        return False

    def recur(self, sched: OpenRun, gen: int, move: Recur) -> None:
        generations = self.runs[sched.run_id]
        generations[gen + 1] = replace(generations[gen], input=move.input, created_at=move.at)
        self.histories[sched.run_id, gen + 1] = {move.entry.seq: move.entry}
        self.waiting.pop(sched.run_id, None)
        sched.gen, sched.absorbed = gen + 1, move.absorbed
        sched.cancelled, sched.undoing, sched.attempts = False, False, 0
        sched.end_if_parked, sched.crashes = False, NO_CRASHES

    def send(self, letters: Iterable[RunSignal]) -> None:
        """Who has ended gets none, and who is cancelled already no further cancel."""
        for letter in letters:
            sched, is_cancel = self.scheds.get(letter.run_id), letter.kind is EntryKind.CANCEL
            if sched is None or (is_cancel and sched.cancelled):
                continue
            sched.cancelled |= is_cancel
            if is_cancel:
                sched.cancel_parked()
            self.deliver(sched, letter.kind, step=letter.step, value=letter.value)
            sched.wake()


TAKEOVER_LIMIT = 5_000


class MemoryDatabase(MemorySteering, MemorySurvey, MemoryJournal, MemoryOutbox):
    def __init__(self, now: Callable[[], int] = wall_clock) -> None:
        super().__init__(now)
        self.listeners: set[asyncio.Event] = set()

    # The journal

    def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        stored = self.fences.get(fence.worker)
        if stored is None or stored.claims < fence.claims or replace(stored, claims=fence.claims) != fence:
            return None
        for bundle in batch:  # all of them before the first change: a batch goes in whole or not at all
            self._check(bundle)
        self.fences[fence.worker] = replace(stored, batch_no=fence.batch_no + 1, token=token)
        ready = set[RunId]()
        unmet = dict[RunId, frozenset[str]]()
        for bundle in batch:
            self._add(fence.worker, bundle)
        self.insert_unowned(child for bundle in batch for child in bundle.children)
        for bundle in batch:
            refused = self.is_refused(bundle)
            steps = self._settle_waits(bundle)
            if refused or steps:
                unmet[bundle.run_id] = steps
            if self._move(bundle, stays=refused or bool(steps)):
                ready.add(bundle.run_id)
            if not refused:
                self.send(bundle.letters)
        return BatchResult(frozenset(ready), unmet)

    def _check(self, bundle: RunWrite) -> None:
        for record in _parts(bundle):
            check_values(record)
        seqs = {entry.seq for entry in bundle.entries}
        recorded = self.histories.get((bundle.run_id, bundle.gen), {})
        if len(seqs) < len(bundle.entries) or not seqs.isdisjoint(recorded):
            raise StorageDuplicateError(f"run {bundle.run_id}: a history row with this number exists")
        if bundle.start and (bundle.run_id in self.scheds or bundle.gen in self.runs.get(bundle.run_id, {})):
            raise StorageDuplicateError(f"run {bundle.run_id} exists")
        if isinstance(bundle.move, End) and bundle.run_id in self.results:
            raise StorageDuplicateError(f"run {bundle.run_id} has a result")

    def _add(self, worker: WorkerId, bundle: RunWrite) -> None:
        if start := bundle.start:
            owner = worker if start.ready_at is None else None
            self.insert(
                start,
                ready_at=start.ready_at,
                start_seq=self.newest,
                gen=bundle.gen,
                epoch=bundle.epoch,
                owner=owner,
            )
        history = self.histories.setdefault((bundle.run_id, bundle.gen), {})
        history.update((entry.seq, entry) for entry in bundle.entries)
        self.write_side_effects(bundle)
        if bundle.undoing and (sched := self.scheds.get(bundle.run_id)):
            sched.undoing = True

    def _settle_waits(self, bundle: RunWrite) -> frozenset[str]:
        """Returns the steps that are not registered, because there is mail to read first."""
        sched = self.scheds.get(bundle.run_id)
        if sched is None:
            return frozenset()
        self.drop(bundle)
        self.give_back(bundle)
        if not bundle.waits:
            return frozenset()
        if isinstance(bundle.move, AckInbox | Suspend) and sched.delivered != bundle.move.absorbed:
            return frozenset(wait.step for wait in bundle.waits)
        return self.register_waits(sched, bundle.waits)

    def _move(self, bundle: RunWrite, stays: bool) -> bool:
        """Whether the run is ready again at once."""
        sched = self.scheds.get(bundle.run_id)
        match bundle.move:
            case End(status, value, at) if not stays:
                self.results[bundle.run_id] = Result(bundle.gen, status, value, at, bundle.epoch)
                for rows in (self.scheds, self.waiting, self.watching):
                    rows.pop(bundle.run_id, None)
            case Recur() as move if sched and not stays:
                self.recur(sched, bundle.gen, move)
            case Suspend() as move if sched and not stays:
                return sched.release(move, self.now())
            case AckInbox(absorbed) | Suspend(absorbed) | Recur(absorbed) | End(absorbed=int(absorbed)) if sched:
                sched.absorbed = absorbed
        return False

    def read_fence(self, worker: WorkerId) -> Fence | None:
        return self.fences.get(worker)

    def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        return {sched.run_id: sched.epoch for sched in self._owned_by(worker)}

    def _owned_by(self, worker: WorkerId) -> list[OpenRun]:
        return [sched for sched in self.scheds.values() if sched.owner == worker]

    # Workers

    def register(self, worker: WorkerInfo, lease: int) -> int:
        if worker.id in self.fences or worker.id in self.workers:
            raise StorageDuplicateError(f"worker {worker.id} is registered already")
        now = self.now()
        self.fences[worker.id] = Fence(worker.id, 0, 0)
        self.workers[worker.id] = now + lease
        self.infos[worker.id] = worker
        self.registered[worker.id] = now
        return now

    def registered_workers(self) -> tuple[WorkerStatus, ...]:
        now = self.now()
        return tuple(WorkerStatus(self.infos[id], expires < now) for id, expires in self.workers.items())

    def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        self.fences.pop(worker, None)
        self.workers.pop(worker, None)
        self._free(self._owned_by(worker), died)

    def take_over(self, me: WorkerId) -> Takeover | None:
        now = self.now()
        lapsed = [(expires, worker) for worker, expires in self.workers.items() if expires < now and worker != me]
        if not lapsed:
            return None
        _, worker = min(lapsed)
        del self.workers[worker]
        self.fences.pop(worker, None)
        return Takeover(worker, self._free(self._owned_by(worker)[:TAKEOVER_LIMIT], died=True))

    def free_orphans(self) -> int:
        orphans = [s for s in self.scheds.values() if s.owner is not None and s.owner not in self.fences]
        return self._free(orphans, died=True)

    def _free(self, scheds: Sequence[OpenRun], died: bool) -> int:
        now = self.now()
        for sched in scheds:
            if died:
                sched.die_with_owner(self._last_seq(sched), now)
            else:
                sched.free(now)
        suspects = sorted((sched for sched in scheds if died and sched.crashes.is_suspect), key=lambda one: one.run_id)
        for sched, group in zip(suspects, suspect_groups([one.crashes for one in suspects]), strict=True):
            sched.ready_at, sched.suspect_at = None, now - group
        return len(scheds)

    def _last_seq(self, sched: OpenRun) -> int:
        return max(self.histories.get((sched.run_id, sched.gen), {}), default=0)

    def release_run(self, run_id: RunId) -> bool:
        sched = self.scheds.get(run_id)
        if sched is None or sched.owner is None:
            return False
        if fence := self.fences.get(sched.owner):
            self.fences[sched.owner] = replace(fence, moves=fence.moves + 1)
        self._free([sched], died=False)
        return True

    def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        if fence := self.fences.get(worker):
            self.fences[worker] = Fence(fence.worker, fence.batch_no, fence.moves + 1)
        return self._free([sched for sched in self._owned_by(worker) if sched.run_id != keep], died=False)

    def is_ahead(self) -> bool:
        return any(start.created_at > self.now() for gens in self.runs.values() for start in gens.values())

    def mend_times(self, lease: int) -> int:
        now = self.now()
        self.workers = {worker: min(expires, now + lease) for worker, expires in self.workers.items()}
        for seq, record in self.outbox.items():
            if record.state is OutboxState.PENDING and record.due > now + RECLAIM:
                self.outbox[seq] = replace(record, due=now + RECLAIM)
        for seq, (due, dispatch) in self.waiting_dispatches.items():
            self.waiting_dispatches[seq] = min(due, now + RECLAIM), dispatch
        late = [sched for sched in self.scheds.values() if self._is_late(sched, now)]
        for sched in late:
            sched.ready_at = 0
        return len(late)

    def _is_late(self, sched: OpenRun, now: int) -> bool:
        """Unowned and `running` was ready when it was written: only a start with a delay is due later."""
        ready_at = sched.ready_at
        if sched.owner is not None or sched.status is not RunStatus.RUNNING or ready_at is None or ready_at <= now:
            return False
        return sched.epoch > 0 or ready_at <= self.runs[sched.run_id][sched.gen].created_at + AT_ONCE

    def keep_company(self, worker: WorkerId) -> None:
        for sched in self._owned_by(worker):
            sched.is_alone = False

    def clear_deaths(self, run_id: RunId, epoch: int) -> None:
        sched = self.scheds.get(run_id)
        if sched is not None and sched.owner is not None and sched.epoch == epoch:
            sched.crashes, sched.is_alone = NO_CRASHES, False

    def beat(self, worker: WorkerId, lease: int) -> int | None:
        if worker not in self.workers:
            return None
        now = self.now()
        self.workers[worker] = now + lease
        return now

    # The queue

    def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, seen: int = 0) -> Claim:
        now = self.now()
        number = self._count_claim(worker, seen)
        if number is None:
            return Claim(now, ())
        due = [(ready_at, sched.run_id) for ready_at, sched in self._unowned(workflows) if ready_at <= now]
        runs = tuple(self._claim(worker, self.scheds[run_id]) for _, run_id in sorted(due)[:limit])
        return Claim(now, runs, number)

    def _count_claim(self, worker: WorkerId, seen: int) -> int | None:
        """None if the worker was taken over, or some of its claims are lost."""
        fence = self.fences.get(worker)
        if fence is None or fence.claims < seen:
            return None
        self.fences[worker] = replace(fence, claims=fence.claims + 1)
        return fence.claims + 1

    def claim_suspects(self, worker: WorkerId, workflows: Sequence[str], few: int, alone: bool, seen: int = 0) -> Claim:
        now = self.now()
        number = self._count_claim(worker, seen)
        if number is None:
            return Claim(now, ())
        due = sorted(
            (-sched.suspect_at, sched.run_id)
            for sched in self.scheds.values()
            if sched.suspect_at is not None and sched.workflow in workflows
        )
        chosen = [self.scheds[run_id] for group, run_id in due if group == due[0][0]][:few]
        for sched in chosen:
            sched.suspect_at, sched.is_alone = None, alone and len(chosen) == 1
        return Claim(now, tuple(self._claim(worker, sched) for sched in chosen), number)

    def has_suspects(self, workflows: Sequence[str]) -> bool:
        return any(s.suspect_at is not None and s.workflow in workflows for s in self.scheds.values())

    def _unowned(self, workflows: Sequence[str]) -> Iterable[tuple[int, OpenRun]]:
        for sched in self.scheds.values():
            if sched.owner is None and sched.ready_at is not None and sched.workflow in workflows:
                yield sched.ready_at, sched

    def _claim(self, worker: WorkerId, sched: OpenRun) -> ClaimedRun:
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
            waits=tuple((step, wait.key) for step, wait in sorted(self.waiting.get(sched.run_id, {}).items())),
            start_seq=sched.start_seq,
            parent=start.parent,
            parent_step=start.parent_step,
            depth=start.depth,
            watchers=self.watchers(sched.run_id),
            undoing=sched.undoing,
            end_if_parked=sched.end_if_parked,
            crashes=sched.crashes,
        )

    def next_due(self, workflows: Sequence[str]) -> int | None:
        first = min((ready_at for ready_at, _ in self._unowned(workflows)), default=None)
        return None if first is None else max(0, first - self.now())

    def wake_parked(self, workflows: Sequence[str]) -> int:
        parked = [
            sched
            for sched in self.scheds.values()
            if sched.status is RunStatus.PARKED and sched.owner is None and sched.workflow in workflows
        ]
        now, moved = self.now(), 0
        for sched in parked:  # still parked for the reader: its reason stays until a worker claims it
            due = max(now, (sched.parked_at or 0) + unpark_pause(sched.attempts))
            if sched.ready_at is not None and due < sched.ready_at:
                sched.ready_at = due
                moved += 1
        return moved

    def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        owned = sorted(self._owned_by(worker), key=lambda sched: sched.run_id)
        return tuple(letter for sched in owned for letter in self._mail(sched))

    def _mail(self, sched: OpenRun) -> tuple[InboxItem, ...]:
        inbox = self.inboxes.get(sched.run_id, {})
        return tuple(self._opened(inbox[n]) for n in range(sched.absorbed + 1, sched.delivered + 1) if n in inbox)

    def _opened(self, letter: InboxItem) -> InboxItem:
        """An event's letter has only its number."""
        stored = None if letter.event is None else self.events.get(letter.event)
        return replace(letter, value=stored.event.body) if stored else letter

    # Runs

    def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        for start in starts:
            check_values(start)
        return self.insert_unowned(starts)

    def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        sched = self.scheds.get(run_id)
        if sched is None:
            return CancelOutcome.ENDED if run_id in self.runs else CancelOutcome.MISSING
        is_tried = sched.cancel_parked()
        if sched.cancelled:
            return CancelOutcome.REQUESTED if is_tried else CancelOutcome.ALREADY
        sched.cancelled = True
        self.deliver(sched, EntryKind.CANCEL, value=value)
        sched.wake()
        return CancelOutcome.REQUESTED

    def get(self, run_id: RunId) -> RunRecord | None:
        return self.record(run_id, self.now()) if run_id in self.runs else None

    def add_watcher(self, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        check_values(watcher)
        self._insert_watcher(run_id, watcher)
        return self.get(run_id)

    def history(self, run_id: RunId, gen: int | None = None) -> tuple[Entry, ...]:
        if gen is None:
            gen = max(self.runs.get(run_id, (0,)))
        history = self.histories.get((run_id, gen), {})
        return tuple(history[seq] for seq in sorted(history))

    def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        now = self.now()
        records = [record for run_id in self.runs if _fits(record := self.record(run_id, now), filter)]
        records.sort(key=lambda record: (record.created_at, record.run_id), reverse=True)
        return tuple(records[: filter.limit])

    # News

    def notify(self) -> None:
        for listener in self.listeners:
            listener.set()


def _parts(bundle: RunWrite) -> Iterator[Struct]:
    """All that is stored of it."""
    yield bundle
    yield from (part for part in (bundle.start, bundle.move) if part is not None)
    if isinstance(bundle.move, Recur):
        yield bundle.move.entry
    yield from (*bundle.entries, *bundle.waits, *bundle.children, *bundle.letters)
    yield from (*bundle.dispatches, *bundle.outgoing, *bundle.facts)


def _fits(record: RunRecord, filter: RunFilter) -> bool:
    return (
        (filter.status is None or record.status is filter.status)
        and (filter.workflow is None or record.workflow == filter.workflow)
        and (filter.created_from is None or record.created_at >= filter.created_from)
        and (filter.created_to is None or record.created_at < filter.created_to)
        and (filter.before is None or (record.created_at, record.run_id) < filter.before)
    )
