"""An app without an engine: it records its calls, and each test decides what it does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from edda.cloudevents.event import CloudEvent
from edda.web import State
from edda.web.access import Principal
from edda.web.request import Request
from edda.web.responses import Response


class PlainRefusals:
    """A viewer that returns errors as they are."""

    def error_page(self, request: Request, caller: Principal | None, error: Response) -> Response:
        return error


class FakeService:
    def __init__(self, state: State = State.STARTED) -> None:
        self.state = state
        self.error: BaseException | None = None
        self.error_after_start: BaseException | None = None
        self.open = asyncio.Event()
        """While it is not set, calls to the database hang."""
        self.open.set()
        self.stored: list[CloudEvent] = []
        self.cancelled: list[tuple[str, str]] = []
        self.ended: set[str] = set()
        self.pings = 0
        self.waiting = 0
        self._changed = asyncio.Condition()
        self.lives: list[str] = []

    async def initialize(self) -> None:
        self.lives.append("initialize")
        self._raise()
        self.state, self.error = State.STARTED, self.error_after_start

    async def shutdown(self) -> None:
        self.lives.append("shutdown")
        self._raise()
        self.state = State.STOPPED

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        await self._answer()
        self.stored += events

    async def cancel(self, instance_id: str, reason: str = "cancelled") -> bool:
        await self._answer()
        self.cancelled.append((instance_id, reason))
        return instance_id not in self.ended

    async def ping(self) -> None:
        self.pings += 1
        await self._answer()

    async def _answer(self) -> None:
        await self._count(1)
        try:
            await self.open.wait()
        finally:
            await self._count(-1)
        self._raise()

    async def until_waiting(self, count: int = 1) -> None:
        """Returns when that many calls wait for the database."""
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: self.waiting >= count)

    async def _count(self, change: int) -> None:
        self.waiting += change
        async with self._changed:
            self._changed.notify_all()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
