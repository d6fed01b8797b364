"""The commands of `edda`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import click

from edda.app import EddaApp
from edda.cli.loading import load_app
from edda.cli.outbox import outbox
from edda.cli.serve import serve
from edda.databases import open_storage
from edda.errors import EddaError
from edda.version import __version__


@click.group()
@click.version_option(__version__, prog_name="edda")
def main() -> None:
    """Durable workflows on your own database."""


@main.command()
@click.option("--db", "url", envvar="EDDA_DB_URL", default="sqlite:///edda.db", show_default=True, help="Database URL.")
@click.option("--check", is_flag=True, help="Apply nothing; exit 1 if something is missing.")
def migrate(url: str, check: bool) -> None:
    """Bring the database's schema up to date."""
    try:
        names = asyncio.run(_migrate(url, check))
    except (EddaError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for name in names:
        click.echo(f"{'missing' if check else 'applied'} {name}")
    if not names:
        click.echo("the schema is up to date")
    sys.exit(1 if check and names else 0)


async def _migrate(url: str, check: bool) -> tuple[str, ...]:
    storage = open_storage(url)
    await storage.open()
    try:
        return await (storage.pending_migrations() if check else storage.migrate())
    finally:
        await storage.close()


@main.command()
@click.argument("target", metavar="MODULE:APP")
@click.option("--grace", type=float, default=None, help="Seconds that running steps get at SIGTERM.")
def worker(target: str, grace: float | None) -> None:
    """Run the worker of an app until SIGTERM or Ctrl-C; a second signal ends it at once."""
    try:
        asyncio.run(_work(load_app(target), grace))
    except EddaError as error:
        raise click.ClickException(str(error)) from error


async def _work(app: EddaApp, grace: float | None) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await app.initialize()
    click.echo(f"{app.service_name}: worker {os.getpid()} is running", err=True)
    await stop.wait()
    await app.shutdown(grace)


main.add_command(serve)
main.add_command(outbox)
