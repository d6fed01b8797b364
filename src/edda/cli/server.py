"""uvicorn with our limits, and processes that end when they are told to twice or when their parent has died."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import webbrowser
from dataclasses import dataclass
from types import FrameType
from typing import Any

import click
import httpx2
import uvicorn
from uvicorn.supervisors import ChangeReload
from uvicorn.supervisors.multiprocess import Multiprocess

from edda.app import EddaApp
from edda.cli.connection import MOST_PER_ADDRESS, PER_ADDRESS
from edda.web import WebOptions

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
_ENDED_AT_ONCE = 1
_PATIENCE = 60.0
"""Seconds until nobody waits for the page any more."""


@dataclass(frozen=True)
class Limits:
    """Who is believed, and how many connections one address may have."""

    proxies: str | None = None
    """uvicorn by itself believes the X-Forwarded-For of everything on this machine; here a proxy has to be named."""
    connections: int = MOST_PER_ADDRESS

    def settings(self) -> dict[str, Any]:
        os.environ[PER_ADDRESS] = str(self.connections)
        return {**_SETTINGS, "proxy_headers": bool(self.proxies), "forwarded_allow_ips": self.proxies or ""}


def serve_workers(target: str, host: str, port: int, workers: int, options: WebOptions, limits: Limits) -> None:
    _exit_zero_on_sigterm()
    _announce(_address(host, port), options)
    config = _Config(target, host=host, port=port, workers=workers, **limits.settings())
    _Supervisor(config, sockets=[config.bind_socket()]).run()


def serve_one(
    app: str | EddaApp, host: str, port: int, options: WebOptions, limits: Limits, *, opened: bool = False
) -> None:
    _exit_zero_on_sigterm()
    server = _AnnouncedServer(_Config(app, host=host, port=port, **limits.settings()), options, opened)
    try:
        server.run()
    except KeyboardInterrupt:
        return  # drained, as with SIGTERM
    if not server.started:
        sys.exit(_LIFESPAN_FAILED)


def serve_with_reload(target: str, host: str, port: int, options: WebOptions, *, opened: bool) -> None:
    """In a process of its own, that is replaced whenever a file below this folder changes."""
    config = _Config(target, host=host, port=port, reload=True, **Limits().settings())
    listening = config.bind_socket()
    address = _address(host, listening.getsockname()[1])
    _announce(address, options)
    if opened:
        _open_page(address)
    ChangeReload(config, target=_Server(config).run, sockets=[listening]).run()


def _exit_zero_on_sigterm() -> None:
    """uvicorn raises the signal once more after it has drained: that is no crash."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


class _Config(uvicorn.Config):
    def load(self) -> None:
        """Called once in each process that serves."""
        threading.Thread(target=_stop_with_parent, name="edda-parent", daemon=True).start()
        super().load()


def _stop_with_parent() -> None:
    """Drains the server when the process that started it has died without telling it, as with SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    multiprocessing.connection.wait([parent.sentinel])
    click.echo(f"edda: parent process {parent.pid} has ended, process {os.getpid()} stops", err=True)
    os.kill(os.getpid(), signal.SIGTERM)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Python calls this in the main thread even while a step blocks the event loop.

        The same signal has to come twice: Ctrl-C reaches the children of `--workers` as SIGINT from the terminal and
        then as SIGTERM from their parent, and that is one request.
        """
        if sig in self._captured_signals:
            os._exit(_ENDED_AT_ONCE)
        super().handle_exit(sig, frame)


class _Supervisor(Multiprocess):
    """The parent of `--workers`: starts the serving processes, and replaces one that dies or does not answer."""

    def join_all(self) -> None:
        """A second SIGTERM or Ctrl-C while the children drain kills them."""
        while any(child.process.is_alive() for child in self.processes):
            if {signal.SIGTERM, signal.SIGINT} & {*self.signal_queue}:
                for child in self.processes:
                    child.process.kill()
                sys.exit(_ENDED_AT_ONCE)
            time.sleep(0.05)
        super().join_all()


class _AnnouncedServer(_Server):
    def __init__(self, config: uvicorn.Config, options: WebOptions, opened: bool) -> None:
        super().__init__(config)
        self._options = options
        self._opened = opened

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            address = _address(*server.sockets[0].getsockname()[:2])
            _announce(address, self._options)
            if self._opened:
                _open_page(address)


def _address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _announce(address: str, options: WebOptions) -> None:
    token = "-H 'authorization: Bearer <token>' " if options.tokens else ""
    click.echo(f"edda listens on {address}", err=True)
    click.echo(f"its page is {address}/_edda/", err=True)
    click.echo(
        f"send it an event: curl {address}/events {token}-H 'content-type: application/json' -H 'ce-specversion: 1.0' "
        "-H 'ce-id: 1' -H 'ce-source: /me' -H 'ce-type: order.created' -d '{}'",
        err=True,
    )


def _open_page(address: str) -> None:
    threading.Thread(target=_open_when_ready, args=(address,), daemon=True).start()


def _open_when_ready(address: str) -> None:
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:
        try:
            httpx2.get(f"{address}/_edda/livez", trust_env=False)
        except httpx2.TransportError:  # nobody listens yet
            time.sleep(0.1)
        else:
            webbrowser.open(f"{address}/_edda/")
            return
