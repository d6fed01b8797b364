"""Four places where asyncio's own order depends on addresses or on the Python version.

Importing this module mends them for workflow loops; on any other loop asyncio behaves as ever.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import _get_running_loop
from collections.abc import Awaitable, Iterable
from typing import Any

from .loop import WorkflowLoop


def _in_workflow() -> bool:
    return isinstance(_get_running_loop(), WorkflowLoop)


def _order_as_completed() -> None:
    """The original starts coroutines in the order of a set, which is that of their addresses."""
    original = asyncio.as_completed

    def as_completed(fs: Iterable[Awaitable[Any]], *, timeout: float | None = None) -> Any:
        if _in_workflow():
            fs = [asyncio.ensure_future(f) for f in fs]
        return original(fs, timeout=timeout)

    as_completed.__doc__ = original.__doc__
    _replace("as_completed", as_completed)


def _order_wait_for() -> None:
    """Python 3.11 makes a task, and takes a turn more, where 3.12 makes none: histories would not travel."""
    original = asyncio.wait_for

    async def wait_for(fut: Awaitable[Any], timeout: float | None) -> Any:
        if timeout is None or timeout <= 0 or not _in_workflow():
            return await original(fut, timeout)
        async with asyncio.timeout(timeout):
            return await fut

    wait_for.__doc__ = original.__doc__
    _replace("wait_for", wait_for)


def _order_all_tasks() -> None:
    """The original goes through every task of the process, in the order of their addresses."""
    original = asyncio.all_tasks

    def all_tasks(loop: asyncio.AbstractEventLoop | None = None) -> set[asyncio.Task[Any]]:
        asked = loop if loop is not None else _get_running_loop()
        if isinstance(asked, WorkflowLoop):
            return {task for task in asked.tasks.values() if not task.done()}
        return original(loop)

    all_tasks.__doc__ = original.__doc__
    _replace("all_tasks", all_tasks)


def _order_gatherings() -> None:
    """A set of `gather()` results would iterate by address; hash each by its first branch."""
    gathering: Any = vars(asyncio.tasks)["_GatheringFuture"]
    gathering.__hash__ = lambda self: hash(self._children[0]) if self._children else 0


def _replace(name: str, function: Any) -> None:
    setattr(asyncio, name, function)
    setattr(asyncio.tasks, name, function)


_order_as_completed()
_order_all_tasks()
_order_gatherings()
if sys.version_info < (3, 12):
    _order_wait_for()
