"""Starting tasks of the engine's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


def start_task(
    work: Coroutine[Any, Any, T],
    *,
    name: str | None = None,
    context: Context | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> asyncio.Task[T]:
    """A task that begins in a later turn of the loop, whatever factory for tasks the user's loop has.

    With `asyncio.eager_task_factory` (Python 3.12) `create_task` would run it at once, inside its maker: bodies of
    steps inside each other until the stack is full, and a task that is over before its maker has noted that it began.
    """
    return asyncio.Task(work, loop=loop or asyncio.get_running_loop(), name=name, context=context)
