"""Runs an app with uvicorn: in this process, in several, or in one that restarts when the code changes."""

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
from edda.web import WebOptions

from .output import single_line
from .uvicorn_connection import MAX_PER_ADDRESS, PER_ADDRESS

_SETTINGS: dict[str, Any] = {
    "http": "edda.cli.uvicorn_connection:LimitedConnection",
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
"""uvicorn's exit code if the app does not start."""
_FAILED = 1
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_OPEN_TIMEOUT = 60.0
"""Seconds until `_open_viewer` no longer tries to open the viewer."""


@dataclass(frozen=True)
class ServerLimits:
    """Trusted proxies, and the number of connections per address."""

    proxies: str | None = None
    """None trusts no proxy; uvicorn's default would trust the X-Forwarded-For of every client on this machine."""
    connections: int = MAX_PER_ADDRESS

    def settings(self) -> dict[str, Any]:
        os.environ[PER_ADDRESS] = str(self.connections)
        return {**_SETTINGS, "proxy_headers": bool(self.proxies), "forwarded_allow_ips": self.proxies or ""}


def serve_workers(target: str, host: str, port: int, workers: int, options: WebOptions, limits: ServerLimits) -> None:
    _exit_zero_on_sigterm()
    config = _Config(target, host=host, port=port, workers=workers, **limits.settings())
    supervisor = _Supervisor(config, _bind(host, port), options)
    supervisor.run()
    if any(child.process.exitcode == _STARTUP_FAILED for child in supervisor.processes):
        sys.exit(_FAILED)


def serve_one(
    app: str | EddaApp, host: str, port: int, options: WebOptions, limits: ServerLimits, *, opened: bool = False
) -> None:
    _exit_zero_on_sigterm()
    server = _ForegroundServer(_Config(app, host=host, port=port, **limits.settings()), options, opened)
    try:
        server.run(_bind(host, port))
    except KeyboardInterrupt:
        return  # uvicorn has drained, as after SIGTERM
    except SystemExit as end:
        sys.exit(_FAILED if end.code == _STARTUP_FAILED else end.code)
    if not server.started:
        sys.exit(_FAILED)


def serve_with_reload(target: str, host: str, port: int, options: WebOptions, *, opened: bool) -> None:
    """Serves in a child process, which is replaced when a file below the current folder changes."""
    config = _Config(target, host=host, port=port, reload=True, **ServerLimits().settings())
    sockets = _bind(host, port)
    address = _address(sockets[0])
    _print_address(address, options)
    if opened:
        _open_viewer(address)
    ChangeReload(config, target=_Server(config).run, sockets=sockets).run()


def _bind(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of the host. uvicorn listens on them after the app has started, so a port in use is
    reported first."""
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 addresses have sockets of their own
            try:
                one.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or not bound:  # localhost may name ::1 on a machine without IPv6
                    raise
                one.close()
                continue
            one.set_inheritable(True)
            bound.append(one)
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another --port or --host"
        ) from error
    return bound


def _exit_zero_on_sigterm() -> None:
    """uvicorn raises the signal again after it has drained, which would look like a crash."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


class _Config(uvicorn.Config):
    def load(self) -> None:
        """Called once in each serving process."""
        threading.Thread(target=_stop_with_parent, name="edda-parent", daemon=True).start()
        super().load()
        self.lifespan_class = _Lifespan


class _Lifespan(LifespanOn):
    async def send(self, message: LifespanSendMessage) -> None:
        """Prints the error of a failed start in one line, like the other commands."""
        if message["type"] == "lifespan.startup.failed":
            click.echo(f"Error: {single_line(message.get('message', ''))}", err=True)
            self.logger.disabled = True  # uvicorn would log it again
        await super().send(message)


def _stop_with_parent() -> None:
    """Drains the server when its parent process has died without a signal to it, as after SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    multiprocessing.connection.wait([parent.sentinel])
    click.echo(f"edda: parent process {parent.pid} has ended, stopping process {os.getpid()}", err=True)
    os.kill(os.getpid(), signal.SIGTERM)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second signal of a kind ends the process: Python calls this even while a step blocks the event loop.

        One SIGINT and one SIGTERM count as one request: Ctrl-C reaches the children of `--workers` as SIGINT from the
        terminal, then as SIGTERM from their parent.
        """
        if sig in self._captured_signals:
            os._exit(_FAILED)
        super().handle_exit(sig, frame)


class _Supervisor(Multiprocess):
    """The parent process of `--workers`: starts the serving processes, and replaces one that dies or hangs."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], options: WebOptions) -> None:
        super().__init__(config, sockets)
        self._options = options

    def init_processes(self) -> None:
        """Starts the first process alone: if the app does not start, its error is printed once and no other starts."""
        first = self._add_process()
        while not self._is_listening():
            if not first.process.is_alive():
                sys.exit(_FAILED)
            self.handle_signals()
            if self.should_exit.is_set():
                return
            time.sleep(0.05)
        _print_address(_address(self.sockets[0]), self._options)
        for _ in range(1, self.processes_num):
            self._add_process()

    def _is_listening(self) -> bool:
        with socket.socket(self.sockets[0].family) as probe:
            return probe.connect_ex(self.sockets[0].getsockname()) == 0

    def _add_process(self) -> Process:
        child = Process(self.config, self.sockets)
        child.start()
        self.processes.append(child)
        return child

    def handle_signals(self) -> None:
        """A second SIGTERM or Ctrl-C in the queue kills the children: uvicorn would handle both as one."""
        is_repeated = len([number for number in self.signal_queue if number in _STOP_SIGNALS]) > 1
        super().handle_signals()
        if is_repeated:
            self._kill_children()

    def join_all(self) -> None:
        """A second SIGTERM or Ctrl-C while the children drain kills them."""
        while any(child.process.is_alive() for child in self.processes):
            if _STOP_SIGNALS & {*self.signal_queue}:
                self._kill_children()
            time.sleep(0.05)
        super().join_all()

    def _kill_children(self) -> None:
        for child in self.processes:
            child.process.kill()
        sys.exit(_FAILED)


class _ForegroundServer(_Server):
    def __init__(self, config: uvicorn.Config, options: WebOptions, opened: bool) -> None:
        super().__init__(config)
        self._options = options
        self._opened = opened

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        address = _address(sockets[0])
        _print_address(address, self._options)
        if self._opened:
            _open_viewer(address)


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _print_address(address: str, options: WebOptions) -> None:
    token = "-H 'authorization: Bearer <token>' " if options.tokens else ""
    click.echo(f"edda listens on {address}", err=True)
    click.echo(f"viewer: {address}/_edda/", err=True)
    click.echo(
        f"send an event: curl {address}/events {token}-H 'content-type: application/json' -H 'ce-specversion: 1.0' "
        "-H 'ce-id: 1' -H 'ce-source: /me' -H 'ce-type: order.created' -d '{}'",
        err=True,
    )


def _open_viewer(address: str) -> None:
    def open_when_ready() -> None:
        deadline = time.monotonic() + _OPEN_TIMEOUT
        while time.monotonic() < deadline:
            try:
                httpx2.get(f"{address}/_edda/livez", trust_env=False)
            except httpx2.TransportError:  # not listening yet
                time.sleep(0.1)
            else:
                webbrowser.open(f"{address}/_edda/")
                return

    threading.Thread(target=open_when_ready, daemon=True).start()
