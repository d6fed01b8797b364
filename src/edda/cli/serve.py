"""`edda serve`, `edda dev`, `edda viewer` and `edda worker`: commands that run until SIGTERM or Ctrl-C.

The commands import uvicorn when they run, because its import takes longer than all other commands need.
"""

from __future__ import annotations

import asyncio
import os
import signal
from types import FrameType

import click

from edda.app import EddaApp
from edda.web import WebOptions
from edda.web.access import is_loopback_name

from .target import database_option, load_app, load_options, open_database, report_errors

_HOST = "127.0.0.1"

_host = click.option("--host", default=_HOST, show_default=True, help="Address to listen on.")
_forwarded = click.option(
    "--forwarded-allow-ips",
    "proxies",
    envvar="FORWARDED_ALLOW_IPS",
    help="Addresses or networks of proxies whose X-Forwarded-For is trusted, separated by commas; * for all. "
    "Default: none.",
)
_connections = click.option(
    "--connections-per-address",
    "connections",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    envvar="EDDA_CONNECTIONS_PER_ADDRESS",
    help="Maximum of open connections from one address, except from --forwarded-allow-ips. 0: no limit.",
)
_port = click.option(
    "--port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="Port to listen on. 0: any free one."
)


@click.command()
@click.argument("target", metavar="MODULE:APP")
@_host
@_port
@click.option(
    "--workers", type=click.IntRange(1), default=1, show_default=True, help="Number of processes, each with a worker."
)
@_forwarded
@_connections
def serve(target: str, host: str, port: int, workers: int, proxies: str | None, connections: int) -> None:
    """Serve an app over HTTP until SIGTERM or Ctrl-C.

    Requests and steps in progress may finish; a second signal ends the process immediately.
    """
    options = load_options(target)
    _check_host(host, options)
    from . import uvicorn_server

    limits = uvicorn_server.ServerLimits(proxies, connections)
    if workers > 1:
        uvicorn_server.serve_workers(target, host, port, workers, options, limits)
    else:
        uvicorn_server.serve_one(target, host, port, options, limits)


@click.command()
@click.argument("target", metavar="MODULE:APP")
@_port
@click.option("--open/--no-open", "opened", default=True, help="Open the viewer in the browser, or do not.")
def dev(target: str, port: int, opened: bool) -> None:
    """Serve an app, and restart it when its code changes.

    Listens on this machine only, and opens the viewer in the browser.
    """
    options = load_options(target)
    from . import uvicorn_server

    uvicorn_server.serve_with_reload(target, _HOST, port, options, opened=opened)


@click.command()
@database_option
@_host
@_port
@_forwarded
@_connections
@click.option("--read-only", is_flag=True, help="Allow no changes.")
@click.option("--open/--no-open", "opened", default=False, help="Open the viewer in the browser, or do not.")
def viewer(
    url: str, host: str, port: int, proxies: str | None, connections: int, read_only: bool, opened: bool
) -> None:
    """Serve the viewer on a database.

    The workers run elsewhere: this command has no code and cannot start runs.
    """
    with report_errors():
        app = open_database(url, web=WebOptions(read_only=read_only))
    _check_host(host, app.web_options)
    from . import uvicorn_server

    uvicorn_server.serve_one(
        app, host, port, app.web_options, uvicorn_server.ServerLimits(proxies, connections), opened=opened
    )


def _check_host(host: str, options: WebOptions) -> None:
    if options.local_only and not is_loopback_name(host):
        raise click.UsageError(
            f"--host {host}: other machines can reach this address, so the app needs tokens: pass EddaApp(tokens=...) "
            "or set EDDA_TOKENS (name:scope+scope:secret,...). To allow all requests without a token, pass "
            'EddaApp(auth="none")'
        )


@click.command()
@click.argument("target", metavar="MODULE:APP")
@click.option("--grace", type=click.FloatRange(0), help="Seconds that running steps get at SIGTERM.")
def worker(target: str, grace: float | None) -> None:
    """Run the worker of an app until SIGTERM or Ctrl-C.

    A second signal ends the process immediately.
    """
    app = load_app(target)
    with report_errors():
        asyncio.run(_work(app, grace))


async def _work(app: EddaApp, grace: float | None) -> None:
    stop = stop_on_signal()
    await app.initialize()
    click.echo(f"{app.service_name}: worker {os.getpid()} is running", err=True)
    await stop.wait()
    await app.shutdown(grace)


def stop_on_signal() -> asyncio.Event:
    """An event that SIGTERM or Ctrl-C sets; a second signal ends the process, even while a step blocks the event loop.

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
