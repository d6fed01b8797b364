"""Takes what was decided in somebody's commit into the log of events: messages and events of steps and of handlers.

They could not go there at once: who stores an event holds the locks of its keys until its commit, and a user's
transaction may be long. So they wait in a table, and go over in one commit with their removal. Whoever comes first does
it; if two do the same, one of them is turned away as a whole, so nothing is stored twice or out of order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from edda.cloudevents import json_format
from edda.core.channels import for_redelivery, unpack_message
from edda.core.codec import Codec
from edda.core.model import StagedEventRow, StagedKind
from edda.engine.tasks import Backoff
from edda.errors import EventError, StorageConflictError, StorageRejectedError, StorageUnavailableError
from edda.storage.ports import Events

from .ingest import EventIngest, IngestItem

logger = logging.getLogger(__name__)

BATCH_SIZE = 500


class StagedEventMover:
    def __init__(self, storage: Events, intake: EventIngest, codec: Codec, poll: float) -> None:
        self._storage = storage
        self._intake = intake
        self._codec = codec
        self._poll = poll
        self._woken = asyncio.Event()
        self._busy = False
        self._skipped: set[int] = set()
        """What this process cannot forward, perhaps for want of a key: it stays for one that can, and stops nobody."""

    @property
    def is_idle(self) -> bool:
        return not self._busy and not self._woken.is_set()

    def wake(self) -> None:
        """There is something to forward."""
        self._woken.set()

    async def run(self) -> None:
        """For ever. What others left behind is found by looking now and then."""
        backoff = Backoff()
        while True:
            try:
                async with asyncio.timeout(self._poll):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._busy = True
            self._woken.clear()
            try:
                while await self.move_batch():
                    pass
                backoff = Backoff()
            except StorageConflictError as error:
                self._woken.set()
                logger.debug("forwarding again: %s", error)  # every worker forwards: that two meet is their daily life
                await backoff.pause()
            except StorageUnavailableError as error:
                self._woken.set()
                backoff.warn(logger, "forwarding failed: %s", error)
                await backoff.pause()
            except Exception:  # begun anew by the supervision, which logs it: what was found is found again
                self._woken.set()
                raise
            finally:
                self._busy = False

    async def move_batch(self) -> bool:
        """Some of it; False if there is no more."""
        found = await self._storage.staged_events(BATCH_SIZE + len(self._skipped))
        pairs = [
            (one, item) for one in found if one.seq not in self._skipped and (item := self._to_item(one)) is not None
        ]
        if pairs:
            await self._store_batch(pairs)
        return len(pairs) >= BATCH_SIZE

    async def _store_batch(self, pairs: Sequence[tuple[StagedEventRow, IngestItem]]) -> None:
        try:
            accepted = await self._intake.store([item for _, item in pairs], [one.seq for one, _ in pairs])
        except StorageRejectedError as error:
            await self._bisect(pairs, error)
            return
        if accepted.woke:
            self._intake.notify()

    async def _bisect(self, pairs: Sequence[tuple[StagedEventRow, IngestItem]], error: StorageRejectedError) -> None:
        """One that the database refuses must not stop the others."""
        if len(pairs) == 1:
            self._skip(pairs[0][0], error)
            return
        middle = len(pairs) // 2
        await self._store_batch(pairs[:middle])
        await self._store_batch(pairs[middle:])

    def _skip(self, dispatch: StagedEventRow, error: Exception) -> None:
        self._skipped.add(dispatch.seq)
        logger.error("dispatch %d, %s, cannot be forwarded here, and stays: %r", dispatch.seq, dispatch.kind, error)

    def _to_item(self, dispatch: StagedEventRow) -> IngestItem | None:
        try:
            if dispatch.kind is StagedKind.EVENT:
                return self._event_item(dispatch.body)
            message = unpack_message(self._codec, dispatch.body)
            if dispatch.kind is StagedKind.OFFER:
                return self._intake.message_item(for_redelivery(message))
            return self._intake.message_item(message, dispatch.body)
        except Exception as error:  # whatever a codec raises that has not the key
            self._skip(dispatch, error)
            return None

    def _event_item(self, body: bytes) -> IngestItem:
        event = json_format.parse_stored(self._codec.decrypt(body))
        try:
            return self._intake.to_item(event)
        except EventError as error:  # who sent it is gone; the event itself is kept for those who wait for it
            logger.error("event %r of type %s starts nothing: %s", event.id, event.type, error)
            return self._intake.to_item(event, starting=False)
