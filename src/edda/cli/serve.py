"""`edda serve`: uvicorn with our limits."""

from __future__ import annotations

import signal
import socket
import sys
from typing import Any

import click
import uvicorn

from edda.cli.loading import load_options
from edda.web import WebOptions
from edda.web.hosts import is_loopback_name

_SETTINGS: dict[str, Any] = {
    "http": "edda.cli.connection:Connection",
    "ws": "none",
    "lifespan": "on",
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
    "h11_max_incomplete_event_size": 80 * 1024,
    "timeout_keep_alive": 15,
    "timeout_graceful_shutdown": 30,
}
_LIFESPAN_FAILED = 3
"""The exit code that uvicorn has for it."""


@click.command()
@click.argument("target", metavar="MODULE:APP")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes, each with a worker.")
def serve(target: str, host: str, port: int, workers: int) -> None:
    """Serve an app over HTTP until SIGTERM or Ctrl-C; requests and steps under way may finish."""
    options = load_options(target)
    _refuse_to_be_open(host, options)
    # uvicorn raises the signal once more after it has drained: that is no crash.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if workers > 1:
        _announce(host, port, options)
        uvicorn.run(target, host=host, port=port, workers=workers, **_SETTINGS)
    else:
        _serve_one(uvicorn.Config(target, host=host, port=port, **_SETTINGS), options)


def _refuse_to_be_open(host: str, options: WebOptions) -> None:
    if options.local_only and not is_loopback_name(host):
        raise click.UsageError(
            f"--host {host} can be reached by others, and there are no tokens: give EddaApp(tokens=...) or EDDA_TOKENS "
            '(name:scope+scope:secret,...), or EddaApp(auth="none") to serve everybody on purpose'
        )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, options: WebOptions) -> None:
        super().__init__(config)
        self._options = options

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            host, port, *_ = server.sockets[0].getsockname()
            _announce(host, port, self._options)


def _serve_one(config: uvicorn.Config, options: WebOptions) -> None:
    server = _Server(config, options)
    try:
        server.run()
    except KeyboardInterrupt:
        return  # drained, as with SIGTERM
    if not server.started:
        sys.exit(_LIFESPAN_FAILED)


def _announce(host: str, port: int, options: WebOptions) -> None:
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    token = "-H 'authorization: Bearer <token>' " if options.tokens else ""
    click.echo(f"edda listens on {address}", err=True)
    click.echo(
        f"send it an event: curl {address}/events {token}-H 'content-type: application/json' -H 'ce-specversion: 1.0' "
        "-H 'ce-id: 1' -H 'ce-source: /me' -H 'ce-type: order.created' -d '{}'",
        err=True,
    )
