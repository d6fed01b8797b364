"""`python -m tests.scale`: how long each page takes when there is a lot, and what open pages cost."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import click

from edda.databases import open_storage
from edda.storage.ports import Storage
from tests import databases

from .idle import Idleness, measure_idleness
from .seeds import statements
from .timings import Timing, time_pages, time_storage

KINDS = ("postgres", "mysql", "sqlite")


@click.command()
@click.option("--database", type=click.Choice(KINDS), default="postgres", show_default=True)
@click.option("--runs", type=int, default=1_000_000, show_default=True, help="That have ended.")
@click.option("--waiting", type=int, default=100_000, show_default=True)
@click.option("--tries", type=int, default=20, show_default=True)
@click.option("--limit", type=float, default=200.0, show_default=True, help="Milliseconds that a median may take.")
@click.option("--idle", is_flag=True, help="Measure what open pages cost while nothing happens, and nothing else.")
@click.option("--open-pages", type=int, default=10, show_default=True)
@click.option("--seconds", type=float, default=20.0, show_default=True, help="How long to watch the server's CPU.")
@click.option(
    "--share", type=float, default=1.0, show_default=True, help="Percent of a core that an open page may cost."
)
@click.option("--url", help="Of a database that was filled before (and is kept).")
@click.option("--keep", is_flag=True, help="Do not drop the database.")
def main(
    database: str,
    runs: int,
    waiting: int,
    tries: int,
    limit: float,
    idle: bool,
    open_pages: int,
    seconds: float,
    share: float,
    url: str | None,
    keep: bool,
) -> None:
    """Fill a database, serve it, open every page, and fail if a median is above the limit."""
    with _filled(database, runs, waiting, url, keep) as address:
        if idle:
            is_good = _show_idleness(asyncio.run(measure_idleness(address, open_pages, seconds)), share)
        else:
            asked = _show("storage", asyncio.run(_time_storage(address, tries)), limit)
            opened = _show("pages, over HTTP", asyncio.run(time_pages(address, tries)), limit)
            is_good = asked and opened
    sys.exit(0 if is_good else 1)


def _show(title: str, timings: Sequence[Timing], limit: float) -> bool:
    click.echo(f"{title:45} {'median ms':>9} {'worst ms':>9}")
    for timing in timings:
        slow = "SLOW" if timing.median > limit else ""
        click.echo(f"{timing.name:45} {timing.median:9.1f} {timing.worst:9.1f} {slow}")
    return all(timing.median <= limit for timing in timings)


def _show_idleness(found: Idleness, share: float) -> bool:
    click.echo(f"CPU of the server without pages {found.alone:6.2f} % of a core")
    click.echo(f"with {found.pages} open pages {found.watched:17.2f} %")
    click.echo(f"each open page {found.each:22.2f} % {'TOO MUCH' if found.each >= share else ''}")
    return found.each < share


@contextmanager
def _filled(database: str, runs: int, waiting: int, url: str | None, keep: bool) -> Iterator[str]:
    if url:
        yield url
    elif database == "sqlite":
        with _filled_file(statements(database, runs, waiting), keep) as address:
            yield address
    else:
        server = databases.postgres() if database == "postgres" else databases.mysql()
        if server is None:
            raise click.ClickException(f"there is no server for {database}")
        with _filled_database(server, statements(database, runs, waiting), keep) as address:
            yield address


@contextmanager
def _filled_database(server: databases.Server, filling: Iterator[str], keep: bool) -> Iterator[str]:
    address = server.create()
    click.echo(f"filling {address}", err=True)
    try:
        server.hasten(address)
        asyncio.run(_migrate(address))
        for statement in filling:
            server.execute(statement, address)
        yield address
    finally:
        if not keep:
            server.drop(address)


@contextmanager
def _filled_file(filling: Iterator[str], keep: bool) -> Iterator[str]:
    path = Path(tempfile.mkdtemp(prefix="edda_scale_"), "scale.db")
    address = f"sqlite:///{path}"
    click.echo(f"filling {address}", err=True)
    try:
        asyncio.run(_migrate(address))
        with closing(sqlite3.connect(path)) as connection:
            for statement in filling:
                connection.execute(statement)
            connection.commit()
        yield address
    finally:
        if not keep:
            shutil.rmtree(path.parent)


async def _migrate(url: str) -> None:
    async with _opened(url) as storage:
        await storage.migrate()


async def _time_storage(url: str, tries: int) -> list[Timing]:
    async with _opened(url) as storage:
        return await time_storage(storage, tries)


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Storage]:
    storage = open_storage(url)
    await storage.open()
    yield storage
    await storage.close()


if __name__ == "__main__":
    main()
