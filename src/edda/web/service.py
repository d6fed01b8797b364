"""The app as the endpoints see it, behind limits on concurrent calls and on their time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Protocol

from edda.cloudevents.event import CloudEvent
from edda.web.options import WebOptions

from .responses import HTTPError, retry_later


class State(Enum):
    STOPPED = "stopped"
    """Not started yet, or shut down."""
    STARTED = "started"
    DRAINING = "draining"
    """Finishing what is under way; takes nothing new."""


class Service(Protocol):
    @property
    def state(self) -> State: ...

    async def initialize(self) -> None: ...

    async def shutdown(self) -> None: ...

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        """All of them are stored when it returns, or none is when it raises."""

    async def cancel(self, instance_id: str, reason: str = ...) -> bool:
        """False if the run has ended already."""

    async def ping(self) -> None:
        """One round trip to the database."""


logger = logging.getLogger("edda.web")

_NEVER_STARTED = (
    "the app is not started: a server that sends no lifespan events, or an app that it is mounted in, has to call "
    "`await app.initialize()`, or pass `lifespan=app.lifespan` on"
)


class ServiceGate:
    def __init__(self, service: Service, options: WebOptions) -> None:
        self._service = service
        self._options = options
        self._waiting = 0
        self._logged = False

    @property
    def retry_after(self) -> int:
        return self._options.retry_after

    def check_started(self) -> None:
        state = self._service.state
        if state is State.STARTED:
            self._logged = False
        elif state is State.DRAINING:
            raise HTTPError(retry_later(503, "the app is shutting down", self.retry_after))
        else:
            self._log_once()
            raise HTTPError(retry_later(503, _NEVER_STARTED, self.retry_after))

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        async with self.slot():
            await self._service.receive(events)

    async def cancel(self, instance_id: str, reason: str | None) -> bool:
        async with self.slot():
            if reason is None:
                return await self._service.cancel(instance_id)
            return await self._service.cancel(instance_id, reason)

    async def ping(self) -> None:
        async with asyncio.timeout(self._options.service_timeout):
            await self._service.ping()

    @asynccontextmanager
    async def slot(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Without `seconds` for as long as the settings say."""
        if self._waiting >= self._options.max_concurrent:
            raise HTTPError(retry_later(429, "too many requests at once (max_concurrent)", 1))
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds or self._options.service_timeout):
                yield
        finally:
            self._waiting -= 1

    def _log_once(self) -> None:
        if not self._logged:
            logger.error("refusing requests: %s", _NEVER_STARTED)
        self._logged = True
