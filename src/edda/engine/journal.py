"""The journal writer: one per worker, one flush in flight, everything that piled up meanwhile in the next.

Every batch is a compare-and-set on the worker's fence row. That one row says whether the worker still owns
its runs, in which order its batches went in, and whether a batch whose answer was lost is in. The rules:

- each batch has a random token, which its compare-and-set writes into the fence row: only a batch whose own token is
  found there was written. A count alone would also fit a batch of a cloned process or a restored snapshot;
- a batch whose outcome is unknown is sent again, the same but for runs that are no longer ours, with the same token;
- nothing is ever added to such a batch, and it is resolved even if nobody waits for it any more;
- a run's records go in as a prefix of its history: a bad record is isolated by run, never by record;
- a run whose row another transaction has locked is set aside with what was taken from it: the others go on without it,
  and nothing more is taken from it until that is written. There is still only one flush in flight.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from edda.core.model import BatchResult, End, Fence, Recur, RunId, RunWrite
from edda.errors import (
    EddaError,
    LeaseLostError,
    MigrationError,
    StorageConflictError,
    StorageDuplicateError,
    StorageLockedError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.storage.ports import Journal, Runs

from .tasks import Backoff, Outage

logger = logging.getLogger(__name__)

MOST_RECORDS = 1_000
MOST_BYTES = 4 << 20
MAX_PENDING_RUNS = 5_000
"""Runs with something to write: from here on no new work is taken in."""
FIRST_LOOK = 0.1
LAST_LOOK = 1.0
"""Seconds between two looks at rows that are locked."""


class RunWriter(Protocol):
    """A run with something to write."""

    run_id: RunId
    epoch: int

    @property
    def is_stored(self) -> bool:
        """Whether the run's own rows are committed."""
        ...

    @property
    def signal_targets(self) -> frozenset[RunId]:
        """The runs it has letters for."""
        ...

    def next_write(self, most: int) -> RunWrite | None:
        """What it has to write now, at most so many records; None if nothing."""
        ...

    def on_committed(self, bundle: RunWrite, written: BatchResult) -> None: ...

    def on_rejected(self, bundle: RunWrite, error: StorageRejectedError) -> None: ...


class JournalStorage(Journal, Runs, Protocol):
    """What the writer asks of a database."""


class BatchItem(Struct, frozen=True):
    source: RunWriter
    bundle: RunWrite

    @property
    def touched(self) -> set[RunId]:
        """The runs whose rows it has to lock."""
        return {self.bundle.run_id, *(letter.run_id for letter in self.bundle.letters)}


class Held(Struct):
    """What was taken from a run whose row is locked: it waits, and nothing more is taken from the run meanwhile."""

    part: BatchItem
    since: float
    due: float
    """When to look again whether it is locked."""
    pause: float = FIRST_LOOK
    tell_at: float = 0.0
    is_free: bool = False
    """It goes in with the next batch."""


class Sending(Struct):
    """A batch on its way."""

    token: int
    begun: float
    backoff: Backoff
    is_unknown: bool = False
    """It may be in: it was sent and not answered."""
    timeouts: int = 0
    """How often a lock was not to be had though no row of its runs was locked."""


