"""A failover to an asynchronous standby that had not got the last claims: every run completes, and none fails.

A primary and a streaming standby are started from the installed binaries. Replication is cut while forty runs are
stored and nobody has claimed them; the workers claim them on the primary, the standby is promoted, and all connections
are led to it, where nobody owns the runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import asyncpg

from edda import EddaApp, RunStatus, WorkflowContext, activity, sleep, workflow
from edda.engine.settings import Settings
from tests.servers import PATIENCE, _postgres_tools, folder_of_ours, free_port, identity, run_to_end

RUNS = 40
SETTINGS = Settings(lease=6.0, heartbeat=1.0, sweep=0.5, takeover_grace=1.0)

begun: dict[str, int] = {}
let_go = asyncio.Event()


@activity
async def failover_step(ctx: WorkflowContext, name: str) -> str:
    begun[name] = begun.get(name, 0) + 1
    if begun[name] == 1:  # as the first worker had it: it is slow, and another one is quicker
        await let_go.wait()
    return f"{name} done"


@workflow
async def failover_job(ctx: WorkflowContext, name: str) -> str:
    done = await failover_step(ctx, name)
    await sleep(ctx, 0.01)
    return await failover_step(ctx, done)


class Proxy:
    """Leads connections to a port, and then to another one."""

    def __init__(self, target: int) -> None:
        self._target: int | None = target
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def turn_to(self, target: int | None) -> None:
        """With None nobody is let through any more; whoever is connected is cut off."""
        self._target = target
        for writer in tuple(self._open):
            writer.transport.abort()

    async def close(self) -> None:
        self.turn_to(None)
        if self._server is not None:
            self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        with suppress(OSError):
            if self._target is not None:
                inner, outer = await asyncio.open_connection("127.0.0.1", self._target)
                self._open.add(outer)
                await asyncio.gather(_pump(reader, outer), _pump(inner, writer))
        writer.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()


class Server:
    """PostgreSQL in a folder of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.data = str(folder / "data")
        self.port = port
        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres"

    def start(self) -> None:
        settings = ["--listen_addresses=127.0.0.1", f"--port={self.port}", "--fsync=off", "--wal_level=replica"]
        command = [str(_postgres_tools() / "postgres"), "-D", self.data, "-k", str(self._folder), *settings]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log, **identity())

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(PATIENCE)
            self._process = None

    async def ask(self, sql: str) -> object:
        connection = await asyncpg.connect(self.url, timeout=5)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    async def until(self, sql: str, expected: object = True) -> None:
        give_up = time.monotonic() + PATIENCE
        while True:
            with suppress(OSError, asyncpg.PostgresError, TimeoutError):
                if await self.ask(sql) == expected:
                    return
            assert time.monotonic() < give_up, f"PostgreSQL on port {self.port}: {sql} is not {expected}"
            await asyncio.sleep(0.1)


async def _until(fact: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + 2 * PATIENCE
    while not fact():
        assert time.monotonic() < give_up, what
        await asyncio.sleep(0.02)


async def _fail_over() -> dict[str, object]:
    tools = _postgres_tools()
    primary, standby = Server(folder_of_ours(), free_port()), Server(folder_of_ours(), free_port())
    init = [str(tools / "initdb"), "-D", primary.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
    await asyncio.to_thread(run_to_end, Path(primary.data).parent, init)
    door, replication = Proxy(primary.port), Proxy(primary.port)
    apps: list[EddaApp] = []
    try:
        primary.start()
        await primary.until("SELECT true")
        await door.start()
        await replication.start()
        copy = f"host=127.0.0.1 port={replication.port} user=postgres"
        copying = [str(tools / "pg_basebackup"), "-D", standby.data, "-d", copy, "-R", "-X", "stream", "-c", "fast"]
        await asyncio.to_thread(run_to_end, Path(standby.data).parent, copying)
        os.chmod(standby.data, 0o700)
        standby.start()
        await standby.until("SELECT pg_is_in_recovery()")
        url = f"postgresql://postgres@127.0.0.1:{door.port}/postgres"
        make = partial(EddaApp, db_url=url, settings=SETTINGS, workflows=[failover_job])
        apps += [make("one"), make("two"), make("client", worker=False)]
        for app in apps:
            await app.initialize()
        client, before = apps[2], [app.engine.worker for app in apps[:2]]
        starts = [failover_job.options(id=f"job-{number}", delay=4.0) for number in range(RUNS)]
        run_ids = [await client.start(start, f"job{number}") for number, start in enumerate(starts)]
        lsn = await primary.ask("SELECT pg_current_wal_lsn()::text")
        await standby.until(f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'::pg_lsn")
        assert not begun, "a run was claimed before replication was cut"
        replication.turn_to(None)
        await _until(lambda: len(begun) == RUNS, "the runs are claimed on the primary")
        await standby.ask("SELECT pg_promote(true, 60)")
        await standby.until("SELECT pg_is_in_recovery()", False)
        unowned = await standby.ask("SELECT count(*) FROM edda_open_run WHERE owner IS NULL")
        assert unowned == RUNS, f"{unowned} of {RUNS} claims were lost, wanted all"
        door.turn_to(standby.port)
        primary.stop()
        since = time.monotonic()
        await asyncio.sleep(1.0)  # so that some are driven anew before the slow bodies of the first time end
        let_go.set()
        await _check(client, run_ids)
        anew = sum(app.engine.worker is not old for app, old in zip(apps, before, strict=False))
        assert anew, "no worker noticed that its claims were lost"
        return {
            "runs": RUNS,
            "claims lost": unowned,
            "completed": len(run_ids),
            "failed": 0,
            "seconds to the last end": round(time.monotonic() - since, 1),
            "workers that began anew": anew,
        }
    finally:
        for app in apps:
            app.kill()
        await door.close()
        await replication.close()
        standby.stop()
        primary.stop()


async def _check(client: EddaApp, run_ids: list[str]) -> None:
    for number, run_id in enumerate(run_ids):
        result = await client.handle(run_id).result(timeout=2 * PATIENCE)
        assert result == f"job{number} done done", f"run {run_id}: {result}"
        assert await client.handle(run_id).status() is RunStatus.COMPLETED
        seqs = [entry.seq for entry in await client.handle(run_id).history()]
        assert seqs == [1, 2, 3], f"run {run_id} has the history {seqs}"


def run() -> dict[str, object]:
    """Raises AssertionError on a violation."""
    return asyncio.run(_fail_over())


if __name__ == "__main__":
    print(run())
