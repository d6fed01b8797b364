"""I: events over HTTP, each stored before its answer, beside the bare driver's commits on one connection."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from benchmarks.databases import Database, count_events
from benchmarks.effort import Effort
from benchmarks.figures import Figures, Posting, Posts
from benchmarks.process import ROOT, DriverError, DriverProcess, start_module
from benchmarks.systems import System

from .steps import raw_commits

LINES = 50
BATCH = 100
BATCH_LINES = 8
STARTING = 20.0
LISTENS = "edda listens on "


async def posting(system: System, database: Database, effort: Effort) -> Figures:
    if system.is_raw:
        return await raw_commits(system, database, effort, 1)
    async with serving(database) as address, start_module(Path(sys.executable), "load") as load:
        warm_up = await fire(load, address, LINES, 1, 1.0)
        single = await fire(load, address, LINES, 1, effort.seconds)
        batched = await fire(load, address, BATCH_LINES, BATCH, effort.seconds)
        paced = await fire(load, address, LINES, 1, effort.seconds, single.rate / 2)
    answered = sum(each.events for each in (warm_up, single, batched, paced))
    return Posting(single, batched, paced, answered - await count_events(database))


async def fire(
    load: DriverProcess, address: str, lines: int, batch: int, seconds: float, rate: float | None = None
) -> Posts:
    parts = urlsplit(address)
    return await load.ask(
        Posts, "fire", host=parts.hostname, port=parts.port, lines=lines, batch=batch, seconds=seconds, rate=rate
    )


@asynccontextmanager
async def serving(database: Database) -> AsyncIterator[str]:
    """`edda serve` in a process of its own; its address."""
    with tempfile.TemporaryFile() as log:
        server = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "edda", "serve", "benchmarks.drivers.served:app", "--port", "0"),
            cwd=ROOT,
            env={**os.environ, "EDDA_DB_URL": database.url},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield await address_of(server, log)
        finally:
            await stop(server)


async def address_of(server: asyncio.subprocess.Process, log: IO[bytes]) -> str:
    deadline = time.monotonic() + STARTING
    while server.returncode is None and time.monotonic() < deadline:
        for line in said_in(log).splitlines():
            if line.startswith(LISTENS):
                return line.removeprefix(LISTENS)
        await asyncio.sleep(0.02)
    raise DriverError(f"edda serve does not listen\n{said_in(log)[-2000:]}")


def said_in(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


async def stop(server: asyncio.subprocess.Process) -> None:
    if server.returncode is not None:
        return
    server.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(server.wait(), STARTING)
    except TimeoutError:
        server.kill()
        await server.wait()
