"""The relayer: claims events of the outbox and hands them to a sink, each at least once, those of a key in order.

A claim gives events to this process for the time of a lease. Each key has a task of its own, and retries have slots of
their own, so that no key waits behind another key's failure. Results are written in groups.
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
from operator import attrgetter

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

MAX_RESULTS = 500
MAX_CLAIMS = 20
"""Full claims in memory at once. A claim returns the oldest first: while those fail, newer ones are claimed, too."""
SLOWDOWN_ABOVE = 1000
"""Events in memory above which the pauses after failures grow: else retries would leave no time for new events."""
SHUTDOWN_TIMEOUT = 5.0
"""Seconds for which the relayer, while it stops, waits for a database that is away."""
NOTIFICATION_TIMEOUT = 60.0
"""Seconds. Polling every `poll` seconds is done elsewhere."""
MAX_FAILURES = 100_000
"""Keys whose failures are counted."""
BLOCKED_REASON = "an earlier event of its key has to go first"
RELEASED_REASON = "handed back before it was sent"


@dataclass(frozen=True, kw_only=True)
class RelaySettings:
    """Times are in seconds."""

    lease: float = 15.0
    """How long claimed events belong to this process; if it dies, other processes send them after that."""
    timeout: float = TIMEOUT
    """Of one try. Shorter than the lease, or two processes could send at once."""
    concurrency: int = 32
    """Events that are sent at once, each of another key; and as many again that failed before."""
    claim_batch: int = 200
    """Events claimed at once."""
    poll: float = 1.0
    first_pause: float = 0.5
    """Until the second try; then twice as long, ..."""
    longest_pause: float = 60.0
    """... and never longer than this."""
    longest_wait: float = 3600.0
    """A receiver that asks for a longer pause gets this one."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout < self.lease:
            raise ValueError(f"timeout={self.timeout:g} must be shorter than lease={self.lease:g}, and longer than 0")
        if self.concurrency < 1 or self.claim_batch < 1:
            raise ValueError("concurrency and claim_batch must be at least 1")

    def pause(self, failures: int, asked: float | None) -> float:
        """Before the next try: after this number of failures in a row, or as long as the receiver asked for."""
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
        """`listens`: wait for the storage's notifications, which only one part of a process may do."""
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
        self._first_tries = 0
        self._events_in_memory = 0
        self._failures: dict[str, int] = {}
        self._results: list[SendResult] = []
        self._woken = asyncio.Event()
        self._resting = False
        self._stopping = False
        self._failing = False
        self._tasks: list[asyncio.Task[None]] = []

    # Start and end

    def start(self) -> None:
        self._tasks.append(supervision.start("outbox relay", self._work, name="edda-relayer"))
        if self._listens:
            self._tasks.append(supervision.start("outbox listener", self._listen, name="edda-relayer-listener"))

    async def stop(self, grace: float) -> None:
        """Claim nothing more, finish sending within the grace, release the rest for other processes."""
        if not self._tasks:
            return
        self._stopping = True
        self.wake()
        work, *others = self._tasks
        cut = asyncio.get_running_loop().call_later(grace, self._cancel_sends)
        done, _ = await asyncio.wait([work], timeout=grace + SHUTDOWN_TIMEOUT)
        if not done:
            logger.warning(
                "outbox relay stopped, the database is away: the last events may be sent again after the lease"
            )
        cut.cancel()
        self.kill()
        await cancel_and_wait(work, *others)

    def kill(self) -> None:
        """Stop at once and write nothing, as a dying process would."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._cancel_sends()

    def wake(self) -> None:
        """There may be an event to send."""
        self._woken.set()

    @property
    def is_quiet(self) -> bool:
        """Nothing is being sent, and nothing will be before a timer or a call of `wake`."""
        return self._resting and not self._woken.is_set() and not self._tasks_by_key and not self._results

    def _cancel_sends(self) -> None:
        for task in self._tasks_by_key.values():
            task.cancel()

    # Claiming and recording results

    async def _work(self) -> None:
        backoff = Backoff()
        while not (self._stopping and not self._tasks_by_key and not self._results):
            self._woken.clear()
            try:
                await self._record_results()
                pause = await self._claim_if_due()
                backoff = Backoff()
            except StorageError as error:
                backoff.warn(logger, "outbox relay failed (%s), trying again", error)
                await backoff.pause()
            else:
                await self._rest(pause)

    async def _record_results(self) -> None:
        """Before the next claim, which would return events whose results are not written."""
        while group := self._results[:MAX_RESULTS]:
            try:
                await self._storage.record_send_results(group)
            except StorageRejectedError:
                for result in group:
                    try:
                        await self._storage.record_send_results([result])
                    except StorageRejectedError as error:
                        message = "outbox relay: the database refuses the result of event number %d (%s)"
                        logger.error(message, result.seq, error)
            del self._results[: len(group)]

    async def _claim_if_due(self) -> float:
        """Claim due events, if there is room; returns the seconds until the next claim."""
        settings = self.settings
        has_room = self._first_tries < settings.concurrency
        has_room = has_room and self._events_in_memory < MAX_CLAIMS * settings.claim_batch
        if self._stopping or not has_room:
            return settings.poll
        due = await self._storage.next_outbox_due()
        if due != 0:
            return settings.poll if due is None else min(due / MICROSECONDS, settings.poll)
        # A due event behind an earlier one of its key that is not due cannot be claimed: do not try again at once.
        return 0.0 if await self._claim() else settings.poll

    async def _claim(self) -> bool:
        sent = time.monotonic()
        latest = sent + self.settings.lease - self.settings.timeout
        lease = int(self.settings.lease * MICROSECONDS)
        claimed = await self._storage.claim_outbox(self.settings.claim_batch, lease)
        if claimed:
            self._clock.observe(claimed[0].due - lease, sent, time.monotonic())
        for key, records in groupby(sorted(claimed, key=attrgetter("event.key", "seq")), attrgetter("event.key")):
            # Else this process was stopped for longer than a lease, and has claimed its own events.
            if key not in self._tasks_by_key:
                self._start_key(key, deque(records), latest)
        return bool(claimed)

    def _start_key(self, key: str, records: deque[OutboxRow], latest: float) -> None:
        fresh = records[0].attempts == 1

        def finish(_: asyncio.Task[None]) -> None:
            del self._tasks_by_key[key]
            self._first_tries -= fresh
            self._woken.set()

        task = supervision.start_once(
            "sending events of one key", lambda: self._send_key(records, latest, fresh), name="edda-outbox-key"
        )
        self._tasks_by_key[key] = task
        self._first_tries += fresh
        self._events_in_memory += len(records)
        task.add_done_callback(finish)

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
                await self._storage.wait_for_notification(NOTIFICATION_TIMEOUT)
            except StorageError as error:
                logger.debug("outbox relay: waiting for notifications failed (%s), trying again", error)
                await asyncio.sleep(self.settings.poll)
            self.wake()

    # Sending

    async def _send_key(self, waiting: deque[OutboxRow], latest: float, fresh: bool) -> None:
        """The events of one key, one after the other; none is sent whose time limit could outlast the lease."""
        rest = 0.0 if fresh else self.settings.first_pause
        try:
            while waiting:
                async with self._first_try_slots if fresh else self._retry_slots:
                    if self._stopping or time.monotonic() > latest:
                        break
                    rest = 0.0  # without a slot for a whole lease the events are released with a pause
                    result = await self._try(waiting[0])
                waiting.popleft()
                self._put([result])
                if isinstance(result, SendLater):
                    self._postpone_all(waiting, result.due, BLOCKED_REASON)
        finally:
            self._postpone_all(waiting, self._due_in(0.0 if self._stopping else rest), RELEASED_REASON)

    def _postpone_all(self, waiting: deque[OutboxRow], due: int, reason: str) -> None:
        """Release them before the end of their lease."""
        self._put([SendLater(one.seq, one.attempts, due, one.reason or reason) for one in waiting])
        waiting.clear()

    def _put(self, results: Sequence[SendResult]) -> None:
        self._results += results
        self._events_in_memory -= len(results)
        self._woken.set()

    def _due_in(self, seconds: float) -> int:
        return self._clock.now() + int(seconds * MICROSECONDS)

    async def _try(self, record: OutboxRow) -> SendResult:
        try:
            event = json_format.parse_stored(self._codec.decrypt(record.event.body))
            async with asyncio.timeout(self.settings.timeout):
                await self._sink.send(event)
        except EventRefusedError as error:
            self.refused += 1
            self._failures.pop(record.event.key, None)
            reason = _sanitize(str(error))
            log_line("event_rejected", event_id=record.event.id, event_type=record.event.type, error=reason)
            return Rejected(record.seq, record.attempts, reason)
        except EventPostponedError as error:
            return self._postpone(record, str(error), error.after)
        except TimeoutError:
            return self._postpone(record, f"no answer within {self.settings.timeout:g} seconds")
        except Exception as error:  # of the user's own sink, or of a codec with a wrong key
            return self._postpone(record, repr(error))
        self.sent += 1
        self._failing = False
        self._failures.pop(record.event.key, None)
        return Sent(record.seq)

    def _postpone(self, record: OutboxRow, reason: str, asked: float | None = None) -> SendResult:
        self.postponed += 1
        if len(self._failures) > MAX_FAILURES:  # other processes may have sent them, without this one noticing
            self._failures.clear()
        # In a row, for its key. `attempts` counts claims, also those that were released without a try.
        failures = min(self._failures.get(record.event.key, 0) + 1, record.attempts)
        self._failures[record.event.key] = failures
        pause = self.settings.pause(failures, asked)
        if asked is None:
            pause *= max(1.0, self._events_in_memory / SLOWDOWN_ABOVE)
        # The first of several in a row is a warning, the others are debug lines.
        level = logging.DEBUG if self._failing else logging.WARNING
        text = "outbox event %r was not accepted (%s), sending it again in %.1f s"
        logger.log(level, text, record.event.id, _sanitize(reason), pause)
        self._failing = True
        return SendLater(record.seq, record.attempts, self._due_in(pause), _sanitize(reason))


def _sanitize(reason: str) -> str:
    """Without credentials and unprintable characters, and short."""
    return "".join(character if character.isprintable() else " " for character in redact_credentials(reason))[:1000]
