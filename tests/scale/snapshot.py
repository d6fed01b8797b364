"""`python -m tests.scale.snapshot`: how much slower PostgreSQL finds the next run under one long open snapshot."""

from __future__ import annotations

import asyncio
import statistics
import time

import asyncpg
import click

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.databases import open_storage
from tests import databases

LOOKS = 50


@activity
async def note(ctx: WorkflowContext) -> int:
    return 1


@workflow
async def snapshot_run(ctx: WorkflowContext) -> int:
    return await note(ctx)


@click.command()
@click.option("--runs", type=int, default=24_000, show_default=True, help="That start and end under the snapshot.")
def main(runs: int) -> None:
    """Time the query for the first due run before, under and after an open snapshot."""
    server = databases.postgres()
    if server is None:
        raise click.ClickException("there is no server for postgres")
    url = server.create()
    try:
        asyncio.run(_measure(url, runs))
    finally:
        server.drop(url)


async def _measure(url: str, runs: int) -> None:
    connection = await asyncpg.connect(url)
    async with (
        EddaApp("snapshot worker", url, workflows=[snapshot_run]),
        EddaApp("snapshot client", url, workflows=[snapshot_run], worker=False) as app,
    ):
        await _run_many(app, 500)  # tables that were never used are faster than any later ones
        await connection.execute("VACUUM edda_open_run")
        click.echo(f"before the snapshot: {await _milliseconds(url):.2f} ms")
        held = await asyncpg.connect(url)
        async with held.transaction(isolation="repeatable_read"):
            await held.fetch("SELECT 1 FROM edda_run LIMIT 1")
            await _run_many(app, runs)
            click.echo(f"under it, after {runs:,} runs: {await _milliseconds(url):.2f} ms")
        await held.close()
        await connection.execute("VACUUM edda_open_run")
        click.echo(f"after it and a vacuum: {await _milliseconds(url):.2f} ms")
    await connection.close()


async def _run_many(app: EddaApp, runs: int) -> None:
    """Started by a process without a worker, so each run is in the index of unowned runs until it is claimed."""
    at_once = asyncio.Semaphore(200)

    async def run_one() -> None:
        async with at_once:
            await app.run(snapshot_run)

    await asyncio.gather(*(run_one() for _ in range(runs)))


async def _milliseconds(url: str) -> float:
    """The median of the query that each idle worker sends at every poll."""
    storage = open_storage(url)
    await storage.open()
    try:
        times = []
        for _ in range(LOOKS):
            began = time.perf_counter()
            await storage.next_due([snapshot_run.name])
            times.append((time.perf_counter() - began) * 1000)
        return statistics.median(times)
    finally:
        await storage.close()


if __name__ == "__main__":
    main()
