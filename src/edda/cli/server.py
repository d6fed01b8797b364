"""uvicorn with our limits, and processes that end when they are told to twice or when their parent has died."""

from __future__ import annotations

import errno
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
from uvicorn.lifespan.on import LifespanOn, LifespanSendMessage
from uvicorn.supervisors import ChangeReload
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from edda.app import EddaApp
from edda.cli.connection import MOST_PER_ADDRESS, PER_ADDRESS
from edda.cli.terminal import strip_control
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
_STARTUP_FAILED = 3
"""The exit code of uvicorn when the app does not start."""
_FAILED = 1
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
    config = _Config(target, host=host, port=port, workers=workers, **limits.settings())
    supervisor = _Supervisor(config, _bind(host, port), options)
    supervisor.run()
    if any(child.process.exitcode == _STARTUP_FAILED for child in supervisor.processes):
        sys.exit(_FAILED)


def serve_one(
    app: str | EddaApp, host: str, port: int, options: WebOptions, limits: Limits, *, opened: bool = False
) -> None:
    _exit_zero_on_sigterm()
    server = _AnnouncedServer(_Config(app, host=host, port=port, **limits.settings()), options, opened)
    try:
        server.run(_bind(host, port))
    except KeyboardInterrupt:
        return  # drained, as with SIGTERM
    except SystemExit as end:
        sys.exit(_FAILED if end.code == _STARTUP_FAILED else end.code)
    if not server.started:
        sys.exit(_FAILED)


def serve_with_reload(target: str, host: str, port: int, options: WebOptions, *, opened: bool) -> None:
    """In a process of its own, that is replaced whenever a file below this folder changes."""
    config = _Config(target, host=host, port=port, reload=True, **Limits().settings())
    sockets = _bind(host, port)
    address = _address(sockets[0])
    _announce(address, options)
    if opened:
        _open_page(address)
    ChangeReload(config, target=_Server(config).run, sockets=sockets).run()


def _bind(host: str, port: int) -> list[socket.socket]:
    """One for each address of the host. Nothing listens yet: the app starts first, if the port can be had at all."""
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # the IPv4 addresses have their own
            try:
                one.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or not bound:  # such as ::1 of localhost without IPv6
                    raise
                one.close()
                continue
            one.set_inheritable(True)
            bound.append(one)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return bound


def _exit_zero_on_sigterm() -> None:
    """uvicorn raises the signal once more after it has drained: that is no crash."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


class _Config(uvicorn.Config):
    def load(self) -> None:
        """Called once in each process that serves."""
        threading.Thread(target=_stop_with_parent, name="edda-parent", daemon=True).start()
        super().load()
        self.lifespan_class = _Lifespan


class _Lifespan(LifespanOn):
    async def send(self, message: LifespanSendMessage) -> None:
        """Why the app does not start is told in one line, as by the other commands."""
        if message["type"] == "lifespan.startup.failed":
            click.echo(f"Error: {strip_control(' '.join(message.get('message', '').split()))}", err=True)
            self.logger.disabled = True  # uvicorn would say it again, and the process ends
        await super().send(message)


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
            os._exit(_FAILED)
        super().handle_exit(sig, frame)


class _Supervisor(Multiprocess):
    """The parent of `--workers`: starts the serving processes, and replaces one that dies or does not answer."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], options: WebOptions) -> None:
        super().__init__(config, sockets)
        self._options = options

    def init_processes(self) -> None:
        """The first one alone: what keeps the app from starting is told once, and all ends before more are started."""
        first = self._add_process()
        while not _listens(self.sockets[0]):
            if not first.process.is_alive():
                sys.exit(_FAILED)
            self.handle_signals()
            if self.should_exit.is_set():
                return
            time.sleep(0.05)
        _announce(_address(self.sockets[0]), self._options)
        for _ in range(1, self.processes_num):
            self._add_process()

    def _add_process(self) -> Process:
        child = Process(self.config, self.sockets)
        child.start()
        self.processes.append(child)
        return child

    def join_all(self) -> None:
        """A second SIGTERM or Ctrl-C while the children drain kills them."""
        while any(child.process.is_alive() for child in self.processes):
            if {signal.SIGTERM, signal.SIGINT} & {*self.signal_queue}:
                for child in self.processes:
                    child.process.kill()
                sys.exit(_FAILED)
            time.sleep(0.05)
        super().join_all()


class _AnnouncedServer(_Server):
    def __init__(self, config: uvicorn.Config, options: WebOptions, opened: bool) -> None:
        super().__init__(config)
        self._options = options
        self._opened = opened

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        address = _address(sockets[0])
        _announce(address, self._options)
        if self._opened:
            _open_page(address)


def _listens(bound: socket.socket) -> bool:
    with socket.socket(bound.family) as probe:
        return probe.connect_ex(bound.getsockname()) == 0


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
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
