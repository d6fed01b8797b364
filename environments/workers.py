"""Worker processes for the environments: each run updates rows of its own through `ctx.session`, once each."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import text

from edda import EddaApp, RetryPolicy, WorkflowContext, activity, workflow
from edda.errors import StorageError

ROOT = Path(__file__).parents[1]
STEPS = 5
# What a user writes whose steps shall outlast a database that is away: an attempt that met it counts like any other.
PATIENT = RetryPolicy(initial_interval=0.1, max_interval=1.0, max_attempts=1000)


@activity(retry_policy=PATIENT)
async def add_by_session(ctx: WorkflowContext, row: int) -> None:
    await ctx.session.execute(text("UPDATE counted SET n = n + 1 WHERE id = :id"), {"id": row})
    await asyncio.sleep(0.05)


@activity(retry_policy=PATIENT)
async def add_by_transaction(ctx: WorkflowContext, row: int) -> None:
    async with ctx.transaction() as transaction:
        await transaction.execute(f"UPDATE counted SET n = n + 1 WHERE id = {int(row)}")
        await asyncio.sleep(0.05)


@workflow
async def add_up(ctx: WorkflowContext, number: int) -> int:
    for step in range(STEPS):
        add = add_by_session if step % 2 else add_by_transaction
        await add(ctx, number * STEPS + step)
    return number


async def work(url: str, pool_size: int) -> None:
    """Until it is told to end. A start that is refused is tried again, as a supervisor would."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    while not ended.is_set():
        try:
            async with EddaApp("add-up", url, pool_size=pool_size):
                print("started", flush=True)
                await ended.wait()
        except StorageError as error:
            print(f"refused {error}", flush=True)
            await asyncio.sleep(0.5)


class Worker:
    def __init__(self, url: str, pool_size: int) -> None:
        command = [sys.executable, "-m", "environments.workers", url, str(pool_size)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def wait_for(self, word: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return
        raise AssertionError(f"the worker ended before it said {word!r}")

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def working(url: str, count: int, pool_size: int = 2) -> Iterator[Sequence[Worker]]:
    workers = [Worker(url, pool_size) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(work(sys.argv[1], int(sys.argv[2])))
