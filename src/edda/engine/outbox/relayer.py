"""The way out: takes events from the outbox and hands them to a sink, each at least once, those of a key in order.

A claim gives events to this process for the time of a lease. Each key has a line of its own, and those that failed
before go in a lane of their own, so that nobody waits behind another key's failure. What became of them is written in
groups, as fast as the database takes it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from edda.cloudevents import json_format
from edda.core.codec import Codec
from edda.core.model import MICROSECONDS, OutboxRow, Rejected, SendLater, SendResult, Sent
from edda.core.redact import redact_credentials
from edda.engine.clock import Clock
from edda.engine.log import write as log_line
from edda.engine.tasks import Backoff, cancel_and_wait
from edda.engine.worker import supervision
from edda.errors import EventPostponedError, EventRefusedError, StorageError, StorageRejectedError
from edda.storage.ports import Storage

from .sinks import TIMEOUT, Sink

logger = logging.getLogger(__name__)

MOST_SETTLED = 500
MOST_CLAIMS = 20
"""Full claims in memory at once. Claims give the oldest first: if those fail, there is more behind them."""
SLOWDOWN_ABOVE = 1000
"""Events in memory from which on those that fail rest longer, or they would leave no time for new ones."""
SHUTDOWN_TIMEOUT = 5.0
"""Seconds that a database which is away may still come back in while the relayer stops."""
NEWS_TIMEOUT = 60.0
"""Looking every `poll` seconds is not the listener's business."""
MOST_REMEMBERED = 100_000
"""Keys whose failures are counted."""
BLOCKED_REASON = "an earlier event of its key has to go first"
RELEASED_REASON = "handed back before it was sent"


