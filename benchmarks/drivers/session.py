"""The measurements, the same for every system."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from itertools import pairwise

from benchmarks.figures import Finished, Held, Latency, Opened, Replayed, Suspended, Throughput

from .driver import Driver, Probe, Talker, until
from .pipe import Operation, serve_pipe
from .talks import Talks
from .waits import Waits

STEPS_PER_WORKFLOW = 5
STEPS_IN_A_ROW = 10


class Session:
    def __init__(self, driver: Driver, probe: Probe, talker: Talker | None) -> None:
        self.driver = driver
        self.probe = probe
        self.waits = Waits(driver, probe)
        self.talks = Talks(talker, probe, driver.is_quiet) if talker else None
        self.opened = False
        self.background: list[asyncio.Task[None]] = []

    @property
    def operations(self) -> dict[str, Operation]:
        return {
            "open": self.open,
            "throughput": self.throughput,
            "latency": self.latency,
            "hold": self.hold,
            "finish": self.finish,
            "suspend": self.suspend,
            "replay": self.replay,
            **self.waits.operations,
            **(self.talks.operations if self.talks else {}),
        }

    async def open(self, worker: bool = True) -> Opened:
        await self.driver.open(worker)
        self.opened = True
        return Opened()

    async def close(self) -> None:
        if self.opened:
            await self.driver.close()

    async def throughput(self, count: int, in_flight: int, booking: bool = False) -> Throughput:
        turns, errors = iter(range(count)), 0
        run = self.driver.book if booking else self.driver.run

        async def one_after_another() -> None:
            nonlocal errors
            for _ in turns:
                # A peer's error is a figure of the bench, not a reason to stop it.
                try:
                    await run(STEPS_PER_WORKFLOW)
                except Exception as error:
                    errors += 1
                    print(repr(error), file=sys.stderr)

        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one_after_another() for _ in range(min(in_flight, count))))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        return Throughput(count - errors, seconds, cpu, errors)

    async def latency(self, seconds: float) -> Latency:
        gaps, workflows = [], []
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self.probe.steps.clear()
            started = time.perf_counter()
            await self.driver.run(STEPS_IN_A_ROW)
            workflows.append(time.perf_counter() - started)
            gaps += [later - earlier for earlier, later in pairwise(self.probe.steps)]
        return Latency(1000 * statistics.median(gaps), 1000 * statistics.median(workflows), len(gaps))

    async def hold(self, count: int, timeout: float) -> Held:
        self.probe.gate_closed = True
        # The first one alone: the reference breaks when a workflow it has not seen is started twice at once.
        await self._hold(range(1), timeout)
        await self._hold(range(1, count), timeout)
        return Held(len(self.probe.held))

    async def _hold(self, numbers: range, timeout: float) -> None:
        self.background += [asyncio.create_task(self.driver.hold(number)) for number in numbers]
        await until(lambda: self.probe.held.issuperset(numbers), timeout)

    async def finish(self, count: int, timeout: float) -> Finished:
        await until(lambda: len(self.probe.marks) >= count, timeout)
        return Finished(len(self.probe.marks), max(self.probe.marks.values(), default=time.monotonic()))

    async def suspend(self, steps: int) -> Suspended:
        started = time.perf_counter()
        run_id = await self.driver.suspend(steps)
        return Suspended(run_id, time.perf_counter() - started)

    async def replay(self, run_id: str, timeout: float) -> Replayed:
        started = time.monotonic()
        await self.open()
        self.background = [asyncio.create_task(self.driver.resume(run_id))]
        if not await until(lambda: 0 in self.probe.marks, timeout):
            raise TimeoutError(f"run {run_id} did not go on within {timeout} s")
        at = self.probe.marks[0]
        return Replayed(at - started, at - self.probe.bodies[-1])


def serve(driver: Driver, probe: Probe, *, uvloop: bool, talker: Talker | None = None) -> None:
    session = Session(driver, probe, talker)
    serve_pipe(session.operations, session.close, uvloop=uvloop)
