"""Hooks: called after the commit of what they report. An error of a hook is logged and has no effect on runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from .tasks import cancel_and_wait, start_task
from .worker import supervision

logger = logging.getLogger(__name__)


class WorkflowHooks(Protocol):
    async def on_workflow_start(self, instance_id: str, workflow_name: str, input_data: dict[str, Any]) -> None:
        return

    async def on_workflow_complete(self, instance_id: str, workflow_name: str, result: Any) -> None:
        return

    async def on_workflow_failed(self, instance_id: str, workflow_name: str, error: Exception) -> None:
        return

    async def on_workflow_cancelled(self, instance_id: str, workflow_name: str) -> None:
        return

    async def on_activity_start(
        self, instance_id: str, activity_id: str, activity_name: str, is_replaying: bool
    ) -> None:
        return

    async def on_activity_complete(
        self, instance_id: str, activity_id: str, activity_name: str, result: Any, cache_hit: bool
    ) -> None:
        return

    async def on_activity_failed(
        self, instance_id: str, activity_id: str, activity_name: str, error: Exception
    ) -> None:
        return

    async def on_activity_retry(
        self, instance_id: str, activity_id: str, activity_name: str, error: Exception, attempt: int, delay: float
    ) -> None:
        return

    async def on_event_sent(self, event_type: str, event_source: str, event_data: dict[str, Any]) -> None:
        return

    async def on_event_received(self, instance_id: str, event_type: str, event_data: dict[str, Any]) -> None:
        return


class HooksBase(WorkflowHooks):
    """All hooks, doing nothing: override what you need."""


class AttemptStarted(Struct, frozen=True):
    """One attempt of a step, which starts now."""

    run_id: str
    workflow: str
    step: str
    name: str
    number: int


OnAttemptDone = Callable[[BaseException | None], None]
"""Called when the attempt's outcome is committed; not called for an attempt without an outcome."""


class EventReceived(Struct, frozen=True):
    """An event that a run received, or was started by."""

    run_id: str
    workflow: str
    type: str
    extensions: Mapping[str, Any]


Call = Callable[[Any], Awaitable[None]]


class HookCaller:
    """Calls the hooks one after the other, in the order of the commits, in a task of its own.

    Two further methods are optional: `watch_attempt(attempt: AttemptStarted) -> OnAttemptDone | None`, called in the
    context of the activity, which sees the context variables that the hook sets; and the coroutine
    `watch_arrival(arrival: EventReceived)`, called with the attributes of events besides their data.
    """

    def __init__(self, hooks: WorkflowHooks) -> None:
        self._hooks: Any = hooks
        # Of the class: an object with `__getattr__` may have any name.
        self._is_watcher = hasattr(type(hooks), "watch_attempt")
        self.watches_arrivals = hasattr(type(hooks), "watch_arrival")
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self._making: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = supervision.start("calling hooks", self._run, name="edda-hooks")

    def call(self, call: Call) -> None:
        self._calls.put_nowait(call)

    def watch(self, attempt: AttemptStarted) -> OnAttemptDone | None:
        try:
            done: OnAttemptDone | None = self._hooks.watch_attempt(attempt) if self._is_watcher else None
        except KeyboardInterrupt:
            raise
        except BaseException:  # of the user's code, SystemExit and CancelledError included
            logger.exception("a hook raised, starting the attempt all the same")
            return None
        return done

    async def _run(self) -> None:
        while True:
            call = await self._calls.get()
            try:
                # In a task of its own: a hook whose library cancels the current task must not end this one.
                self._making = start_task(self._make(call), name="edda-hook")
                await asyncio.wait([self._making])
            finally:
                self._calls.task_done()

    async def _make(self, call: Call) -> None:
        try:
            await call(self._hooks)
        except KeyboardInterrupt:
            raise
        except BaseException:  # of the user's code, SystemExit and CancelledError included: runs do not depend on it
            logger.exception("a hook raised, calling the next one; what it reports is committed")

    async def close(self, grace: float = 5.0) -> None:
        try:
            async with asyncio.timeout(grace):
                await self._calls.join()
        except TimeoutError:
            logger.warning("hooks were still running after %s seconds, cancelling them", grace)
        await cancel_and_wait(self._task, self._making)