@dataclass(frozen=True, kw_only=True)
class RelaySettings:
    """Seconds, where nothing else is said."""

    lease: float = 15.0
    """What is claimed belongs to this process for so long; if it dies, others send it then."""
    timeout: float = TIMEOUT
    """For one try. Shorter than the lease, or two processes could send at once."""
    concurrency: int = 32
    """Events on their way at once, each of another key; and as many again of those that failed before."""
    claim_batch: int = 200
    """Events claimed at once."""
    poll: float = 1.0
    first_pause: float = 0.5
    """Until the second try; then twice as long, ..."""
    longest_pause: float = 60.0
    """... and never longer than this."""
    longest_wait: float = 3600.0
    """A receiver that names a later time is asked after this."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout < self.lease:
            raise ValueError(f"timeout={self.timeout:g} must be shorter than lease={self.lease:g}, and longer than 0")
        if self.concurrency < 1 or self.claim_batch < 1:
            raise ValueError("concurrency and claim_batch must be at least 1")

    def pause(self, failures: int, asked: float | None) -> float:
        """How long an event rests after so many failures in a row, or as long as the receiver asked for."""
        if asked is not None:
            return min(max(asked, self.first_pause), self.longest_wait)
        longest = min(self.first_pause * 2.0 ** min(failures - 1, 32), self.longest_pause)
        return max(self.first_pause, longest * random.uniform(0.5, 1.0))


class Relayer:
    def __init__(
        self,
        storage: Storage,
        sink: Sink,
        *,
        clock: Clock,
        codec: Codec | None = None,
        settings: RelaySettings | None = None,
        listens: bool = True,
    ) -> None:
        """`listens` only if nobody else in the process takes the storage's news: they are told once."""
        self.settings = settings or RelaySettings()
        self.sent = 0
        self.postponed = 0
        self.refused = 0
        self._storage = storage
        self._sink = sink
        self._clock = clock
        self._codec = codec or Codec()
        self._listens = listens
        self._first_try_slots = asyncio.Semaphore(self.settings.concurrency)
        self._retry_slots = asyncio.Semaphore(self.settings.concurrency)
        self._tasks_by_key: dict[str, asyncio.Task[None]] = {}
        self._fresh_lines = 0
        self._events_in_memory = 0
        self._failures: dict[str, int] = {}
        self._receipts: list[SendResult] = []
        self._woken = asyncio.Event()
        self._resting = False
        self._stopping = False
        self._failing = False
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    def start(self) -> None:
        self._tasks.append(supervision.start("outbox relay", self._work, name="edda-relayer"))
        if self._listens:
            self._tasks.append(supervision.start("outbox listener", self._listen, name="edda-relayer-news"))

    async def stop(self, grace: float) -> None:
        """Claim nothing more; what is on its way may arrive within the grace, the rest is everybody's at once."""
        if not self._tasks:
            return
        self._stopping = True
        self.wake()
        cut = asyncio.get_running_loop().call_later(grace, self._cancel_sends)
        work, *others = self._tasks
        done, _ = await asyncio.wait([work], timeout=grace + SHUTDOWN_TIMEOUT)
        if not done:
            logger.warning("the outbox's database is away: what was sent last may be sent again after the lease")
        cut.cancel()
        self.kill()
        await cancel_and_wait(work, *others)

    def kill(self) -> None:
        """Stop at once and write nothing, as a dying process would."""
        self._stopping = True
        for task in (*self._tasks, *self._tasks_by_key.values()):
            task.cancel()
        self._tasks.clear()

    def wake(self) -> None:
        """There may be something to send."""
        self._woken.set()

    @property
    def is_quiet(self) -> bool:
        """Nothing is on its way, and nothing will be until time passes or somebody says so."""
        return self._resting and not self._woken.is_set() and not self._tasks_by_key and not self._receipts

    def _cancel_sends(self) -> None:
        for line in self._tasks_by_key.values():
            line.cancel()

    # Claiming and settling

    async def _work(self) -> None:
        backoff = Backoff()
        while not (self._stopping and not self._tasks_by_key and not self._receipts):
            self._woken.clear()
            try:
                await self._record_results()
                pause = await self._claim_if_due()
                backoff = Backoff()
            except StorageError as error:
                backoff.warn(logger, "the outbox does not get on: %s", error)
                await backoff.pause()
            else:
                await self._rest(pause)

    async def _record_results(self) -> None:
        """Before anything is claimed: what is not written yet would come again."""
        while group := self._receipts[:MOST_SETTLED]:
            try:
                await self._storage.record_send_results(group)
            except StorageRejectedError:
                await self._settle_one_by_one(group)
            del self._receipts[: len(group)]

    async def _settle_one_by_one(self, group: Sequence[SendResult]) -> None:
        for receipt in group:
            try:
                await self._storage.record_send_results([receipt])
            except StorageRejectedError as error:
                logger.error("the database refuses what became of event number %d: %s", receipt.seq, error)

    async def _claim_if_due(self) -> float:
        """Claim what is due, if there is room; returns the seconds until the next look."""
        if self._stopping or not self._has_room:
            return self.settings.poll
        due = await self._storage.next_outbox_due()
        if due != 0:
            return self.settings.poll if due is None else min(due / MICROSECONDS, self.settings.poll)
        # An event that is due behind one of its key that is not cannot be claimed, and is no reason to look at once.
        return 0.0 if await self._claim() else self.settings.poll

    @property
    def _has_room(self) -> bool:
        most = MOST_CLAIMS * self.settings.claim_batch
        return self._fresh_lines < self.settings.concurrency and self._events_in_memory < most

    async def _claim(self) -> bool:
        sent = time.monotonic()
        latest = sent + self.settings.lease - self.settings.timeout
        lease = int(self.settings.lease * MICROSECONDS)
        claimed = await self._storage.claim_outbox(self.settings.claim_batch, lease)
        if claimed:
            self._clock.observe(claimed[0].due - lease, sent, time.monotonic())
        for key, records in groupby(sorted(claimed, key=_order_key), _key):
            if key not in self._tasks_by_key:  # else we were stopped for longer than a lease, and this is our own
                self._start_key(key, deque(records), latest)
        return bool(claimed)

    def _start_key(self, key: str, records: deque[OutboxRow], latest: float) -> None:
        fresh = records[0].attempts == 1
        line = supervision.start_once(
            "sending events of one key", lambda: self._send_key(records, latest, fresh), name="edda-outbox-line"
        )
        self._tasks_by_key[key] = line
        self._fresh_lines += fresh
        self._events_in_memory += len(records)
        line.add_done_callback(lambda _: self._finish_key(key, fresh))

    def _finish_key(self, key: str, fresh: bool) -> None:
        del self._tasks_by_key[key]
        self._fresh_lines -= fresh
        self._woken.set()

    async def _rest(self, pause: float) -> None:
        if pause == 0.0:
            return
        alarm = self._clock.call_at(self._due_in(pause), self.wake)
        self._resting = True
        try:
            await self._woken.wait()
        finally:
            self._resting = False
            alarm.cancel()

    async def _listen(self) -> None:
        while True:
            try:
                await self._storage.wait_for_notification(NEWS_TIMEOUT)
            except StorageError as error:
                logger.debug("listening failed: %s", error)
                await asyncio.sleep(self.settings.poll)
            self.wake()

    # Sending

    async def _send_key(self, waiting: deque[OutboxRow], latest: float, fresh: bool) -> None:
        """The events of one key, one after the other; none is begun that could outlast the lease."""
        rest = 0.0 if fresh else self.settings.first_pause
        try:
            while waiting:
                async with self._first_try_slots if fresh else self._retry_slots:
                    if self._stopping or time.monotonic() > latest:
                        break
                    rest = 0.0  # a lane that is full for as long as a lease is not to be asked again at once
                    receipt = await self._try(waiting[0])
                waiting.popleft()
                self._put([receipt])
                if isinstance(receipt, SendLater):
                    self._postpone_all(waiting, receipt.due, BLOCKED_REASON)
        finally:
            self._postpone_all(waiting, self._due_in(0.0 if self._stopping else rest), RELEASED_REASON)

    def _postpone_all(self, waiting: deque[OutboxRow], due: int, reason: str) -> None:
        """So that they need not wait for the end of their lease."""
        self._put([SendLater(one.seq, one.attempts, due, one.reason or reason) for one in waiting])
        waiting.clear()

    def _put(self, receipts: Sequence[SendResult]) -> None:
        self._receipts += receipts
        self._events_in_memory -= len(receipts)
        self._woken.set()

    def _due_in(self, seconds: float) -> int:
        return self._clock.now() + int(seconds * MICROSECONDS)

    async def _try(self, record: OutboxRow) -> SendResult:
        try:
            event = json_format.parse_stored(self._codec.decrypt(record.event.body))
            async with asyncio.timeout(self.settings.timeout):
                await self._sink.send(event)
        except EventRefusedError as error:
            return self._refuse(record, str(error))
        except EventPostponedError as error:
            return self._postpone(record, str(error), error.after)
        except TimeoutError:
            return self._postpone(record, f"no answer within {self.settings.timeout:g} seconds")
        except Exception as error:  # a sink may be the user's own, and a wrong key of the codec is no event's fault
            return self._postpone(record, repr(error))
        self.sent += 1
        self._failing = False
        self._failures.pop(record.event.key, None)
        return Sent(record.seq)

    def _refuse(self, record: OutboxRow, reason: str) -> SendResult:
        self.refused += 1
        self._failures.pop(record.event.key, None)
        event = record.event
        log_line("event_rejected", event_id=event.id, event_type=event.type, error=_sanitize(reason))
        return Rejected(record.seq, record.attempts, _sanitize(reason))

    def _postpone(self, record: OutboxRow, reason: str, asked: float | None = None) -> SendResult:
        self.postponed += 1
        pause = self.settings.pause(self._count_failure(record), asked)
        if asked is None:
            pause *= max(1.0, self._events_in_memory / SLOWDOWN_ABOVE)
        # The first time as a warning: a receiver that is away for an hour need not fill the log.
        level = logging.DEBUG if self._failing else logging.WARNING
        logger.log(
            level, "event %r is sent again in %.1f s, it was not taken: %s", record.event.id, pause, _sanitize(reason)
        )
        self._failing = True
        return SendLater(record.seq, record.attempts, self._due_in(pause), _sanitize(reason))

    def _count_failure(self, record: OutboxRow) -> int:
        """In a row, for its key. `attempts` counts claims, also those that were handed back."""
        if len(self._failures) > MOST_REMEMBERED:  # others may have sent them, and we would never hear of it
            self._failures.clear()
        failures = min(self._failures.get(record.event.key, 0) + 1, record.attempts)
        self._failures[record.event.key] = failures
        return failures


def _order_key(record: OutboxRow) -> tuple[str, int]:
    return record.event.key, record.seq


def _key(record: OutboxRow) -> str:
    return record.event.key


def _sanitize(reason: str) -> str:
    """What a database takes and a terminal survives, and everybody may read."""
    return "".join(character if character.isprintable() else " " for character in redact_credentials(reason))[:1000]
