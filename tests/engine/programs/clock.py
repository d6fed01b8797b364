"""A worker whose database's clock is set while it works: `clock <db url> <log file> <file with an offset>`."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

from edda import EddaApp, WorkflowContext, activity, sleep, workflow
from edda.core.model import MICROSECONDS
from edda.engine.settings import Settings
from edda.storage.sqlite import SQLiteStorage

SETTINGS = Settings(lease=10.0, heartbeat=0.3, sweep=0.1, takeover_grace=0.0, linger=0.0, poll=0.1)


@activity
async def step(ctx: WorkflowContext) -> None: ...


@workflow
async def short(ctx: WorkflowContext) -> str:
    await step(ctx)
    await sleep(ctx, 0.05)
    return "done"


@workflow
async def long(ctx: WorkflowContext, steps: int) -> list[float]:
    """The run's own times, one for each step."""
    times = []
    for _ in range(steps):
        await step(ctx)
        times.append(ctx.now().timestamp())
        await asyncio.sleep(0)
    return times


@workflow
async def asleep(ctx: WorkflowContext, seconds: float) -> str:
    await sleep(ctx, seconds)
    return "awake"


WORKFLOWS = (short, long, asleep)


def storage_of(url: str, clock: str) -> SQLiteStorage | None:
    """On SQLite the process's clock is the database's. Here it is moved by as many seconds as a file says: libfaketime
    breaks `time.sleep`."""
    if not url.startswith("sqlite:///"):
        return None
    offset = Path(clock)
    return SQLiteStorage(
        url.removeprefix("sqlite:///"),
        now=lambda: time.time_ns() // 1000 + int(float(offset.read_text().strip("s\n")) * MICROSECONDS),
        synchronous="OFF",
    )


async def main(url: str, clock: str) -> None:
    async with EddaApp("clock", url, workflows=WORKFLOWS, settings=SETTINGS, storage=storage_of(url, clock)):
        print("serving", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    logging.basicConfig(filename=sys.argv[2], level=logging.INFO, format="%(levelname)s %(message)s")
    asyncio.run(main(sys.argv[1], sys.argv[3]))
