"""OutboxRelayer: sends what is in the outbox of a database, in a process that runs no workflows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Self

from edda.core.codec import Codec
from edda.databases import open_storage
from edda.engine.calls import CallLimit
from edda.engine.clock import DatabaseClock
from edda.engine.outbox.relayer import Relayer, RelaySettings
from edda.engine.outbox.sinks import TIMEOUT, Sink
from edda.engine.settings import Settings
from edda.engine.tasks import cancel_and_wait, start_task
from edda.engine.worker.pruner import Pruner
from edda.errors import MigrationError
from edda.storage.ports import Storage

from .sink_urls import resolve_sink

_DEFAULT_URL = "sqlite:///edda.db"
GRACE = 10.0
"""Seconds that events on their way get when it stops."""


class OutboxRelayer:
    """`async with relayer:` sends in the background, `await relayer.run()` until it is cancelled.

    Any number may run on one database, beside apps that send as well: each event is claimed by one of them.
    """

    def __init__(
        self,
        db_url: str | None = None,
        broker_url: str | None = None,
        *,
        sink: Sink | None = None,
        secret: str | Sequence[str] | None = None,
        timeout: float = TIMEOUT,
        lease: float = 15.0,
        concurrency: int = 32,
        retention_days: float = 7.0,
        auto_migrate: bool = True,
        codec: Codec | None = None,
        storage: Storage | None = None,
    ) -> None:
        self._settings = RelaySettings(lease=lease, timeout=timeout, concurrency=concurrency)
        self._sink = resolve_sink(broker_url, sink, secret, timeout)
        url = db_url or os.environ.get("EDDA_DB_URL") or _DEFAULT_URL
        self._storage = storage or open_storage(url, pool_size=2)
        self._codec = codec
        self._auto_migrate = auto_migrate
        self._keeping = Settings(message_retention_days=retention_days)
        self._limit = CallLimit(self._keeping.call_timeout)
        self._relayer: Relayer | None = None
        self._pruning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Does nothing the second time."""
        if self._pruning is not None:
            return
        async with self._limit.call("starting the outbox relayer: opening the database"):
            await self._storage.open()
        try:
            await self._prepare_schema()
        except BaseException:
            await self._close_storage()
            raise
        clock = DatabaseClock()
        self._relayer = Relayer(self._storage, self._sink, clock=clock, codec=self._codec, settings=self._settings)
        self._relayer.start()
        pruning = Pruner(self._storage, clock, self._keeping).run_for_outbox()
        self._pruning = start_task(pruning, name="edda-outbox-retention")

    async def stop(self, grace: float = GRACE) -> None:
        """What is on its way may arrive within the grace; all else is for the next one to send."""
        if self._relayer is None or self._pruning is None:
            return
        pruning, self._pruning = self._pruning, None
        await cancel_and_wait(pruning)
        try:
            await self._relayer.stop(grace)
            await self._sink.close()
        finally:
            await self._close_storage()

    async def _close_storage(self) -> None:
        try:
            async with asyncio.timeout(self._limit.seconds):
                await self._storage.close()
        except TimeoutError:  # a server that does not answer, or a file that another process has locked
            self._storage.kill()

    async def run(self) -> None:
        """Until it is cancelled; then it stops as `stop` does."""
        async with self:
            await asyncio.Event().wait()

    def kill(self) -> None:
        """Die without a word, as a crashed process does. For tests."""
        if self._relayer is not None and self._pruning is not None:
            self._relayer.kill()
            self._pruning.cancel()
            self._pruning = None
        self._storage.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _prepare_schema(self) -> None:
        async with self._limit.call("starting the outbox relayer: reading the version of its tables"):
            pending = await self._storage.pending_migrations()
        if pending and self._auto_migrate:
            await self._storage.migrate()
        elif pending:
            raise MigrationError(f"the database lacks {', '.join(pending)}: run `edda migrate`")

    @property
    def sent(self) -> int:
        """Events that were taken, since it was started."""
        return 0 if self._relayer is None else self._relayer.sent

    @property
    def postponed(self) -> int:
        """Tries that failed, and are made again."""
        return 0 if self._relayer is None else self._relayer.postponed

    @property
    def refused(self) -> int:
        """Events that are dead."""
        return 0 if self._relayer is None else self._relayer.refused
