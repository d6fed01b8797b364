"""`edda worker`: an app's worker, without its HTTP side."""

from __future__ import annotations

import asyncio
import os

import click

from edda.app import EddaApp
from edda.cli.complaints import report_errors
from edda.cli.loading import load_app
from edda.cli.signals import stop_on_signal


@click.command()
@click.argument("target", metavar="MODULE:APP")
@click.option("--grace", type=float, default=None, help="Seconds that running steps get at SIGTERM.")
def worker(target: str, grace: float | None) -> None:
    """Run the worker of an app until SIGTERM or Ctrl-C; a second signal ends it at once."""
    app = load_app(target)
    with report_errors():
        asyncio.run(_work(app, grace))


async def _work(app: EddaApp, grace: float | None) -> None:
    stop = stop_on_signal()
    await app.initialize()
    click.echo(f"{app.service_name}: worker {os.getpid()} is running", err=True)
    await stop.wait()
    await app.shutdown(grace)
