"""The journal writer: one per worker, one flush in flight, everything that piled up meanwhile in the next.

Every batch is a compare-and-set on the worker's fence row. That one row says whether the worker still owns
its runs, in which order its batches went in, and whether a batch whose answer was lost is in. The rules:

- a batch whose outcome is unknown is sent again, the same but for runs that are no longer ours;
- nothing is ever added to such a batch, and it is resolved even if nobody waits for it any more;
- a run's records go in as a prefix of its history: a bad record is isolated by run, never by record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from edda.core.model import Bundle, End, Fence, Recur, RunId, Written
from edda.errors import LeaseLostError, StorageConflictError, StorageRejectedError, StorageUnavailableError
from edda.storage.ports import Journal, Runs

from .backoff import Backoff

logger = logging.getLogger(__name__)

MOST_RECORDS = 1_000
MOST_BYTES = 4 << 20
CROWDED = 5_000
"""Runs with something to write: from here on no new work is taken in."""


class Source(Protocol):
    """A run with something to write."""

    run_id: RunId
    epoch: int

    @property
    def is_stored(self) -> bool:
        """Whether the run's own rows are committed."""
        ...

    @property
    def targets(self) -> frozenset[RunId]:
        """The runs it has letters for."""
        ...

    def take(self, most: int) -> Bundle | None:
        """What it has to write now, at most so many records; None if nothing."""
        ...

    def flushed(self, bundle: Bundle, written: Written) -> None: ...

    def rejected(self, bundle: Bundle, error: StorageRejectedError) -> None: ...


class Books(Journal, Runs, Protocol):
    """What the writer asks of a database."""


class Part(Struct, frozen=True):
    source: Source
    bundle: Bundle


