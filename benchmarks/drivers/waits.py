"""Workflows that wait for an event or a moment, the same for every system."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from benchmarks.figures import Burst, Moments, Resources, Waiting

from .driver import Driver, Probe, until, until_told
from .pipe import Operation

IN_FLIGHT = 100
SETTLING = 60.0
"""Seconds for all to come to rest; who does not in that time is measured as it is."""


class Waits:
    def __init__(self, driver: Driver, probe: Probe) -> None:
        self.driver = driver
        self.probe = probe

    @property
    def operations(self) -> dict[str, Operation]:
        return {
            "expect": self.expect,
            "burst": self.burst,
            "send": self.send,
            "marks": self.marks,
            "doze": self.doze,
            "lateness": self.lateness,
            "resources": self.resources,
        }

    async def expect(self, first: int, count: int, act: bool) -> Waiting:
        """Done when all of them wait."""
        return await self._start(range(first, first + count), lambda number: self.driver.expect(number, act))

    async def doze(self, first: int, count: int, due: float) -> Waiting:
        return await self._start(range(first, first + count), lambda number: self.driver.doze(number, due))

    async def _start(self, numbers: range, start: Callable[[int], Awaitable[None]]) -> Waiting:
        began = time.monotonic()
        # The first one alone: the reference breaks when a workflow it has not seen is started twice at once.
        await start(numbers[0])
        await each_of(numbers[1:], start)
        await until_told(self.driver.is_quiet, SETTLING)
        return Waiting(len(numbers), time.monotonic() - began)

    async def burst(self, first: int, count: int, timeout: float) -> Burst:
        numbers = range(first, first + count)
        began, cpu = time.monotonic(), time.process_time()
        await each_of(numbers, self.driver.send)
        done = await until(lambda: self.probe.marks.keys() >= set(numbers), timeout)
        if done:
            await until_told(self.driver.is_quiet, timeout)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        return Burst(count, len(self.probe.marks.keys() & set(numbers)), seconds, cpu)

    async def send(self, first: int, count: int, gap: float) -> Moments:
        """One event at a time, at a low rate; when each call began."""
        moments: list[float | None] = []
        for number in range(first, first + count):
            await asyncio.sleep(gap)
            moments.append(time.monotonic())
            await self.driver.send(number)
        return Moments(moments)

    async def marks(self, first: int, count: int, timeout: float) -> Moments:
        return Moments(await self._await_marks(first, count, timeout, self.probe.marks))

    async def lateness(self, first: int, count: int, due: float, timeout: float) -> Moments:
        """Seconds behind a moment of the wall clock."""
        dates = await self._await_marks(first, count, timeout, self.probe.dates)
        return Moments([None if date is None else date - due for date in dates])

    async def _await_marks(self, first: int, count: int, timeout: float, found: dict[int, float]) -> list[float | None]:
        numbers = range(first, first + count)
        await until(lambda: self.probe.marks.keys() >= set(numbers), timeout)
        return [found.get(number) for number in numbers]

    async def resources(self) -> Resources:
        gc.collect()
        return Resources(time.process_time(), resident_bytes(), self.driver.statements)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def each_of(numbers: Iterable[int], do: Callable[[int], Awaitable[None]], in_flight: int = IN_FLIGHT) -> None:
    turns = iter(numbers)

    async def one_after_another() -> None:
        for number in turns:
            await do(number)

    await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
