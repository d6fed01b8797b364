"""Whether a process that has run many workflows is as small as one that has run a few."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from edda import EddaApp, WorkflowContext, activity, sleep, workflow

from .target_databases import Place, fresh

ABREAST = 50
PAGE = os.sysconf("SC_PAGE_SIZE")


@activity
async def add(ctx: WorkflowContext, number: int) -> int:
    return number + 1


@workflow(name="faults_count_up")
async def count_up(ctx: WorkflowContext, number: int) -> int:
    """Branches, a timer, and results that have to be forgotten."""
    number = await add(ctx, number)
    await sleep(ctx, 0.001)
    return sum(await asyncio.gather(add(ctx, number), add(ctx, number)))


class Growth(Struct, frozen=True):
    runs: int
    settled: int
    """Bytes of memory in use after the first runs."""
    most: int

    @property
    def megabytes(self) -> float:
        return (self.most - self.settled) / 1e6

    def __str__(self) -> str:
        return f"memory runs={self.runs} settled={self.settled / 1e6:.1f}MB growth={self.megabytes:.1f}MB"


def measure(database: str, runs: int, warm_up: int, progress: Callable[[str], None] = lambda line: None) -> Growth:
    with tempfile.TemporaryDirectory(prefix="edda_faults_") as folder, fresh(database, Path(folder)) as place:
        return asyncio.run(_measure(place, runs, warm_up, progress))


async def _measure(place: Place, runs: int, warm_up: int, progress: Callable[[str], None]) -> Growth:
    async with EddaApp("memory", place.url, workflows=[count_up]) as app:
        await _work_through(app, range(warm_up))
        settled = most = resident()
        for first in range(warm_up, runs, warm_up):
            await _work_through(app, range(first, min(first + warm_up, runs)))
            most = max(most, resident())
            progress(str(Growth(first + warm_up, settled, most)))
        return Growth(runs, settled, most)


async def _work_through(app: EddaApp, numbers: range) -> None:
    waiting = iter(numbers)

    async def take() -> None:
        for number in waiting:
            assert await app.run(count_up, number) == 2 * (number + 2)

    await asyncio.gather(*(take() for _ in range(ABREAST)))


def resident() -> int:
    """After a collection: what is left is in use."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
