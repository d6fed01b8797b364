"""`python -m tests.scale`: how long each page takes when there is a lot."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from statistics import median

import click
from msgspec import Struct

from edda.databases import open_storage
from edda.errors import StorageUnavailableError
from edda.storage.ports import Storage
from tests import databases

from .questions import UNINDEXED, Question, questions
from .seeds import statements

KINDS = ("postgres", "mysql")


class Timing(Struct, frozen=True):
    name: str
    median: float
    p95: float


@click.command()
@click.option("--database", type=click.Choice(KINDS), default="postgres", show_default=True)
@click.option("--runs", type=int, default=1_000_000, show_default=True, help="That have ended.")
@click.option("--waiting", type=int, default=100_000, show_default=True)
@click.option("--tries", type=int, default=20, show_default=True)
@click.option("--limit", type=float, default=200.0, show_default=True, help="Milliseconds that a median may take.")
@click.option("--url", help="Of a database that was filled before (and is kept).")
@click.option("--keep", is_flag=True, help="Do not drop the database.")
def main(database: str, runs: int, waiting: int, tries: int, limit: float, url: str | None, keep: bool) -> None:
    """Fill a database, ask everything that pages ask, and fail if a median is above the limit."""
    with _filled(database, runs, waiting, url, keep) as address:
        timings = asyncio.run(_measure(address, tries))
    slow = [timing for timing in timings if timing.median > limit and timing.name not in UNINDEXED]
    click.echo(f"{'':45} {'median ms':>9} {'p95 ms':>9}")
    for timing in timings:
        click.echo(f"{timing.name:45} {timing.median:9.1f} {timing.p95:9.1f} {'SLOW' if timing in slow else ''}")
    sys.exit(1 if slow else 0)


@contextmanager
def _filled(database: str, runs: int, waiting: int, url: str | None, keep: bool) -> Iterator[str]:
    if url:
        yield url
        return
    server = databases.postgres() if database == "postgres" else databases.mysql()
    if server is None:
        raise click.ClickException(f"there is no server for {database}")
    address = server.create()
    click.echo(f"filling {address}", err=True)
    try:
        server.hasten(address)
        asyncio.run(_migrate(address))
        for statement in statements(database, runs, waiting):
            server.execute(statement, address)
        yield address
    finally:
        if not keep:
            server.drop(address)


async def _migrate(url: str) -> None:
    async with _opened(url) as storage:
        await storage.migrate()


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Storage]:
    storage = open_storage(url)
    await storage.open()
    yield storage
    await storage.close()


async def _measure(url: str, tries: int) -> list[Timing]:
    async with _opened(url) as storage:
        return [await _time(name, ask, tries) for name, ask in (await questions(storage)).items()]


async def _time(name: str, ask: Question, tries: int) -> Timing:
    await _ask(ask)  # the first one also connects, and brings in what the others find in memory
    taken = sorted([await _ask(ask) for _ in range(tries)])
    return Timing(name, median(taken), taken[int(tries * 0.95) - 1])


async def _ask(ask: Question) -> float:
    begin = time.perf_counter()
    try:
        await ask()
    except StorageUnavailableError:  # given up by the server
        return math.inf
    return (time.perf_counter() - begin) * 1000


if __name__ == "__main__":
    main()