class JournalWriter:
    def __init__(
        self,
        storage: Books,
        fence: Fence,
        *,
        owns: Callable[[RunId, int], bool],
        owned_sources: Callable[[], Sequence[Source]],
        lost: Callable[[Source], None],
    ) -> None:
        self._storage = storage
        self._fence = fence
        self._owns = owns
        self._owned_sources = owned_sources
        self._lost = lost
        self._dirty: dict[RunId, Source] = {}
        self._outcasts: set[RunId] = set()
        """Runs that once held a record the database refuses; they no longer share a batch."""
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._flushing = False
        self.ownership_reads = 0
        """Raised before each look at what we own. Who claims runs compares it before and after."""
        self.batches = 0
        self.records = 0

    @property
    def is_idle(self) -> bool:
        return not self._dirty and not self._flushing

    @property
    def is_crowded(self) -> bool:
        return len(self._dirty) > CROWDED // 2

    async def wait_for_room(self) -> None:
        while len(self._dirty) > CROWDED:
            self._room.clear()
            await self._room.wait()

    def put(self, source: Source) -> None:
        """The source has something to write; it will be asked for it when the next batch is made."""
        if not self._dirty:  # else the writer knows that there is more
            self._wake.set()
        self._dirty[source.run_id] = source

    async def run(self) -> None:
        """Flush for ever; ends with `LeaseLostError` when the fence is gone."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty:
                batch = self._make_batch()
                self._flushing = bool(batch)
                try:
                    await self._commit(batch)
                finally:
                    self._flushing = False

    def _make_batch(self) -> list[Part]:
        batch: list[Part] = []
        written, addressed = set[RunId](), set[RunId]()
        records = size = 0
        dirty = self._dirty
        while dirty and records < MOST_RECORDS and size < MOST_BYTES:
            run_id, source = next(iter(dirty.items()))
            targets = source.targets
            if batch and (run_id in self._outcasts or run_id in addressed or not targets.isdisjoint(written)):
                break  # alone, or not in one batch with those it writes to: that is the batch after this one
            del dirty[run_id]
            written.add(run_id)
            if targets:
                addressed |= targets
            bundle = source.take(MOST_RECORDS - records)
            if bundle is None:
                continue
            batch.append(Part(source, bundle))
            records += len(bundle.entries) + 1
            size += bundle.size
            if run_id in self._outcasts:
                break
        if len(self._dirty) <= CROWDED // 2:
            self._room.set()
        return batch

    async def _commit(self, batch: list[Part]) -> None:
        backoff = Backoff()
        unknown = False
        while True:
            batch = [part for part in batch if self._owns(part.bundle.run_id, part.bundle.epoch)]
            if not batch and not unknown:
                return
            try:
                written = await self._storage.write(self._fence, [part.bundle for part in batch])
            except StorageConflictError as error:
                logger.debug("batch %d: %s; sent again", self._fence.batch_no, error)
                await backoff.pause()
                continue
            except StorageUnavailableError as error:
                unknown = True
                backoff.warn(logger, "batch %d has no answer (%s); sending it again", self._fence.batch_no, error)
                await backoff.pause()
                continue
            except StorageRejectedError as error:
                await self._isolate(batch, error)
                return
            if written is None and await self._is_in(unknown):
                written = await self._reconstruct(batch)
            if written is not None:
                self._settle(batch, written)
                return

    async def _is_in(self, sent_before: bool) -> bool:
        """After the fence matched nothing: was the batch in already, did single runs move, or is all lost?"""
        row = await self._read_fence()
        if row is None:
            raise LeaseLostError(f"worker {self._fence.worker} was taken over")
        ahead = row.batch_no - self._fence.batch_no
        if ahead == 1 and sent_before:
            return True
        if ahead == 0 and row.moves != self._fence.moves:
            await self._refresh_ownership(row.moves)
            return False
        if ahead == 0:
            return False  # the write and the look at the fence raced with somebody's rollback: send it again
        raise LeaseLostError(
            f"worker {self._fence.worker} is at batch {self._fence.batch_no}, the database at {row.batch_no}: the "
            "database lost commits it had acknowledged, or two processes use one worker id; starting anew"
        )

    async def _read_fence(self) -> Fence | None:
        backoff = Backoff()
        while True:
            try:
                return await self._storage.read_fence(self._fence.worker)
            except (StorageUnavailableError, StorageConflictError):
                await backoff.pause()

    async def _reconstruct(self, batch: list[Part]) -> Written:
        """The answer was lost. Who asked for events and is still ours asks again, which changes nothing if it was
        registered; who is not ours any more was released, or has ended."""
        asked = [part.bundle for part in batch if part.bundle.waits or isinstance(part.bundle.move, End | Recur)]
        owned = await self._read_owned() if asked else {}
        return Written(
            unmet={
                bundle.run_id: frozenset(wait.step for wait in bundle.waits)
                for bundle in asked
                if owned.get(bundle.run_id) == bundle.epoch and not await self._has_recurred(bundle)
            }
        )

    async def _has_recurred(self, bundle: Bundle) -> bool:
        if not isinstance(bundle.move, Recur):
            return False
        backoff = Backoff()
        while True:
            try:
                record = await self._storage.get(bundle.run_id)
                return record is not None and record.gen > bundle.gen
            except (StorageUnavailableError, StorageConflictError):
                await backoff.pause()

    async def _read_owned(self) -> dict[RunId, int]:
        backoff = Backoff()
        while True:
            try:
                return await self._storage.owned(self._fence.worker)
            except (StorageUnavailableError, StorageConflictError):
                await backoff.pause()

    async def _refresh_ownership(self, moves: int) -> None:
        """Some run was taken from us singly: find out which, and let go of it."""
        known = [source for source in self._owned_sources() if source.is_stored]
        self.ownership_reads += 1
        owned = await self._read_owned()
        # Only runs that were in memory before the look are judged: one claimed meanwhile is not in the answer.
        for source in known:
            if owned.get(source.run_id) != source.epoch:
                self._lost(source)
        self._fence = Fence(self._fence.worker, self._fence.batch_no, moves)

    def _settle(self, batch: list[Part], written: Written) -> None:
        self._fence = Fence(self._fence.worker, self._fence.batch_no + 1, self._fence.moves)
        self.batches += 1
        for part in batch:
            self.records += len(part.bundle.entries)
            if self._owns(part.bundle.run_id, part.bundle.epoch):
                part.source.flushed(part.bundle, written)

    async def _isolate(self, batch: list[Part], error: StorageRejectedError) -> None:
        """Halve by run until the bad one stands alone; only that run is told."""
        if len(batch) == 1:
            part = batch[0]
            logger.error("run %s: the database refuses its record: %s", part.bundle.run_id, error)
            self._outcasts.add(part.bundle.run_id)
            part.source.rejected(part.bundle, error)
            return
        middle = len(batch) // 2
        await self._commit(batch[:middle])
        await self._commit(batch[middle:])

    def forget(self, run_id: RunId) -> None:
        self._outcasts.discard(run_id)
