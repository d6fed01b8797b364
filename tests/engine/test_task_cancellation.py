"""Tasks that are told to end do, also if what they await swallows a cancel."""

from __future__ import annotations

import asyncio

import pytest

from edda.engine import tasks
from edda.engine.tasks import cancel_and_wait


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_task_is_over_when_it_was_dismissed() -> None:
    task = asyncio.create_task(for_ever())
    await cancel_and_wait(task, None)
    assert task.cancelled()


async def test_a_cancel_that_is_swallowed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "RECANCEL_AFTER", 0.01)
    swallowed = 0

    async def deaf() -> None:
        nonlocal swallowed
        while swallowed < 3:
            try:
                await for_ever()
            except asyncio.CancelledError:
                swallowed += 1
        await for_ever()

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.cancelled()
    assert swallowed == 3


async def test_how_it_ended_is_of_no_interest(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("nobody asks")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    del task
    assert caplog.text == ""


async def test_nobody_to_dismiss_takes_no_time() -> None:
    await cancel_and_wait()
    await cancel_and_wait(None)
