"""The app as the endpoints see it, behind limits on the number and the duration of calls."""

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

logger = logging.getLogger("edda.web")

_NOT_STARTED = (
    "the app is not started: call `await app.initialize()`, or pass `lifespan=app.lifespan` to the app that it is "
    "mounted in, if the server sends no lifespan events"
)


class State(Enum):
    STOPPED = "stopped"
    """Not started yet, or shut down."""
    STARTED = "started"
    DRAINING = "draining"
    """Finishes requests and steps that have started, and accepts no new ones."""


class Service(Protocol):
    @property
    def state(self) -> State: ...

    async def initialize(self) -> None: ...

    async def shutdown(self) -> None: ...

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        """Stores all of the events, or raises and stores none."""

    async def cancel(self, instance_id: str, reason: str = ...) -> bool:
        """False if the run has ended already."""

    async def ping(self) -> None:
        """One round trip to the database."""


class ServiceGate:
    def __init__(self, service: Service, options: WebOptions) -> None:
        self._service = service
        self._options = options
        self._calls = 0
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
            if not self._logged:
                logger.error("answering every request with 503: %s", _NOT_STARTED)
            self._logged = True
            raise HTTPError(retry_later(503, _NOT_STARTED, self.retry_after))

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
        """One of `max_concurrent` calls; its time limit is `seconds`, else `service_timeout`."""
        if self._calls >= self._options.max_concurrent:
            raise HTTPError(retry_later(429, "too many requests at once (max_concurrent)", 1))
        self._calls += 1
        try:
            async with asyncio.timeout(seconds or self._options.service_timeout):
                yield
        finally:
            self._calls -= 1
