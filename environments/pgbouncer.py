"""Workers behind a real PgBouncer that pools by session, by transaction and by statement.

Each of 100 runs makes 20 updates through `ctx.session`, waits for an event, receives a message and sends an event to
the outbox, while an unrelated client with prepared statements of its own uses the same server connections. Afterwards
each row has been updated once, each event was sent, and the unrelated client's table is as it was.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import text

from edda import (
    EddaApp,
    RunStatus,
    WorkflowContext,
    activity,
    receive,
    send_event_transactional,
    subscribe,
    wait_event,
    workflow,
)
from edda.errors import StorageError
from tests import databases
from tests.engine.conditions import until, until_status
from tests.servers import start_pgbouncer

ROOT = Path(__file__).parents[1]
PATIENCE = 300.0
"""Seconds for all runs of one mode; a loaded machine needs some of them."""
STEPS = 20
TABLES = """
CREATE TABLE counted (id int PRIMARY KEY, n int NOT NULL);
CREATE TABLE sent (id text NOT NULL);
CREATE TABLE foreign_rows (id int PRIMARY KEY, n int NOT NULL)"""
HELD_KEYS = """
SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
 WHERE l.locktype = 'advisory' AND l.classid = 4713 AND l.granted AND d.datname = current_database()"""
LOCKS_FREE_WITHIN = 8.0
"""Seconds: five until the server ends the session, and some for a loaded machine."""


@activity
async def count(ctx: WorkflowContext, row: int) -> None:
    await ctx.session.execute(text("UPDATE counted SET n = n + 1 WHERE id = :id"), {"id": row})


@activity
async def tell(ctx: WorkflowContext, number: int) -> None:
    async with ctx.transaction() as connection:
        await connection.execute("UPDATE counted SET n = n + 1 WHERE id = $1", -1 - number)
        await send_event_transactional(ctx, "counted", "environments", {"run": number})


@workflow
async def tally(ctx: WorkflowContext, number: int) -> int:
    for step in range(STEPS):
        await count(ctx, number * STEPS + step)
    await subscribe(ctx, "go")
    event = await wait_event(ctx, "ready", match={"run": number})
    message = await receive(ctx, "go")
    await tell(ctx, number)
    return int(event.data["run"]) + int(message.data)


@workflow
async def wait_once(ctx: WorkflowContext) -> None:
    await wait_event(ctx, "ready", match={"run": 0})


class TableSink:
    """Receives the outbox in a table, by a connection that no pooler is in front of."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def send(self, event: Any) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            await connection.execute("INSERT INTO sent VALUES ($1)", event.id)
        finally:
            await connection.close()

    async def close(self) -> None:
        return


