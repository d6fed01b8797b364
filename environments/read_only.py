"""A database that refuses to write for some seconds while workers run, and one that is read-only from the start.

PostgreSQL is made read-only with default_transaction_read_only and its connections are cut, as when a primary is
demoted. Nothing tells the workers when that is over. On SQLite the file, or its folder, may not be written to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from edda import EddaApp
from edda.errors import StorageError
from environments.workers import ROOT, STEPS, add_up, working
from tests import databases
from tests.engine.conditions import until

PATIENCE = 120.0
CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE application_name = 'edda' AND datname = current_database() AND pid <> pg_backend_pid()"""


def run() -> dict[str, object]:
    return {**asyncio.run(check_postgres()), **check_sqlite()}


async def check_postgres(runs: int = 40, seconds: float = 5.0) -> dict[str, object]:
    server = databases.postgres()
    assert server is not None, "there is no PostgreSQL"
    url = server.create()
    try:
        return await _check_postgres(url, runs, seconds)
    finally:
        server.drop(url)


async def _check_postgres(url: str, runs: int, seconds: float) -> dict[str, object]:
    name = urlsplit(url).path[1:]
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE counted (id int PRIMARY KEY, n int NOT NULL)")
    await connection.execute(f"INSERT INTO counted SELECT i, 0 FROM generate_series(0, {runs * STEPS - 1}) i")

    async def some_are_done() -> bool:
        return bool(await connection.fetchval("SELECT count(*) >= $1 FROM counted WHERE n > 0", runs))

    async def all_are_done() -> bool:
        return bool(await connection.fetchval("SELECT count(*) = $1 FROM edda_result", runs))

    try:
        async with EddaApp("add-up", url, worker=False) as app:
            ids = [await app.start(add_up, number) for number in range(runs)]
        with working(url, 2) as workers:
            for worker in workers:
                await asyncio.to_thread(worker.wait_for, "started")
            await until(some_are_done, "the runs are on their way", PATIENCE)
            await connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            await connection.execute(CUT)
            began = time.monotonic()
            refusal = await _refused(url)
            await asyncio.sleep(seconds)
            await connection.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
            away = time.monotonic() - began
            again = time.monotonic()
            await until(all_are_done, "all runs have ended", PATIENCE)
            took = time.monotonic() - again
        async with EddaApp("add-up", url, worker=False) as app:
            assert [await app.handle(run_id).result() for run_id in ids] == list(range(runs))
        wrong = await connection.fetchval("SELECT count(*) FROM counted WHERE n <> 1")
        assert wrong == 0, f"{wrong} of {runs * STEPS} rows were not updated once"
    finally:
        await connection.close()
    return {
        "PostgreSQL read-only while workers run": f"{away:.1f} s; {runs * STEPS} updates once each, "
        f"all runs ended {took:.1f} s after it",
        "PostgreSQL read-only at the start": refusal,
    }


async def _refused(url: str) -> str:
    words = "started"
    try:
        async with EddaApp("add-up", url, workflows=[]):
            pass
    except StorageError as error:
        words = f"refused: {error}"
    assert "read-only" in words, f"a worker on a read-only database: {words}"
    return words


def check_sqlite() -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="edda_read_only_") as folder:
        file = Path(folder) / "shop.db"
        assert _start(file) == "started"
        refusals: dict[str, object] = {}
        for name, paths, mode in (
            ("SQLite file read-only", sorted(Path(folder).iterdir()), 0o444),
            ("SQLite folder read-only", [Path(folder)], 0o555),
        ):
            before = [path.stat().st_mode for path in paths]
            for path in paths:
                path.chmod(mode)
            said = _start(file)
            for path, kept in zip(paths, before, strict=True):
                path.chmod(kept)
            assert said.startswith("refused"), f"{name}: {said}"
            assert str(folder) in said, f"{name}: {said}"
            refusals[name] = said.replace(folder, "...")
        assert _start(file) == "started"
    return refusals


def _start(file: Path) -> str:
    command = [sys.executable, "-m", "environments.read_only", f"sqlite:///{file}"]
    if os.geteuid() == 0:  # root may write to everything, unless it gives that right up
        command = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def start(url: str) -> None:
    try:
        async with EddaApp("add-up", url):
            print("started")
    except StorageError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    if sys.argv[1:]:
        asyncio.run(start(sys.argv[1]))
    else:
        for figure, value in run().items():
            print(f"{figure}: {value}")
