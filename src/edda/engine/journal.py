"""The journal writer: one per worker, with one batch in flight; records that are added meanwhile are in the next batch.

Every batch begins with a compare-and-set on the worker's fence row. That row says whether the worker still owns its
runs, in which order its batches were committed, and whether a batch whose answer was lost was committed. The rules:

- each batch has a random token, which its compare-and-set writes into the fence row: only a batch whose own token is
  found there was written. A count alone would also fit a batch of a cloned process or a restored snapshot;
- a batch whose outcome is unknown is sent again with the same token, without the runs that this worker lost since;
- nothing is ever added to such a batch, and it is sent until its outcome is known, even if no caller waits for it;
- a run's records are written as a prefix of its history: a bad record is isolated by run, never by record;
- a run whose row another transaction has locked is held with its write: the other runs go on without it, and no further
  write is taken from it until that one is committed. There is still only one batch in flight.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from edda.core.model import BatchResult, End, Fence, Recur, RunId, RunWrite
from edda.errors import (
    EddaError,
    LeaseLostError,
    StorageConflictError,
    StorageDuplicateError,
    StorageLockedError,
    StorageRejectedError,
)
from edda.storage.ports import Journal, Runs

from .tasks import TRANSIENT_ERRORS, Backoff, Outage, halves, retry_transient

logger = logging.getLogger(__name__)

MAX_RECORDS = 1_000
MAX_BYTES = 4 << 20
MAX_PENDING_RUNS = 5_000
"""Runs with something to write. Above this no run is started; above half of it none is claimed."""
FIRST_LOCK_CHECK = 0.1
MAX_LOCK_CHECK = 1.0
"""Seconds between two checks of rows that are locked."""


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
        """The runs that it has signals for."""
        ...

    def next_write(self, limit: int) -> RunWrite | None:
        """What it has to write now, with at most `limit` entries; None if nothing."""
        ...

    def on_committed(self, write: RunWrite, result: BatchResult) -> None: ...

    def on_rejected(self, write: RunWrite, error: StorageRejectedError) -> None: ...


class JournalStorage(Journal, Runs, Protocol):
    """What the writer uses of the storage."""


class JournalOwner(Protocol):
    """The worker, as its journal sees it."""

    outage: Outage

    @property
    def live(self) -> Mapping[RunId, RunWriter]:
        """Its runs. Those that it lost are not in it, and a run that it claimed again is another object."""
        ...

    def run_lost(self, source: RunWriter, why: str) -> None:
        """The run belongs to another worker now."""
        ...


class BatchItem(Struct, frozen=True):
    source: RunWriter
    write: RunWrite

    @property
    def touched(self) -> set[RunId]:
        """The runs whose rows it has to lock."""
        return {self.write.run_id, *(signal.run_id for signal in self.write.signals)}


class HeldItem(Struct):
    """The write of a run whose row is locked. No further write is taken from the run until it is committed."""

    item: BatchItem
    since: float
    due: float
    """When to check again whether the row is locked."""
    pause: float = FIRST_LOCK_CHECK
    log_at: float = 0.0
    is_free: bool = False
    """The row is not locked any more: it is in the next batch."""


class Sending(Struct):
    """A batch that is being sent."""

    token: int
    begun: float = field(default_factory=time.monotonic)
    backoff: Backoff = field(default_factory=Backoff)
    is_unknown: bool = False
    """It was sent and not answered, so it may be committed."""
    timeouts: int = 0
    """How often it timed out at a lock though no row of its runs was locked."""


class JournalWriter:
    def __init__(self, storage: JournalStorage, fence: Fence, owner: JournalOwner) -> None:
        self._storage = storage
        self._fence = fence
        self._owner = owner
        self._dirty: dict[RunId, RunWriter] = {}
        self._quarantined: set[RunId] = set()
        """Runs with a record that was refused, or that waits for an unknown lock: each has a batch of its own."""
        self._held: dict[RunId, HeldItem] = {}
        self._log_locks_at = 0.0
        self._claims = 0
        """The number of the last claim that was answered."""
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._flushing = False
        self.ownership_checks = 0
        """Raised before each read of the owned runs. The claim loop compares it before and after a claim."""
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
        """The source has something to write: its `next_write` is called when the next batch is made."""
        held = self._held.get(source.run_id)
        if held is not None:
            if held.item.source is source:
                return  # it is enqueued again when that is committed
            del self._held[source.run_id]
        if not self._dirty:  # else the writer is awake
            self._wake.set()
        self._dirty[source.run_id] = source

    async def run(self) -> None:
        """Write batches for ever; ends with `LeaseLostError` when the fence is gone."""
        while True:
            if self._held:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, self._lock_check_due - time.monotonic())):
                        await self._wake.wait()
            else:
                await self._wake.wait()
            self._wake.clear()
            while self._dirty or self._held:
                if self._held and self._lock_check_due <= time.monotonic():
                    await self._check_held()
                elif not self._dirty:
                    break
                batch = self._make_batch()
                self._flushing = bool(batch)
                try:
                    await self._commit(batch)
                finally:
                    self._flushing = False

    @property
    def _lock_check_due(self) -> float:
        return min((held.due for held in self._held.values()), default=math.inf)

    def _make_batch(self) -> list[BatchItem]:
        batch = self._take_unlocked() if self._held else []
        written = {item.write.run_id for item in batch}
        addressed = {signal.run_id for item in batch for signal in item.write.signals}
        if batch and batch[-1].write.run_id in self._quarantined:
            return batch
        records = size = 0
        dirty = self._dirty
        while dirty and records < MAX_RECORDS and size < MAX_BYTES:
            run_id, source = next(iter(dirty.items()))
            if batch and (
                run_id in self._quarantined or run_id in addressed or not source.signal_targets.isdisjoint(written)
            ):
                break  # it is alone in a batch, or not in one with the runs that it signals: the batch after this one
            del dirty[run_id]
            write = source.next_write(MAX_RECORDS - records)
            if write is None:
                continue
            batch.append(BatchItem(source, write))
            written.add(run_id)
            if write.signals:
                addressed.update(signal.run_id for signal in write.signals)
            records += len(write.entries) + 1
            size += write.size
            if run_id in self._quarantined:
                break
        if len(self._dirty) <= MAX_PENDING_RUNS // 2:
            self._room.set()
        return batch

    def claimed(self, number: int) -> None:
        """A claim was answered. A database that counts fewer claims has lost it, and with it the claimed runs."""
        self._claims = max(self._claims, number)

    async def _commit(self, batch: Sequence[BatchItem]) -> None:
        """Send the batch until its outcome is known."""
        # Random bits and the time: a process that was restored from a snapshot may draw the same random bits as the one
        # that it is a copy of, but at another time.
        sending, live = Sending((secrets.randbits(63) + time.time_ns()) & (2**63 - 1)), self._owner.live
        try:
            while True:
                batch = [item for item in batch if live.get(item.write.run_id) is item.source]
                if not batch and not sending.is_unknown:
                    return
                try:
                    fence = replace(self._fence, claims=self._claims)
                    result = await self._storage.write(fence, [item.write for item in batch], sending.token)
                except StorageLockedError as error:
                    batch = await self._hold_blocked(batch, sending, error)
                    continue
                except TRANSIENT_ERRORS as error:
                    await self._postpone(sending, error)
                    continue
                except StorageRejectedError as error:
                    await self._bisect(batch, error)
                    return
                if result is None and await self._was_committed(sending.token if sending.is_unknown else None):
                    result = await self._rebuild_result(batch)
                if result is not None:
                    self._apply_commit(batch, sending.token, result)
                    return
                await sending.backoff.pause()
        finally:
            self.trouble = None

    async def _postpone(self, sending: Sending, error: EddaError) -> None:
        if isinstance(error, StorageConflictError):
            logger.debug("journal: batch %d was rolled back (%s), sending it again", self._fence.batch_no, error)
        else:  # no answer, or tables that are missing, which come back as a database does
            sending.is_unknown = True
            self.trouble = error
            message = "journal: batch %d has no answer (%s), sending it again"
            if sending.backoff.warn(logger, message, self._fence.batch_no, error):
                self._owner.outage.begin(error)
        await sending.backoff.pause()

    async def _was_committed(self, sent: int | None) -> bool:
        """After the fence matched no row: was the batch committed before, were single runs taken away, or is the worker
        lost? `sent` is the batch's token if it was sent before."""
        known = self._fence
        row = await retry_transient(lambda: self._storage.read_fence(known.worker))
        if row is None:
            raise LeaseLostError(f"worker {known.worker} was taken over")
        if row.claims < self._claims:
            raise LeaseLostError(
                f"worker {known.worker} made {self._claims} claims, the database knows of {row.claims}: the database "
                "lost commits it had acknowledged; starting anew"
            )
        if row.batch_no == known.batch_no + 1 and row.token == sent:
            return True
        if (row.batch_no, row.token) == (
            known.batch_no,
            known.token,
        ) and row.ownership_version >= known.ownership_version:
            if row.ownership_version > known.ownership_version:
                await self._refresh_ownership(row.ownership_version)
            return False  # if nothing has changed, the fence was read before a rollback: the batch is sent again
        raise LeaseLostError(
            f"worker {known.worker} is at batch {known.batch_no}, the database at {row.batch_no}"
            f"{'' if row.batch_no != known.batch_no else ' of another writer'}: the database lost commits it had "
            "acknowledged, or two processes use one worker id; starting anew"
        )

    async def _rebuild_result(self, batch: list[BatchItem]) -> BatchResult:
        """The answer was lost. A run with waits that this worker still owns registers them again, which changes nothing
        if they are registered; a run that it does not own any more was suspended, or has ended."""
        asked = [item.write for item in batch if item.write.waits or isinstance(item.write.transition, End | Recur)]
        owned = await self._read_owned() if asked else {}
        return BatchResult(
            refused={
                write.run_id: frozenset(wait.step for wait in write.waits)
                for write in asked
                if owned.get(write.run_id) == write.epoch and not await self._has_recurred(write)
            }
        )

    async def _has_recurred(self, write: RunWrite) -> bool:
        if not isinstance(write.transition, Recur):
            return False
        record = await retry_transient(lambda: self._storage.get(write.run_id))
        return record is not None and record.generation > write.generation

    async def _read_owned(self) -> dict[RunId, int]:
        return await retry_transient(lambda: self._storage.owned_runs(self._fence.worker))

    async def _refresh_ownership(self, version: int) -> None:
        """A single run was taken from this worker: read which ones it owns, and drop the others."""
        known = [source for source in self._owner.live.values() if source.is_stored]
        self.ownership_checks += 1
        owned = await self._read_owned()
        # Only runs that were in memory before the read: one that is claimed meanwhile is not in the answer.
        for source in known:
            if owned.get(source.run_id) != source.epoch:
                self._owner.run_lost(source, "another process has taken it")
        self._fence = replace(self._fence, ownership_version=version)

    def _apply_commit(self, batch: list[BatchItem], token: int, result: BatchResult) -> None:
        self._fence = replace(self._fence, batch_no=self._fence.batch_no + 1, token=token)
        self.batches += 1
        for item in batch:
            self.records += len(item.write.entries)
            if self._held:
                self._remove_held(item)
            if self._owner.live.get(item.write.run_id) is item.source:
                item.source.on_committed(item.write, result)

    async def _bisect(self, batch: list[BatchItem], error: StorageRejectedError) -> None:
        """Halve by run until the bad one is alone; only that run fails."""
        if len(batch) == 1:
            item = batch[0]
            if isinstance(error, StorageDuplicateError):
                # Another worker wrote the same entry number, or the end: no fault of the run.
                self._owner.run_lost(item.source, f"another worker has written its next record ({error})")
                return
            logger.error(
                "journal: the database refuses a record of run %s (%s), failing the run", item.write.run_id, error
            )
            self._quarantined.add(item.write.run_id)
            self._remove_held(item)  # else `enqueue` would wait for its commit
            item.source.on_rejected(item.write, error)
            return
        for half in halves(batch):
            await self._commit(half)

    # Rows that other transactions have locked

    async def _hold_blocked(
        self, batch: Sequence[BatchItem], sending: Sending, error: StorageLockedError
    ) -> Sequence[BatchItem]:
        """The batch timed out at a lock. Hold the runs that wait for it; returns the rest, to be sent now."""
        # A batch that may be committed is not divided: a part of it would be written again.
        locked = None if sending.is_unknown else await self._find_locked(batch)
        if locked:
            blocked = [item for item in batch if not locked.isdisjoint(item.touched)]
            for item in blocked:
                self._hold(item, sending.begun)
            self._log_held()
            return [item for item in batch if item not in blocked]
        if locked is not None:  # released just now, or a lock of another kind than a run's row
            sending.timeouts += 1
            if sending.timeouts > 1 or (len(batch) == 1 and batch[0].write.run_id in self._quarantined):
                await self._isolate_blocked(batch, sending.begun)
                return []
        level = logging.DEBUG
        if time.monotonic() >= self._log_locks_at:
            self._log_locks_at, level = time.monotonic() + 10.0, logging.WARNING
        logger.log(level, "journal: batch %d waits for a lock (%s), sending it again", self._fence.batch_no, error)
        await sending.backoff.pause()
        return batch

    async def _isolate_blocked(self, batch: Sequence[BatchItem], begun: float) -> None:
        """Halve by run until the one that waits for another kind of lock is alone; it is then sent ever more rarely."""
        if len(batch) > 1:
            for half in halves(batch):
                await self._commit(half)
            return
        self._quarantined.add(batch[0].write.run_id)
        self._hold(batch[0], begun)
        self._log_held()

    def _hold(self, item: BatchItem, begun: float) -> None:
        run_id, now = item.write.run_id, time.monotonic()
        held = self._held.get(run_id)
        if held is None or held.item is not item:
            held = self._held[run_id] = HeldItem(item, begun, now)
        held.is_free = False
        if run_id in self._quarantined:  # each try of it delays all other runs until it times out
            held.pause = max(held.pause, MAX_LOCK_CHECK)
        held.due, held.pause = (
            now + held.pause,
            min(held.pause * 1.5, 10.0 if run_id in self._quarantined else MAX_LOCK_CHECK),
        )
        self._dirty.pop(run_id, None)  # its later records wait, too

    def _owns(self, item: BatchItem) -> bool:
        return self._owner.live.get(item.write.run_id) is item.source

    async def _find_locked(self, items: Sequence[BatchItem]) -> frozenset[RunId] | None:
        """None if it is unknown: the whole table may be locked, or the database away."""
        try:
            return await self._storage.locked({run_id for item in items for run_id in item.touched})
        except TRANSIENT_ERRORS:
            return None

    async def _check_held(self) -> None:
        now = time.monotonic()
        due = [held for held in self._held.values() if held.due <= now and not held.is_free]
        locked = await self._find_locked([held.item for held in due]) if due else None
        for held in due:
            if not self._owns(held.item):
                self._remove_held(held.item)
            elif locked is None or not locked.isdisjoint(held.item.touched):
                self._hold(held.item, held.since)
            else:
                held.is_free, held.due = True, math.inf
        self._log_held()

    def _take_unlocked(self) -> list[BatchItem]:
        """Of the held writes whose rows are not locked any more, as many as may share a batch."""
        batch: list[BatchItem] = []
        written, addressed = set[RunId](), set[RunId]()
        for run_id, held in tuple(self._held.items()):
            if not held.is_free:
                continue
            if not self._owns(held.item):
                self._remove_held(held.item)
                continue
            signal_targets = held.item.touched - {run_id}
            is_alone = run_id in self._quarantined or not written.isdisjoint(self._quarantined)
            if batch and (is_alone or run_id in addressed or not signal_targets.isdisjoint(written)):
                held.due = 0.0  # with the batch after this one
                continue
            batch.append(held.item)
            written.add(run_id)
            addressed |= signal_targets
        return batch

    def _remove_held(self, item: BatchItem) -> None:
        """It is committed, refused, or no longer this worker's."""
        held = self._held.get(item.write.run_id)
        if held is not None and held.item is item:
            del self._held[item.write.run_id]

    def _log_held(self) -> None:
        """One line for all, about the one that has waited longest, ever more rarely."""
        first = min(self._held.values(), key=lambda held: held.since, default=None)
        now = time.monotonic()
        if first is None or now < first.log_at:
            return
        others = f" (and {len(self._held) - 1} more)" if len(self._held) > 1 else ""
        logger.warning(
            "journal: run %s%s has waited %.1f s for a row that another transaction has locked, such as a step whose "
            "COMMIT hangs; its record is tried again, the other runs of this worker go on",
            first.item.write.run_id,
            others,
            now - first.since,
        )
        for held in self._held.values():
            held.log_at = now + max(5.0, 2 * (now - held.since))

    def unquarantine(self, run_id: RunId) -> None:
        self._quarantined.discard(run_id)
        self._held.pop(run_id, None)
