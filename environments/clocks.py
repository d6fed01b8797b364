"""The clock of the database, or of the workers, is set forward and back by an hour while they run (libfaketime)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from faults.target_databases import Place, fresh
from tests.databases import PostgresServer
from tests.servers import Unavailable, start_postgres

from .trial import Trial, folder

LIBRARIES = tuple(f"/usr/lib/{kind}-linux-gnu/faketime/libfaketime.so.1" for kind in ("x86_64", "aarch64"))
JUMPS = ("+3600", "+0", "-3600", "+0")
"""Each is where the clock stands then, beside the true time."""
RUNS = 10


class Clock:
    """Of the processes that are started while it is `set`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        library = next((path for path in LIBRARIES if Path(path).exists()), None)
        if library is None:
            raise Unavailable("install faketime")
        self._variables = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            # What a clock that is set right does not do: monotonic time goes on as ever.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
        self.jump("+0")

    def jump(self, offset: str) -> None:
        """All at once: a reader must not find half a line."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{offset}\n")
        new.chmod(0o644)
        new.replace(self._file)

    @contextmanager
    def set(self) -> Iterator[None]:
        before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def run() -> dict[str, object]:
    with folder() as first:
        first.chmod(0o755)
        clock = Clock(first / "clock")
        with clock.set():
            server = PostgresServer(start_postgres(PostgresServer.answers))
        there = Trial(Place("postgres", server.create()), first)
        database = asyncio.run(_jump(there, clock))
    with folder() as second, fresh("postgres", second) as place:
        clock = Clock(second / "clock")
        with clock.set():
            here = Trial(place, second)
        host = asyncio.run(_jump(here, clock))
    return {
        "done": "clock set by ±1 h and back, of the database and of the workers' host",
        "runs": len(there.runs | here.runs) + min(len(there.runs), len(here.runs)),
        "recovered": max(*database, *host),
        "log lines": there.log_lines + here.log_lines,
        "database": "/".join(map(str, database)),
        "host": "/".join(map(str, host)),
    }


async def _jump(trial: Trial, clock: Clock) -> list[float]:
    """Seconds after each jump until all runs have ended: new ones, and those from before it. Before a clock is set back
    they end first: the timers of a run that is open then are late by the jump."""
    seconds = []
    async with trial.open():
        for before, offset in pairwise(("+0", *JUMPS)):
            await trial.start(RUNS)
            if int(offset) < int(before):
                await trial.finish()
            clock.jump(offset)
            await trial.start(RUNS)
            seconds.append(await trial.finish())
        await trial.check(clocks=False)
    return seconds
