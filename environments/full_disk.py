"""The disk of the database is full for a while: a small file system of its own, for SQLite and for PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edda import EddaApp
from edda.errors import EddaError
from faults.target_databases import Place
from faults.workload import WORKFLOWS, errand
from tests.databases import PostgresServer
from tests.servers import Unavailable, own_account, start_postgres

from .trial import Trial, folder

QUICK = True
RUNS = 10
FULL = 3.0
"""Seconds."""


@contextmanager
def _disk(place: Path, megabytes: int) -> Iterator[Path]:
    disk = place / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        raise Unavailable("a file system of its own: run this as root, where mounting is allowed")
    own_account(disk)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def run() -> dict[str, object]:
    with folder() as first, _disk(first, 16) as disk:
        sqlite = Trial(Place("sqlite", f"sqlite:///{disk / 'edda.db'}"), first)
        in_file = asyncio.run(_fill(sqlite, disk))
    with folder() as second, _disk(second, 256) as disk:
        second.chmod(0o755)
        server = PostgresServer(start_postgres(PostgresServer.answers, disk=disk))
        postgres = Trial(Place("postgres", server.create()), second)
        on_server = asyncio.run(_fill(postgres, disk))
    return {
        "done": f"disk full for {FULL:g} s",
        "runs": len(sqlite.runs) + len(postgres.runs),
        "recovered": max(in_file, on_server),
        "log lines": sqlite.log_lines + postgres.log_lines,
        "sqlite": in_file,
        "postgres": on_server,
    }


async def _fill(trial: Trial, disk: Path) -> float:
    async with trial.open():
        await trial.start(RUNS)
        ballast = disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 65_536)
        await asyncio.gather(_try_to_start(trial), asyncio.sleep(FULL))
        ballast.unlink()
        await trial.start(RUNS)
        recovered = await trial.finish()
        await trial.check()
        return recovered


async def _try_to_start(trial: Trial) -> None:
    """Some may go in, where there is room left in a page; none may be half in."""
    client = EddaApp("hopeful", trial.place.url, workflows=WORKFLOWS, worker=False, auto_migrate=False)
    with suppress(EddaError, OSError):
        async with asyncio.timeout(FULL), client:
            for _ in range(3):
                trial.runs.add(await client.start(errand))