class JournalWriter:
    def __init__(
        self,
        storage: JournalStorage,
        fence: Fence,
        *,
        owns: Callable[[RunId, int], bool],
        owned_sources: Callable[[], Sequence[RunWriter]],
        lost: Callable[[RunWriter, str], None],
        outage: Outage,
    ) -> None:
        self._storage = storage
        self._fence = fence
        self._owns = owns
        self._owned_sources = owned_sources
        self._on_run_lost = lost
        self._outage = outage
        self._dirty: dict[RunId, RunWriter] = {}
        self._quarantined: set[RunId] = set()
        """Runs that once held a record the database refuses; they no longer share a batch."""
        self._held: dict[RunId, Held] = {}
        self._tell_of_locks_at = 0.0
        self._claims = 0
        """The number of the last claim that was answered."""
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._flushing = False
        self.ownership_checks = 0
        """Raised before each look at what we own. Who claims runs compares it before and after."""
        self.batches = 0
        self.records = 0
        self.trouble: EddaError | None = None
        """Why the batch that is being sent has no answer yet."""

    @property
    def is_idle(self) -> bool:
        return not self._dirty and not self._flushing and not self._held

    @property
    def is_overloaded(self) -> bool:
        return len(self._dirty) + len(self._held) > MAX_PENDING_RUNS // 2

    async def wait_for_capacity(self) -> None:
        while len(self._dirty) > MAX_PENDING_RUNS:
            self._room.clear()
            await self._room.wait()

    def enqueue(self, source: RunWriter) -> None:
        """The source has something to write; it will be asked for it when the next batch is made."""
        held = self._held.get(source.run_id)
        if held is not None:
            if held.part.source is source:
                return  # it comes again once that is written
            del self._held[source.run_id]
        if not self._dirty:  # else the writer knows that there is more
            self._wake.set()
        self._dirty[source.run_id] = source

    async def run(self) -> None:
        """Flush for ever; ends with `LeaseLostError` when the fence is gone."""
        while True:
            await self._wait()
            self._wake.clear()
            while self._dirty or self._is_look_due:
                if self._is_look_due:
                    await self._look_at_held()
                batch = self._make_batch()
                self._flushing = bool(batch)
                try:
                    await self._commit(batch)
                finally:
                    self._flushing = False

    async def _wait(self) -> None:
        if not self._held:
            await self._wake.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(held.due for held in self._held.values()) - time.monotonic())):
                await self._wake.wait()

    @property
    def _is_look_due(self) -> bool:
        return bool(self._held) and min(held.due for held in self._held.values()) <= time.monotonic()

    def _make_batch(self) -> list[BatchItem]:
        batch = self._take_free()
        written, addressed = set[RunId](), set[RunId]()
        for part in batch:
            written.add(part.bundle.run_id)
            addressed |= part.touched - {part.bundle.run_id}
        if batch and batch[-1].bundle.run_id in self._quarantined:
            return batch
        records = size = 0
        dirty = self._dirty
        while dirty and records < MOST_RECORDS and size < MOST_BYTES:
            run_id, source = next(iter(dirty.items()))
            signal_targets = source.signal_targets
            if batch and (run_id in self._quarantined or run_id in addressed or not signal_targets.isdisjoint(written)):
                break  # alone, or not in one batch with those it writes to: that is the batch after this one
            del dirty[run_id]
            written.add(run_id)
            if signal_targets:
                addressed |= signal_targets
            bundle = source.next_write(MOST_RECORDS - records)
            if bundle is None:
                continue
            batch.append(BatchItem(source, bundle))
            records += len(bundle.entries) + 1
            size += bundle.size
            if run_id in self._quarantined:
                break
        if len(self._dirty) <= MAX_PENDING_RUNS // 2:
            self._room.set()
        return batch

    def claimed(self, number: int) -> None:
        """A claim was answered: a database that knows of fewer has lost it, and with it the runs that it brought."""
        self._claims = max(self._claims, number)

    async def _commit(self, batch: list[BatchItem]) -> None:
        try:
            await self._send(batch, Sending(_new_token(), time.monotonic(), Backoff()))
        finally:
            self.trouble = None

    async def _send(self, batch: list[BatchItem], sending: Sending) -> None:
        while True:
            batch = [part for part in batch if self._owns(part.bundle.run_id, part.bundle.epoch)]
            if not batch and not sending.is_unknown:
                return
            try:
                fence = replace(self._fence, claims=self._claims)
                written = await self._storage.write(fence, [part.bundle for part in batch], sending.token)
            except StorageLockedError as error:
                batch = await self._make_way(batch, sending, error)
                continue
            except (StorageConflictError, StorageUnavailableError, MigrationError) as error:
                await self._postpone(sending, error)
                continue
            except StorageRejectedError as error:
                await self._bisect(batch, error)
                return
            if written is None and await self._was_committed(sending.token if sending.is_unknown else None):
                written = await self._rebuild_result(batch)
            if written is not None:
                self._apply_commit(batch, sending.token, written)
                return
            await sending.backoff.pause()

    async def _postpone(self, sending: Sending, error: EddaError) -> None:
        if isinstance(error, StorageConflictError):
            logger.debug("batch %d: %s; sent again", self._fence.batch_no, error)
        else:  # tables that are away come back, as a database does
            sending.is_unknown = True
            self.trouble = error
            message = "batch %d has no answer (%s); sending it again"
            if sending.backoff.warn(logger, message, self._fence.batch_no, error):
                self._outage.begin(error)
        await sending.backoff.pause()

    async def _was_committed(self, sent: int | None) -> bool:
        """After the fence matched nothing: was the batch in already, did single runs move, or is all lost? `sent` is
        the batch's token if it was sent before."""
        row, known = await self._read_fence(), self._fence
        if row is None:
            raise LeaseLostError(f"worker {known.worker} was taken over")
        if row.claims < self._claims:
            raise LeaseLostError(
                f"worker {known.worker} made {self._claims} claims, the database knows of {row.claims}: the database "
                "lost commits it had acknowledged; starting anew"
            )
        if row.batch_no == known.batch_no + 1 and row.token == sent:
            return True
        if (row.batch_no, row.token) == (known.batch_no, known.token) and row.moves >= known.moves:
            if row.moves > known.moves:
                await self._refresh_ownership(row.moves)
            return False  # if nothing has moved the look at the fence raced with a rollback: the batch is sent again
        raise LeaseLostError(
            f"worker {known.worker} is at batch {known.batch_no}, the database at {row.batch_no}"
            f"{'' if row.batch_no != known.batch_no else ' of another writer'}: the database lost commits it had "
            "acknowledged, or two processes use one worker id; starting anew"
        )

    async def _read_fence(self) -> Fence | None:
        backoff = Backoff()
        while True:
            try:
                return await self._storage.read_fence(self._fence.worker)
            except (StorageUnavailableError, StorageConflictError, MigrationError):
                await backoff.pause()

    async def _rebuild_result(self, batch: list[BatchItem]) -> BatchResult:
        """The answer was lost. Who asked for events and is still ours asks again, which changes nothing if it was
        registered; who is not ours any more was released, or has ended."""
        asked = [part.bundle for part in batch if part.bundle.waits or isinstance(part.bundle.move, End | Recur)]
        owned = await self._read_owned() if asked else {}
        return BatchResult(
            unmet={
                bundle.run_id: frozenset(wait.step for wait in bundle.waits)
                for bundle in asked
                if owned.get(bundle.run_id) == bundle.epoch and not await self._has_recurred(bundle)
            }
        )

    async def _has_recurred(self, bundle: RunWrite) -> bool:
        if not isinstance(bundle.move, Recur):
            return False
        backoff = Backoff()
        while True:
            try:
                record = await self._storage.get(bundle.run_id)
                return record is not None and record.gen > bundle.gen
            except (StorageUnavailableError, StorageConflictError, MigrationError):
                await backoff.pause()

    async def _read_owned(self) -> dict[RunId, int]:
        backoff = Backoff()
        while True:
            try:
                return await self._storage.owned_runs(self._fence.worker)
            except (StorageUnavailableError, StorageConflictError, MigrationError):
                await backoff.pause()

    async def _refresh_ownership(self, moves: int) -> None:
        """Some run was taken from us singly: find out which, and let go of it."""
        known = [source for source in self._owned_sources() if source.is_stored]
        self.ownership_checks += 1
        owned = await self._read_owned()
        # Only runs that were in memory before the look are judged: one claimed meanwhile is not in the answer.
        for source in known:
            if owned.get(source.run_id) != source.epoch:
                self._on_run_lost(source, "another process has taken it")
        self._fence = replace(self._fence, moves=moves)

    def _apply_commit(self, batch: list[BatchItem], token: int, written: BatchResult) -> None:
        self._fence = replace(self._fence, batch_no=self._fence.batch_no + 1, token=token)
        self.batches += 1
        for part in batch:
            self.records += len(part.bundle.entries)
            if self._held:
                self._let_go(part)
            if self._owns(part.bundle.run_id, part.bundle.epoch):
                part.source.on_committed(part.bundle, written)

    async def _bisect(self, batch: list[BatchItem], error: StorageRejectedError) -> None:
        """Halve by run until the bad one stands alone; only that run is told."""
        if len(batch) == 1:
            part = batch[0]
            if isinstance(error, StorageDuplicateError):
                # Its place in the history, or its end, is taken: that is no fault of the run but of who drives it.
                self._on_run_lost(part.source, f"another worker has written its next record ({error})")
                return
            logger.error("run %s: the database refuses its record: %s", part.bundle.run_id, error)
            self._quarantined.add(part.bundle.run_id)
            part.source.on_rejected(part.bundle, error)
            return
        middle = len(batch) // 2
        await self._commit(batch[:middle])
        await self._commit(batch[middle:])

    # Rows that others have locked

    async def _make_way(self, batch: list[BatchItem], sending: Sending, error: StorageLockedError) -> list[BatchItem]:
        """A lock was not to be had in time. Set aside what waits for it; returns what is to be sent now."""
        # What may have been written already is not divided: it would be written again in part.
        locked = None if sending.is_unknown else await self._find_locked(batch)
        if locked:
            return self._hold_locked(batch, locked, sending.begun)
        if locked is not None:  # it was freed a moment ago, or is a lock of another kind than a run's row
            sending.timeouts += 1
            if sending.timeouts > 1 or self._is_alone(batch):
                await self._part(batch, sending.begun)
                return []
        level = logging.DEBUG
        if time.monotonic() >= self._tell_of_locks_at:
            self._tell_of_locks_at, level = time.monotonic() + 10.0, logging.WARNING
        logger.log(level, "journal: batch %d waits for a lock (%s); sending it again", self._fence.batch_no, error)
        await sending.backoff.pause()
        return batch

    def _is_alone(self, batch: Sequence[BatchItem]) -> bool:
        return len(batch) == 1 and batch[0].bundle.run_id in self._quarantined

    def _hold_locked(self, batch: Sequence[BatchItem], locked: frozenset[RunId], begun: float) -> list[BatchItem]:
        """Set aside what has to wait for a locked row; returns the rest."""
        blocked = [part for part in batch if not locked.isdisjoint(part.touched)]
        for part in blocked:
            self._hold(part, begun)
        self._tell_of_held()
        return [part for part in batch if part not in blocked]

    async def _part(self, batch: list[BatchItem], begun: float) -> None:
        """Halve by run until what waits for some other lock stands alone; it is tried again alone, ever more rarely."""
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._commit(batch[:middle])
            await self._commit(batch[middle:])
            return
        self._quarantined.add(batch[0].bundle.run_id)
        self._hold(batch[0], begun)
        self._tell_of_held()

    def _hold(self, part: BatchItem, begun: float) -> None:
        run_id, now = part.bundle.run_id, time.monotonic()
        held = self._held.get(run_id)
        if held is None or held.part is not part:
            held = self._held[run_id] = Held(part, begun, now)
        held.is_free = False
        if run_id in self._quarantined:  # each try of it holds up all others until it times out
            held.pause = max(held.pause, LAST_LOOK)
        held.due, held.pause = (
            now + held.pause,
            min(held.pause * 1.5, 10.0 if run_id in self._quarantined else LAST_LOOK),
        )
        self._dirty.pop(run_id, None)  # what comes after it waits with it

    async def _find_locked(self, parts: Sequence[BatchItem]) -> frozenset[RunId] | None:
        """None if that cannot be said: the whole table may be locked, or the database away."""
        try:
            return await self._storage.locked({run_id for part in parts for run_id in part.touched})
        except (StorageUnavailableError, StorageConflictError, MigrationError):
            return None

    async def _look_at_held(self) -> None:
        now = time.monotonic()
        due = [held for held in self._held.values() if held.due <= now and not held.is_free]
        locked = await self._find_locked([held.part for held in due]) if due else None
        for held in due:
            bundle = held.part.bundle
            if not self._owns(bundle.run_id, bundle.epoch):
                self._let_go(held.part)
            elif locked is None or not locked.isdisjoint(held.part.touched):
                self._hold(held.part, held.since)
            else:
                held.is_free, held.due = True, math.inf
        self._tell_of_held()

    def _take_free(self) -> list[BatchItem]:
        """Of those that are no longer locked as many as may share a batch."""
        batch: list[BatchItem] = []
        written, addressed = set[RunId](), set[RunId]()
        for run_id, held in tuple(self._held.items()):
            if not held.is_free:
                continue
            if not self._owns(run_id, held.part.bundle.epoch):
                self._let_go(held.part)
                continue
            signal_targets = held.part.touched - {run_id}
            if batch and (run_id in self._quarantined or run_id in addressed or not signal_targets.isdisjoint(written)):
                held.due = 0.0  # with the batch after this one
                continue
            batch.append(held.part)
            written.add(run_id)
            addressed |= signal_targets
            if run_id in self._quarantined:
                break
        return batch

    def _let_go(self, part: BatchItem) -> None:
        """It is written, or no longer ours."""
        held = self._held.get(part.bundle.run_id)
        if held is not None and held.part is part:
            del self._held[part.bundle.run_id]

    def _tell_of_held(self) -> None:
        """One line for all of them, of the one that has waited longest, ever more rarely."""
        first = min(self._held.values(), key=lambda held: held.since, default=None)
        now = time.monotonic()
        if first is None or now < first.tell_at:
            return
        others = f" (and {len(self._held) - 1} more)" if len(self._held) > 1 else ""
        logger.warning(
            "journal: run %s%s has waited %.1f s for a row that another transaction has locked, such as a step whose "
            "COMMIT hangs; its record is tried again, the other runs of this worker go on",
            first.part.bundle.run_id,
            others,
            now - first.since,
        )
        for held in self._held.values():
            held.tell_at = now + max(5.0, 2 * (now - held.since))

    def unquarantine(self, run_id: RunId) -> None:
        self._quarantined.discard(run_id)
        self._held.pop(run_id, None)


def _new_token() -> int:
    """A process that was restored from a snapshot may draw the same random bits as the one that it is a copy of, but
    not at the same time."""
    return (secrets.randbits(63) + time.time_ns()) & (2**63 - 1)