async def work(url: str, direct: str, pool_size: int) -> None:
    """One worker process, until it is told to end."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    app = EddaApp("tally", url, pool_size=pool_size, outbox_enabled=True, sink=TableSink(direct))
    async with app:
        await ended.wait()


def run() -> dict[str, object]:
    return asyncio.run(_run())


async def _run(runs: int = 100, processes: int = 4) -> dict[str, object]:
    figures: dict[str, object] = {}
    figures |= await check("transaction", runs=runs, processes=processes, servers=5, pool_size=5)
    # Each client connection has a server connection of its own here, so there are fewer of them.
    figures |= await check("session", runs=runs // 4, processes=2, servers=40, pool_size=1)
    figures |= await check("session", runs=runs // 4, processes=2, servers=40, pool_size=1, option="session")
    figures["statement mode"] = await refusal()
    figures["keys of a stopped sender are free after"] = f"{await stop_sender():.1f} s"
    return figures


@asynccontextmanager
async def bounced(mode: str, servers: int) -> AsyncIterator[tuple[str, str]]:
    """The URL through a PgBouncer, and the one without it, of a new database."""
    server = databases.postgres()
    assert server is not None, "there is no PostgreSQL"
    direct = server.create()
    try:
        yield start_pgbouncer(direct, databases.PostgresServer.answers, mode=mode, pool_size=servers), direct
    finally:
        server.drop(direct)


async def check(
    mode: str, *, runs: int, processes: int, servers: int, pool_size: int, option: str = ""
) -> dict[str, object]:
    async with bounced(mode, servers) as (bare, direct):
        url = f"{bare}?pooler={option}" if option else bare
        connection = await asyncpg.connect(direct)
        try:
            await connection.execute(TABLES)
            await connection.execute(
                f"INSERT INTO counted SELECT i, 0 FROM generate_series(-{runs}, {runs * STEPS - 1}) i"
            )
            await connection.execute("INSERT INTO foreign_rows SELECT i, 0 FROM generate_series(1, 1000) i")
            began = time.monotonic()
            workers: list[subprocess.Popen[bytes]] = []
            try:
                await _drive(url, direct, runs, processes, pool_size, workers)
            finally:
                _end(workers)
            took = time.monotonic() - began
            wrong = await connection.fetchval("SELECT count(*) FROM counted WHERE n <> 1")
            foreign = await connection.fetchval("SELECT count(*) FROM foreign_rows WHERE n <> 0")
            sent = await connection.fetchval("SELECT count(DISTINCT id) FROM sent")
        finally:
            await connection.close()
    updates = runs * STEPS + runs
    assert wrong == 0, f"{mode}: {wrong} of {updates} rows were not updated once"
    assert foreign == 0, f"{mode}: {foreign} rows of another client were changed"
    assert sent == runs, f"{mode}: {sent} of {runs} events were sent"
    name = f"{mode} mode" + (f", ?pooler={option}" if option else "")
    return {name: f"{updates} updates, {runs} events, messages and outgoing events in {took:.1f} s"}


async def _drive(
    url: str, direct: str, runs: int, processes: int, pool_size: int, workers: list[subprocess.Popen[bytes]]
) -> None:
    async with EddaApp("tally", url, worker=False, pool_size=pool_size) as app, _stranger(url):
        workers += [_spawn("work", url, direct, str(pool_size)) for _ in range(processes)]
        ids = [await app.start(tally, number) for number in range(runs)]
        async with asyncio.timeout(PATIENCE):
            await _until_waiting(app, ids)
            for number in range(runs):
                await app.send_event("ready", "environments", {"run": number})
            await app.publish("go", 1)
            results = [await app.handle(run_id).result() for run_id in ids]
            assert results == [number + 1 for number in range(runs)], results
            await _until_sent(direct, runs)


async def _until_waiting(app: EddaApp, ids: Sequence[str]) -> None:
    for run_id in ids:
        await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT, PATIENCE)


async def _until_sent(direct: str, runs: int) -> None:
    connection = await asyncpg.connect(direct)

    async def all_sent() -> bool:
        count: int = await connection.fetchval("SELECT count(DISTINCT id) FROM sent")
        return count == runs

    try:
        await until(all_sent, f"{runs} events are sent", PATIENCE)
    finally:
        await connection.close()


@asynccontextmanager
async def _stranger(url: str) -> AsyncIterator[None]:
    """Another client on the same server connections: its statement, run in place of ours, would change its table."""
    bare = url.partition("?")[0]

    async def prepare_and_rest() -> None:
        while True:
            connection = await asyncpg.connect(bare, statement_cache_size=0)
            try:
                for _ in range(20):
                    async with connection.transaction():
                        # The unnamed statement and asyncpg's own first names, as every process gives them.
                        for name in ("", "__asyncpg_stmt_1__", "__asyncpg_stmt_2__"):
                            await connection.prepare("UPDATE foreign_rows SET n = n + 1 WHERE id = $1::int", name=name)
                        await connection.execute("DEALLOCATE ALL")
                        await connection.prepare("UPDATE foreign_rows SET n = n + 1 WHERE id = $1::int", name="")
                    await asyncio.sleep(0.01)
            finally:
                connection.terminate()

    task = asyncio.create_task(prepare_and_rest())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), f"the other client failed: {task.exception()!r}"


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        try:
            worker.wait(60)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


async def refusal() -> str:
    async with bounced("statement", 5) as (url, _):
        try:
            await EddaApp("tally", url, worker=False).initialize()
        except StorageError as error:
            words = str(error)
        else:
            raise AssertionError("statement mode was not refused")
    assert "pool_mode" in words, words
    return f"refused: {words}"


async def stop_sender() -> float:
    """Stop a process with SIGSTOP while it holds the locks of an event's keys: the seconds until they are free."""
    async with bounced("transaction", 5) as (url, direct), EddaApp("tally", url) as app:
        run_id = await app.start(wait_once)
        await until_status(
            app, run_id, RunStatus.WAITING_FOR_EVENT
        )  # events of a type that no run waits for have no keys
        connection = await asyncpg.connect(direct)

        async def are_held() -> bool:
            return bool(await connection.fetchval(HELD_KEYS))

        async def are_free() -> bool:
            return not await are_held()

        sender = _spawn("send", url)
        try:
            await until(are_held, "the sender has its locks", PATIENCE)
            began = time.monotonic()
            await until(are_free, "the locks are free", PATIENCE)
            took = time.monotonic() - began
            await app.send_event("ready", "environments", {"run": 0})
            async with asyncio.timeout(PATIENCE):
                await app.handle(run_id).result()
        finally:
            await connection.close()
            sender.kill()
            sender.wait()
    assert took < LOCKS_FREE_WITHIN, f"the keys were held for {took:.1f} s; documented are 5 s"
    return took


def _spawn(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "environments.pgbouncer", *arguments], cwd=ROOT)


class _Stopper:
    """Stops its own process when the transaction that stores an event holds its locks."""

    def before(self, statement: str) -> None:
        return

    def after(self, statement: str) -> None:
        if "pg_advisory_xact_lock(4713" in statement:
            os.kill(os.getpid(), signal.SIGSTOP)


async def send(url: str) -> None:
    async with EddaApp("tally", url, worker=False, probe=_Stopper()) as app:
        await app.send_event("ready", "environments", {"run": 0})


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    match sys.argv[1:]:
        case ["work", url, direct, size]:
            asyncio.run(work(url, direct, int(size)))
        case ["send", url]:
            asyncio.run(send(url))
        case _:
            for name, figure in run().items():
                print(f"{name}: {figure}")
