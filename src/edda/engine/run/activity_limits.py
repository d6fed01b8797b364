"""What bounds the activities of a process: the thread pool of sync ones, and the slots of `max_concurrent`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any


class ActivityThreads:
    """The thread pool of sync activities, created at the first one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._limit, thread_name_prefix="edda-activity")
        context = copy_context()
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._pool, lambda: context.run(_call, function))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            return await running  # a thread cannot be stopped: its result counts, if late; a second cancel gives it up

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _call(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except StopIteration as error:  # a future cannot carry it; a coroutine would turn it into the same
        raise RuntimeError("activity raised StopIteration") from error
    except KeyboardInterrupt as error:  # Ctrl-C reaches the main thread only: here it is an error of the activity
        raise RuntimeError("activity raised KeyboardInterrupt") from error


OnGranted = Callable[["Slot"], bool]
"""Takes the slot and returns True, or returns False."""


class Slot:
    """The right to run one attempt; `free` may be called more than once."""

    __slots__ = ("_queue",)

    def __init__(self, queue: SlotQueue) -> None:
        self._queue: SlotQueue | None = queue

    def free(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.taken -= 1
            queue.grant_next()


class SlotQueue:
    """The steps that wait for a slot of one activity, first in, first out."""

    __slots__ = ("limit", "taken", "waiting")

    def __init__(self) -> None:
        self.limit = 1
        self.taken = 0
        self.waiting: OrderedDict[Hashable, OnGranted] = OrderedDict()

    def grant_next(self) -> None:
        while self.waiting and self.taken < self.limit:
            _, grant = self.waiting.popitem(last=False)
            self.taken += 1
            if not grant(Slot(self)):
                self.taken -= 1


class ConcurrencyLimiter:
    def __init__(self) -> None:
        self._queues: dict[str, SlotQueue] = {}

    def acquire(self, name: str, limit: int, waiter: Hashable, grant: OnGranted) -> None:
        """`grant` is called at once if a slot is free and the queue is empty, else in the order of the queue."""
        queue = self._queues.setdefault(name, SlotQueue())
        queue.limit = limit
        queue.waiting[waiter] = grant
        queue.grant_next()

    def cancel(self, name: str, waiter: Hashable) -> None:
        self._queues[name].waiting.pop(waiter, None)
