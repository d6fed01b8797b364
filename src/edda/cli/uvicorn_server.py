"""A connection of uvicorn's with the limits that uvicorn does not have: for the size and the time of headers, for a
client that does not read its answers, and for how many connections one address may have.

Works on whichever of its two protocols is installed: it only looks at what both have.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import struct
import sys
import threading
import time
import webbrowser
from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import click
import httpx2
import uvicorn
from uvicorn.lifespan.on import LifespanOn, LifespanSendMessage
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.supervisors import ChangeReload
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from edda.app import EddaApp
from edda.web import WebOptions

from .output import strip_control

SECONDS = 15.0
"""For the headers of a request, and for the rest of a body that was answered before its end."""
MOST_BYTES = 80 * 1024
"""A little over what the application allows, so that it is the one who says so."""

WRITE_SECONDS = 30.0
"""For which a client may leave unread what was written to it."""
PER_ADDRESS = "EDDA_CONNECTIONS_PER_ADDRESS"
"""In the environment, since uvicorn starts several processes anew: open connections of one address; 0 for no limit."""
MOST_PER_ADDRESS = 200

_AT_ONCE = struct.pack("ii", 1, 0)
"""`SO_LINGER` with no seconds: the connection ends with a reset."""

logger = logging.getLogger("edda.web")

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nretry-after: 5\r\nconnection: close\r\n\r\n"

_open: Counter[str] = Counter()
"""Connections of this process by the address of the other side."""
_told: set[str] = set()
"""Addresses that had too many, until they have none."""


if TYPE_CHECKING:

    class _Protocol(asyncio.Protocol):
        """What both of uvicorn's have."""

        config: Any

        def shutdown(self) -> None: ...

else:
    _Protocol = asyncio.Protocol


class _OpenOnly:
    """A transport that drops what is written after its end.

    uvicorn goes on answering the first of several pipelined requests when the client has gone. uvloop raises then, and
    uvicorn logs a traceback for each connection; asyncio logs a line for each write.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class HeaderLimitProtocol(_Protocol):
    """In front of a protocol of uvicorn's, whose attributes these are."""

    transport: asyncio.Transport
    cycle: Any
    _size = 0
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    """Runs while the client does not read what is written to it."""
    _watch: asyncio.TimerHandle | None = None
    _left = 0
    """Bytes that a closing connection had to write when `_look` last looked."""
    _address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", _OpenOnly(transport)))
        self._watch = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._look)
        if self._is_one_too_many():
            self._close(_TOO_MANY)
        else:
            self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._rest()
        else:
            self._expect()
            self._count(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        for timer in (self._unread, self._watch):
            if timer is not None:
                timer.cancel()
        if self._address:
            _open[self._address] -= 1
            if not _open[self._address]:
                del _open[self._address]
                _told.discard(self._address)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _unsupported_upgrade_warning(self) -> None:
        """Of uvicorn, with two lines for each request that asks for it: those are answered as if they had not asked."""

    def _look(self) -> None:
        """`transport.close()` waits for what is still to be written, for ever if the client reads nothing."""
        left = self.transport.get_write_buffer_size() if self.transport.is_closing() else 0
        if left and left == self._left:
            self._abort()
        else:
            self._left = left
            self._watch = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._look)

    def _abort(self) -> None:
        logger.debug("a client did not read its answer for %g seconds; its connection is closed", WRITE_SECONDS)
        channel = self.transport.get_extra_info("socket")
        if channel is not None and channel.family != socket.AF_UNIX:
            # Else the kernel keeps what was not read, megabytes for each connection, and offers it for minutes.
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _is_one_too_many(self) -> bool:
        """Proxies that are trusted have as many as they like: whose they are is known from what they say."""
        peer = self.transport.get_extra_info("peername")
        most = int(os.environ.get(PER_ADDRESS) or MOST_PER_ADDRESS)
        if not most or not isinstance(peer, tuple) or _is_trusted(peer[0], self.config):
            return False
        self._address = peer[0]
        _open[self._address] += 1
        if _open[self._address] <= most:
            return False
        if self._address not in _told:  # not for each of them: it may be many a second
            _told.add(self._address)
            logger.warning("%s has %d connections open, more are refused (--connections-per-address)", peer[0], most)
        return True

    def shutdown(self) -> None:
        """The server stops: answers may be finished, but a stream has no end, and would keep it from stopping."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
        else:
            super().shutdown()

    def _expect(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self._give_up)

    def _rest(self) -> None:
        self._size = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, size: int) -> None:
        if self.cycle is not None and self.cycle.more_body:
            return  # the rest of a body that nobody reads; closing now would destroy its answer on the way
        self._size += size
        if self._size > MOST_BYTES:
            self._close(_TOO_LARGE)

    def _give_up(self) -> None:
        self._close(_TOO_SLOW if self._size else b"")  # whoever has said nothing is told nothing

    def _close(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()


def _is_trusted(address: str, config: Any) -> bool:
    if not config.proxy_headers:
        return False
    named = config.forwarded_allow_ips
    parts = [part.strip() for part in (named.split(",") if isinstance(named, str) else named)]
    return any(part == "*" or _is_in(address, part) for part in parts if part)


def _is_in(address: str, network: str) -> bool:
    try:
        return ip_address(address) in ip_network(network, strict=False)
    except ValueError:  # a name, or an address of the other family
        return address == network


Connection: type[asyncio.Protocol] = type("Connection", (HeaderLimitProtocol, AutoHTTPProtocol), {})


_SETTINGS: dict[str, Any] = {
    "http": "edda.cli.uvicorn_server:Connection",
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
