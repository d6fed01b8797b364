"""A worker whose steps can block its event loop: `stalls <db url> <stall limit> <log file> <ledger>`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.engine.settings import Settings

from .ledger import record

LEDGER = ""


@activity
async def tick(ctx: WorkflowContext, label: str) -> str:
    await asyncio.sleep(0.01)
    record(LEDGER, f"{ctx.instance_id} {label}")
    return label


@workflow
async def steps(ctx: WorkflowContext, count: int, rest: float) -> int:
    """Some steps, with a wait between each two that leaves memory."""
    for number in range(count):
        await tick(ctx, str(number))
        if rest:
            await asyncio.sleep(rest)
    return count


def hold_up(seconds: float) -> None:
    """Until the time is over, or a file says so."""
    free = time.monotonic() + seconds
    while time.monotonic() < free and not os.path.exists(f"{LEDGER}.free"):
        time.sleep(0.05)


@activity
async def block(ctx: WorkflowContext, seconds: float) -> str:
    record(LEDGER, f"{ctx.instance_id} blocks")
    hold_up(seconds)
    record(LEDGER, f"{ctx.instance_id} done")
    return "blocked"


@workflow
async def blocking(ctx: WorkflowContext, seconds: float) -> str:
    return await block(ctx, seconds)


@workflow
async def blocking_code(ctx: WorkflowContext, seconds: float) -> str:
    hold_up(seconds)
    await tick(ctx, "after")
    return "blocked"


WORKFLOWS = (steps, blocking, blocking_code)


def settings(stall_limit: float = 300.0) -> Settings:
    return Settings(lease=1.5, heartbeat=0.3, sweep=0.1, takeover_grace=0.0, linger=0.0, stall_limit=stall_limit)


async def main(url: str, stall_limit: float) -> None:
    async with EddaApp("stalls", url, workflows=WORKFLOWS, settings=settings(stall_limit)):
        print("serving", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    LEDGER = sys.argv[4]
    logging.basicConfig(filename=sys.argv[3], level=logging.INFO, format="%(levelname)s %(message)s")
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
