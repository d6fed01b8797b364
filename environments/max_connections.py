"""A server whose connections are all taken for some seconds, while workers run and others start."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import asyncpg

from edda import EddaApp
from environments.workers import STEPS, add_up, working
from tests.databases import PostgresServer
from tests.engine.conditions import until
from tests.servers import start_postgres

PATIENCE = 120.0
LIMIT = 20


def run() -> dict[str, object]:
    return asyncio.run(check())


async def check(runs: int = 40, seconds: float = 6.0) -> dict[str, object]:
    admin = start_postgres(PostgresServer.answers, settings=[f"--max_connections={LIMIT}"])
    watcher = await asyncpg.connect(admin)  # as a superuser, for whom the server keeps some connections
    await watcher.execute("CREATE ROLE shop LOGIN")
    await watcher.execute("CREATE DATABASE shop OWNER shop")
    url = admin.replace("postgres@", "shop@").removesuffix("/postgres") + "/shop"
    setup = await asyncpg.connect(url)
    await setup.execute("CREATE TABLE counted (id int PRIMARY KEY, n int NOT NULL)")
    await setup.execute(f"INSERT INTO counted SELECT i, 0 FROM generate_series(0, {runs * STEPS - 1}) i")
    await setup.close()
    look = await asyncpg.connect(admin.removesuffix("/postgres") + "/shop")

    async def some_are_done() -> bool:
        return bool(await look.fetchval("SELECT count(*) >= 5 FROM counted WHERE n > 0"))

    async def all_are_done() -> bool:
        return bool(await look.fetchval("SELECT count(*) = $1 FROM edda_result", runs))

    try:
        async with EddaApp("add-up", url, worker=False, pool_size=1) as app:
            ids = [await app.start(add_up, number) for number in range(runs)]
        with working(url, 1, pool_size=1) as workers:
            await asyncio.to_thread(workers[0].wait_for, "started")
            await until(some_are_done, "the runs are on their way", PATIENCE)
            taken = await _take_all(url)
            began = time.monotonic()
            with working(url, 1, pool_size=1) as late:
                await asyncio.to_thread(late[0].wait_for, "refused")
                # The connections of the first worker are cut, and it finds none.
                await look.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'edda'"
                )
                taken += await _take_all(url)
                await asyncio.sleep(seconds)
                for connection in taken:
                    await connection.close()
                held = time.monotonic() - began
                await asyncio.to_thread(late[0].wait_for, "started")
                started = time.monotonic() - began - held
                await until(all_are_done, "all runs have ended", PATIENCE)
        wrong = await look.fetchval("SELECT count(*) FROM counted WHERE n <> 1")
        assert wrong == 0, f"{wrong} of {runs * STEPS} rows were not updated once"
        async with EddaApp("add-up", url, worker=False, pool_size=1) as app:
            assert [await app.handle(run_id).result() for run_id in ids] == list(range(runs))
    finally:
        await look.close()
        await watcher.close()
    return {
        f"{len(taken)} of {LIMIT} connections taken": f"{held:.1f} s; a worker that starts is refused, and starts "
        f"{started:.1f} s after; {runs * STEPS} updates once each"
    }


async def _take_all(url: str) -> list[asyncpg.Connection[asyncpg.Record]]:
    taken: list[asyncpg.Connection[asyncpg.Record]] = []
    with suppress(asyncpg.TooManyConnectionsError):
        while True:
            taken.append(await asyncpg.connect(url))
    return taken


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    for figure, value in run().items():
        print(f"{figure}: {value}")
