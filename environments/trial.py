"""Worker processes on a database, runs of the fault runs' workload, and the check of all that is left of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from edda import EddaApp
from edda.errors import EddaError
from faults.effect_log import read_ledgers
from faults.final_state import read_remains
from faults.hammer import COUNT_OPEN
from faults.invariants import history_violations, lost_starts, violations
from faults.target_databases import Place
from faults.worker import Orders
from faults.worker_fleet import Fleet, complaints
from faults.workload import WORKFLOWS, errand

PATIENCE = 60.0
"""Seconds in which all runs must end once the trouble is over, on a machine that has other things to do."""
LEASE = 1.5


@contextmanager
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="edda_environment_", ignore_cleanup_errors=True) as name:
        yield Path(name)


class Trial:
    """Make it before there is an event loop: it forks."""

    def __init__(
        self, place: Place, folder: Path, workers: int = 2, *, lease: float = LEASE, stall_limit: float = 300.0
    ) -> None:
        self.place = place
        self.folder = folder
        self.runs: set[str] = set()
        self.fleet = Fleet(Orders(place.url, str(folder), "w", lease=lease, stall_limit=stall_limit), place.urls)
        self.log_lines = 0
        """Of all workers, once it is over."""
        self._workers = workers
        self._client: EddaApp | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        await self.place.prepare()
        self._client = EddaApp("client", self.place.url, workflows=WORKFLOWS, worker=False, auto_migrate=False)
        try:
            async with self._client:
                for _ in range(self._workers):
                    self.fleet.launch()
                await asyncio.to_thread(self.fleet.wait_until_ready)
                yield
        finally:
            self.fleet.wake(all=True)
            self.fleet.close()
            self.log_lines = self._count_lines()

    async def start(self, count: int) -> None:
        """Whatever it takes: a start without an answer is tried again under the same id."""
        assert self._client is not None
        give_up = time.monotonic() + PATIENCE
        for _ in range(count):
            id = f"run-{len(self.runs):05}"
            while True:
                try:
                    self.runs.add(await self._client.start(errand.options(id=id)))
                    break
                except EddaError:
                    assert time.monotonic() < give_up, "no run can be started"
                    await asyncio.sleep(0.1)

    async def finish(self, within: float = PATIENCE) -> float:
        """Seconds until every run has ended."""
        began = time.monotonic()
        while True:
            open_runs = (await self.rows(COUNT_OPEN))[0][0]
            if not open_runs:
                return round(time.monotonic() - began, 1)
            assert time.monotonic() < began + within, f"{open_runs} runs have not ended after {within:.0f} s"
            await asyncio.sleep(0.1)

    async def rows(self, sql: str) -> list[tuple[object, ...]]:
        line = self.place.line()
        try:
            return await line.rows(sql)
        finally:
            line.close()

    async def check(self, *, clocks: bool = True) -> None:
        """`clocks`: those of the processes can be compared with each other."""
        line = self.place.line()
        try:
            remains, told = await read_remains(line), read_ledgers(self.folder)
        finally:
            line.close()
        told.acked |= self.runs
        found = [*violations(remains, told)] if clocks else [*lost_starts(remains, told), *history_violations(remains)]
        found += complaints(self.folder)
        assert not found, f"{len(found)} violations, such as: {found[0]}"

    def _count_lines(self) -> int:
        return sum(len(log.read_text().splitlines()) for log in self.folder.glob("*.log"))


async def until(fact: Callable[[], Awaitable[bool]], what: str, within: float = PATIENCE) -> None:
    give_up = time.monotonic() + within
    while not await fact():
        assert time.monotonic() < give_up, f"not within {within:.0f} s: {what}"
        await asyncio.sleep(0.05)
