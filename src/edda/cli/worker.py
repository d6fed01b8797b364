"""`edda worker`, and stopping a command by SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
from types import FrameType

import click

from edda.app import EddaApp

from .errors import report_errors
from .target import load_app


def stop_on_signal() -> asyncio.Event:
    """Set by SIGTERM or Ctrl-C; a second one ends the process at once, also while a step blocks the event loop.

    `loop.add_signal_handler` would call back in the loop, so a blocked loop would ignore both signals.
    """
    stop, loop, count = asyncio.Event(), asyncio.get_running_loop(), 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(1)
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop


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
