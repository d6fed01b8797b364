"""SIGTERM under load: the worker's own command, told to go while it works, again and again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from msgspec import Struct

from edda import EddaApp
from edda.errors import StorageUnavailableError

from .effect_log import read_ledgers
from .final_state import read_remains
from .fork_server import ROOT
from .invariants import violations
from .target_databases import Place
from .workload import WORKFLOWS, errand

PATIENCE = 60.0
LOAD = 12
"""Runs under way at any time."""


class Departure(Struct, frozen=True):
    code: int
    seconds: float
    """From the signal to the end of the process."""


class Roll(Struct, frozen=True):
    """Rolling restarts: one worker after the other is told to go, a new one takes its place."""

    departures: tuple[Departure, ...]
    runs: int
    violations: tuple[str, ...]
    repeated: int
    """Steps that ran more than once, though each could have finished in the grace."""

    @property
    def slowest(self) -> float:
        return max(departure.seconds for departure in self.departures)

    @property
    def codes(self) -> set[int]:
        return {departure.code for departure in self.departures}

    def __str__(self) -> str:
        facts = f"restarts={len(self.departures)} runs={self.runs} slowest={self.slowest:.2f}s codes={self.codes}"
        return f"drain {facts} repeated={self.repeated} violations={len(self.violations)}"


@asynccontextmanager
async def service(place: Place, folder: Path, *options: str) -> AsyncIterator[Process]:
    """A worker by its command; here when it says that it runs."""
    environment = os.environ | {"EDDA_DB_URL": place.url, "EDDA_TORTURE_LEDGERS": str(folder)}
    command = [sys.executable, "-m", "edda", "worker", "faults.worker_app:app", *options]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stderr=PIPE)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            while b"is running" not in (said := await process.stderr.readline()):
                assert said, "the worker ended before it ran"
        reader = asyncio.create_task(process.stderr.read())  # else a full pipe would stop it
        yield process
        reader.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def leave(process: Process) -> Departure:
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        code = await process.wait()
    return Departure(code, time.monotonic() - told)


async def roll(place: Place, folder: Path, times: int) -> Roll:
    departures = []
    async with EddaApp("client", place.url, workflows=WORKFLOWS, worker=False, auto_migrate=False) as client:
        load = asyncio.create_task(keep_busy(client))
        async with service(place, folder):  # one that stays, so that there is somebody to hand over to
            for _ in range(times):
                async with service(place, folder) as process:
                    await _until_it_works(process, folder)
                    departures.append(await leave(process))
            load.cancel()
            runs = (await asyncio.gather(load, return_exceptions=True))[0]
            assert isinstance(runs, set), runs
            for run_id in runs:
                await client.handle(run_id).result(PATIENCE)
    return await _judge(place, folder, tuple(departures), runs)


async def keep_busy(client: EddaApp) -> set[str]:
    """Until it is cancelled; then all that was started."""
    started: set[str] = set()

    async def one_after_the_other() -> None:
        while True:
            with suppress(StorageUnavailableError):  # it was not started, as far as anybody was told
                started.add(run_id := await client.start(errand))
                await client.handle(run_id).result(PATIENCE)

    with suppress(asyncio.CancelledError):
        await asyncio.gather(*(one_after_the_other() for _ in range(LOAD)))
    return started


async def _until_it_works(process: Process, folder: Path) -> None:
    ledger = folder / f"{process.pid}.ledger"
    async with asyncio.timeout(PATIENCE):
        while ledger.read_text().count("\n") < LOAD:  # noqa: ASYNC110 - the fact is in another process
            await asyncio.sleep(0.02)


async def _judge(place: Place, folder: Path, departures: tuple[Departure, ...], started: set[str]) -> Roll:
    line = place.line()
    remains, told = await read_remains(line), read_ledgers(folder)
    line.close()
    told.acked |= started
    steps = {(effect.run_id, effect.step, effect.attempt) for effect in told.effects}
    found = tuple(violations(remains, told))
    return Roll(departures, len(started), found, len(told.effects) - len(steps))
