"""Ending tasks for good."""

from __future__ import annotations

import asyncio
from typing import Any

RECANCEL_AFTER = 5.0
"""Seconds after which a task that goes on is cancelled once more: time enough to tidy up after the first one."""


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel them, and wait until they are over.

    One cancel is not enough: what a task awaits may swallow it. Up to Python 3.11 `asyncio.wait_for` does if the cancel
    comes in the very moment of the answer, and database drivers use it.
    """
    going = {task for task in tasks if task is not None}
    while going:
        for task in going:
            task.cancel()
        over, going = await asyncio.wait(going, timeout=RECANCEL_AFTER)
        for task in over:
            if not task.cancelled():
                task.exception()  # looked at: whoever dismisses a task does not care how it ended
