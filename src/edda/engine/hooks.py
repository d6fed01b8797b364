"""Hooks: told what happened, after it is committed. One that raises is logged and harms nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

from msgspec import Struct

from .tasks import cancel_and_wait, start_task
from .worker import supervision

logger = logging.getLogger(__name__)


class WorkflowHooks(Protocol):
    async def on_workflow_start(self, instance_id: str, workflow_name: str, input_data: dict[str, Any]) -> None: ...

    async def on_workflow_complete(self, instance_id: str, workflow_name: str, result: Any) -> None: ...

    async def on_workflow_failed(self, instance_id: str, workflow_name: str, error: Exception) -> None: ...

    async def on_workflow_cancelled(self, instance_id: str, workflow_name: str) -> None: ...

    async def on_activity_start(
        self, instance_id: str, activity_id: str, activity_name: str, is_replaying: bool
    ) -> None: ...

    async def on_activity_complete(
        self, instance_id: str, activity_id: str, activity_name: str, result: Any, cache_hit: bool
    ) -> None: ...

    async def on_activity_failed(
        self, instance_id: str, activity_id: str, activity_name: str, error: Exception
    ) -> None: ...

    async def on_activity_retry(
        self, instance_id: str, activity_id: str, activity_name: str, error: Exception, attempt: int, delay: float
    ) -> None: ...

    async def on_event_sent(self, event_type: str, event_source: str, event_data: dict[str, Any]) -> None: ...

    async def on_event_received(self, instance_id: str, event_type: str, event_data: dict[str, Any]) -> None: ...


class HooksBase:
    """All hooks, doing nothing: override what you need."""

    async def on_workflow_start(self, instance_id: str, workflow_name: str, input_data: dict[str, Any]) -> None:
        pass

    async def on_workflow_complete(self, instance_id: str, workflow_name: str, result: Any) -> None:
        pass

    async def on_workflow_failed(self, instance_id: str, workflow_name: str, error: Exception) -> None:
        pass

    async def on_workflow_cancelled(self, instance_id: str, workflow_name: str) -> None:
        pass

    async def on_activity_start(
        self, instance_id: str, activity_id: str, activity_name: str, is_replaying: bool
    ) -> None:
        pass

    async def on_activity_complete(
        self, instance_id: str, activity_id: str, activity_name: str, result: Any, cache_hit: bool
    ) -> None:
        pass

    async def on_activity_failed(
        self, instance_id: str, activity_id: str, activity_name: str, error: Exception
    ) -> None:
        pass

    async def on_activity_retry(
        self, instance_id: str, activity_id: str, activity_name: str, error: Exception, attempt: int, delay: float
    ) -> None:
        pass

    async def on_event_sent(self, event_type: str, event_source: str, event_data: dict[str, Any]) -> None:
        pass

    async def on_event_received(self, instance_id: str, event_type: str, event_data: dict[str, Any]) -> None:
        pass


class AttemptStarted(Struct, frozen=True):
    """One attempt of a step, whose body begins now."""

    run_id: str
    workflow: str
    step: str
    name: str
    number: int


OnAttemptDone = Callable[[BaseException | None], None]
"""Told when the attempt's outcome is committed; an attempt without one is not heard of again."""


class EventReceived(Struct, frozen=True):
    """An event that a run received, or was started by."""

    run_id: str
    workflow: str
    type: str
    extensions: Mapping[str, Any]


class AttemptWatcher(Protocol):
    """Hooks that have this too are called at once where the body will run: what they put into its context, it sees."""

    def watch_attempt(self, attempt: AttemptStarted) -> OnAttemptDone | None: ...


class EventHooks(Protocol):
    """Hooks that have this too are told what events carry besides their data."""

    async def watch_arrival(self, arrival: EventReceived) -> None: ...


Call = Callable[[Any], Awaitable[None]]


class HookCaller:
    """Calls the hooks one after the other, in the order things were committed, beside the runs."""

    def __init__(self, hooks: WorkflowHooks) -> None:
        self._hooks = hooks
        # Of the class: an object that answers to any name does not mean this one.
        is_watcher = hasattr(type(hooks), "watch_attempt")
        self._watcher = cast(AttemptWatcher, hooks) if is_watcher else None
        self.watches_arrivals = hasattr(type(hooks), "watch_arrival")
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self._making: asyncio.Task[None] | None = None
        self._task = supervision.start("calling hooks", self._run, name="edda-hooks")

    def call(self, call: Call) -> None:
        self._calls.put_nowait(call)

    def watch(self, attempt: AttemptStarted) -> OnAttemptDone | None:
        if self._watcher is None:
            return None
        try:
            return self._watcher.watch_attempt(attempt)
        except KeyboardInterrupt:
            raise
        except BaseException:  # the user's code, SystemExit and CancelledError included: the body does not depend on it
            logger.exception("a hook raised; the attempt begins all the same")
            return None

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
        except BaseException:  # the user's code, SystemExit and CancelledError included: nothing depends on it
            logger.exception("a hook raised; what it was told about is committed all the same")

    async def close(self, grace: float = 5.0) -> None:
        try:
            async with asyncio.timeout(grace):
                await self._calls.join()
        except TimeoutError:
            logger.warning("hooks were still running after %s seconds; given up", grace)
        await cancel_and_wait(self._task, self._making)
