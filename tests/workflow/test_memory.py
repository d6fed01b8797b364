"""Memory stays flat however often runs come and go, also without the collector.

The long run: `python -m tests.workflow.test_memory --suspends 100000`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from edda.core.model import Entry

from .recorded_run import Body, Flow, StepFailedError, running, started

SUSPENDS = 3000
WARM_UP = 300
STRAY_OBJECTS = 100
"""Caches that fill up; one object per suspend would be thousands."""


async def use_nearly_everything(flow: Flow) -> None:
    first = await flow.step("first")
    try:
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(flow.step("work", first))
            await asyncio.gather(flow.nap(50), asyncio.shield(flow.step("shielded")), generate(flow))
    finally:
        await flow.step("clean_up")


async def generate(flow: Flow) -> None:
    async def values() -> AsyncGenerator[Any, None]:
        while True:
            yield await flow.step("value")

    async with aclosing(values()) as generator:
        async for _ in generator:
            pass


async def race_and_try_again(flow: Flow) -> None:
    racers = [asyncio.create_task(flow.step("race", number)) for number in range(3)]
    _, losers = await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    for loser in losers:
        loser.cancel()
    await asyncio.wait(losers)
    with suppress(StepFailedError):
        await flow.step("charge")
    await asyncio.wait_for(asyncio.gather(flow.step("charge"), asyncio.sleep(5)), 30)


async def fail_in_a_group(flow: Flow) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(flow.step("work"))
        await flow.step("more")


def leave_in_the_middle(history: list[Entry]) -> None:
    run = started(use_nearly_everything, history)
    run.complete("generate:1/value:1")
    run.complete("work:2")
    run.drop()


def leave_after_a_failure(_history: list[Entry]) -> None:
    run = started(race_and_try_again)
    run.complete("race:1")
    run.fail("charge:1")
    run.drop()


def come_and_go(history: list[Entry]) -> None:
    leave_in_the_middle(history)
    leave_after_a_failure(history)


def begin(body: Body, *completed: str) -> list[Entry]:
    with running(body) as run:
        for id in completed:
            run.complete(id)
        return list(run.history)


@contextmanager
def without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(times: int, tell: Callable[[int], None] = lambda done: None) -> int:
    """How many objects are left behind that only the collector could free."""
    history = begin(use_nearly_everything, "first:1")
    for _ in range(WARM_UP):
        come_and_go(history)
    before = len(gc.get_objects())
    for done in range(times // 2):
        come_and_go(history)
        tell(2 * done)
    return len(gc.get_objects()) - before


@pytest.mark.parametrize("leave", [leave_in_the_middle, leave_after_a_failure])
def test_one_suspend_leaves_nothing_behind(leave: Callable[[list[Entry]], None]) -> None:
    history = begin(use_nearly_everything, "first:1")
    leave(history)
    with without_the_collector():
        leave(history)
        assert gc.collect() == 0


def test_memory_is_flat_over_many_suspends() -> None:
    with without_the_collector():
        assert measure(SUSPENDS) < STRAY_OBJECTS


def test_the_collector_frees_what_an_error_s_traceback_ties_together() -> None:
    """A task's error, its traceback and the frames that know the task: a circle of asyncio's own."""
    before = count_after_failures()
    assert count_after_failures() - before < STRAY_OBJECTS


def count_after_failures() -> int:
    for _ in range(200):
        run = started(fail_in_a_group)
        run.fail("work:1")
        run.drop()
    gc.collect()
    return len(gc.get_objects())


# The command


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suspends", type=int, default=100_000)
    options = parser.parse_args()
    began = time.monotonic()
    resident: list[int] = []

    def tell(done: int) -> None:
        if done % 10_000 == 0:
            resident.append(resident_kib())
            print(f"\r{done}/{options.suspends} suspends, {resident[-1]} KiB", end="", file=sys.stderr, flush=True)

    with without_the_collector():
        left = measure(options.suspends, tell)
    print(
        f"\nsuspends={options.suspends} objects_left={left} resident_first={resident[0]}KiB "
        f"resident_last={resident_kib()}KiB python={sys.version.split()[0]} seconds={time.monotonic() - began:.0f}"
    )
    return 0 if left < STRAY_OBJECTS else 1


if __name__ == "__main__":
    sys.exit(main())
