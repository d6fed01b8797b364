"""Connections of `edda serve`: time-outs and limits that uvicorn lacks."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edda.cli import uvicorn_connection
from edda.cli.uvicorn_server import ServerLimits
from edda.web import WebApp, WebOptions
from tests.engine.conditions import until

from .fakes import FakeService
from .servers import TIMEOUT, serving
from .test_abuse import LASTING

PROTOCOLS: dict[str, type[asyncio.Protocol]] = {"h11": H11Protocol, "httptools": HttpToolsProtocol}
START = b"GET /_edda/livez HTTP/1.1\r\nHost: localhost\r\n"
LARGE = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"


@pytest.fixture(params=PROTOCOLS)
async def port(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, service: FakeService
) -> AsyncIterator[int]:
    """A server with short time-outs."""
    monkeypatch.setattr(uvicorn_connection, "SECONDS", 0.3)
    monkeypatch.setattr(uvicorn_connection, "WRITE_SECONDS", 0.3)
    monkeypatch.setenv(uvicorn_connection.PER_ADDRESS, "20")
    protocol = type("Connection", (uvicorn_connection.HeaderLimitProtocol, PROTOCOLS[request.param]), {})
    app = WebApp(service, WebOptions(write_timeout=3600.0))  # the limit of the connection, not that of the application
    config = uvicorn.Config(app, port=0, http=protocol, log_level="critical", lifespan="off", proxy_headers=False)
    server = Server(config)
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(TIMEOUT):
        await server.listens.wait()
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


async def exchange(port: int, *parts: bytes) -> bytes:
    """Everything that the server sends until it disconnects; the client never does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(TIMEOUT):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_headers_that_never_end_time_out(port: int) -> None:
    assert (await exchange(port, START)).startswith(b"HTTP/1.1 408 ")


async def test_a_silent_client_is_disconnected_without_a_response(port: int) -> None:
    assert await exchange(port) == b""


async def test_the_headers_of_a_second_request_time_out_too(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(TIMEOUT):
        writer.write(START + b"\r\n")
        assert b'{"status":"ok"}' in await reader.readuntil(b"}")
        writer.write(START)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_endless_headers_are_refused_at_their_limit(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(START)
    sent = 0
    async with asyncio.timeout(TIMEOUT):
        while not reader.at_eof() and not writer.is_closing() and sent < 10_000_000:
            writer.write(b"x-more: " + b"x" * 8000 + b"\r\n")
            sent += 8000
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
    writer.close()
    assert sent < 10_000_000


async def test_the_rest_of_a_refused_body_is_read_for_a_while_so_that_the_response_arrives(port: int) -> None:
    answer = await exchange(port, LARGE, *[b"x" * 65536] * 20)
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_request_in_progress_does_not_time_out(port: int, service: FakeService) -> None:
    service.open.clear()
    asked = asyncio.create_task(exchange(port, START.replace(b"livez", b"readyz") + b"Connection: close\r\n\r\n"))
    assert await exchange(port) == b""  # takes as long as the time-out for headers
    assert await exchange(port) == b""
    assert not asked.done()
    service.open.set()
    assert (await asked).startswith(b"HTTP/1.1 200 ")


# Clients that do not read

PIPELINED = (START + b"\r\n") * 200


def connect(port: int) -> socket.socket:
    """With a small receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    return client


def is_cut(client: socket.socket) -> bool:
    try:
        client.send(PIPELINED)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("last", [b"", START + b"Connection: close\r\n\r\n"], ids=["goes on", "says goodbye"])
async def test_a_client_that_pipelines_and_never_reads_is_disconnected_without_a_log_line(
    port: int, last: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [connect(port) for _ in range(3)]
    try:
        for client in clients:
            await until(partial(is_full, client), "nothing more can be sent to a server that has nowhere to write to")
            if last:
                with suppress(BlockingIOError, ConnectionError):
                    client.send(last)
        await until(lambda: all(map(is_cut, clients)), "all are cut off")
        await until(lambda: not uvicorn_connection._open, "no connection is left")
    finally:
        for client in clients:
            client.close()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []
    assert b'{"status":"ok"}' in await exchange(port, START + b"Connection: close\r\n\r\n")


class Unread:
    """A closing transport whose client reads `read` bytes between two checks."""

    def __init__(self, read: int) -> None:
        self.is_aborted = False
        self.checks = 0
        self._unsent, self._read = 1000, read

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        self.checks += 1
        self._unsent -= self._read
        return self._unsent

    def get_extra_info(self, name: str) -> None:
        return None

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("read", [0, 1])
async def test_a_closing_connection_is_aborted_once_its_client_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    """`close()` of a transport waits for the client without a limit."""
    monkeypatch.setattr(uvicorn_connection, "WRITE_SECONDS", 0.01)
    protocol, transport = uvicorn_connection.HeaderLimitProtocol(), Unread(read)
    protocol.transport = cast(asyncio.Transport, transport)
    protocol._check_closing()
    await until(lambda: transport.is_aborted or transport.checks > 5, "it was checked several times")
    assert transport.is_aborted is (read == 0)
    assert protocol._close_timer is not None
    protocol._close_timer.cancel()


@pytest.mark.parametrize(
    ("proxies", "client"), [(None, "127.0.0.1"), ("10.1.2.3", "127.0.0.1"), ("127.0.0.1", "203.0.113.9")]
)
async def test_a_forwarded_address_counts_only_from_a_proxy_that_is_named(
    monkeypatch: pytest.MonkeyPatch, proxies: str | None, client: str
) -> None:
    """Also if uvicorn's environment variable would trust this machine, as it does by default."""
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    monkeypatch.setenv(uvicorn_connection.PER_ADDRESS, "20")
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    config = uvicorn.Config(app, **ServerLimits(proxies).settings())
    config.load()
    scope: Any = {"type": "http", "client": ("127.0.0.1", 1), "headers": [(b"x-forwarded-for", b"203.0.113.9")]}
    loaded: Any = config.loaded_app
    await loaded(scope, None, None)
    assert seen == [client]


def is_full(client: socket.socket) -> bool:
    try:
        client.send(PIPELINED)
    except BlockingIOError:
        return True
    except ConnectionError:
        return True
    return False


async def test_a_slow_client_that_keeps_reading_gets_all_responses(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    count, got = 2000, b""
    writer.write((START + b"\r\n") * (count - 1) + START + b"Connection: close\r\n\r\n")
    async with asyncio.timeout(TIMEOUT):
        while part := await reader.read(65536):
            got += part
            await asyncio.sleep(0.02)
    writer.close()
    assert got.count(b'{"status":"ok"}') == count


async def test_the_number_of_connections_per_address_is_limited(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uvicorn_connection, "SECONDS", TIMEOUT)  # else silent connections time out too soon
    first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    try:
        await until(lambda: uvicorn_connection._open["127.0.0.1"] == 20, "all are connected")
        for _ in range(3):
            assert (await exchange(port)).startswith(b"HTTP/1.1 429 ")
    finally:
        for _, writer in first:
            writer.close()
    said = [record.getMessage() for record in caplog.records if record.name == "edda.web"]
    assert said == ["127.0.0.1 has 20 connections open, more are refused (--connections-per-address)"]
    await until(lambda: not uvicorn_connection._open, "no connection is left")
    assert b'{"status":"ok"}' in await exchange(port, START + b"Connection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("address", "named", "trusted"),
    [
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.0.7", "192.0.2.1, 10.0.0.0/8", True),
        ("10.0.0.7", "*", True),
        ("::1", "10.0.0.0/8,::1", True),
        ("10.0.0.8", "10.0.0.7", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "localhost", False),
    ],
)
def test_proxies_that_are_named_are_not_counted(address: str, named: str, trusted: bool) -> None:
    config = uvicorn.Config("x:y", proxy_headers=bool(named), forwarded_allow_ips=named)
    assert uvicorn_connection._is_trusted(address, config) is trusted


# Clients that disconnect during a response


@pytest.mark.parametrize(("name", "most"), [("edda", 0), ("edda-h11", 0), ("uvicorn-httptools", 1), ("uvicorn-h11", 1)])
async def test_a_client_that_disconnects_during_pipelined_requests_causes_no_traceback(
    name: str, most: int, tmp_path: Path
) -> None:
    """uvicorn reports the disconnect only to the newest of pipelined requests, and uvloop raises for the response
    to the first."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = LASTING.replace(b"ce-type: order.created", b"ce-type: slow")
    async with serving(name, EDDA_TEST_GATE=str(gate)) as server:
        await server.hear("started")
        _, writer = await server.connect()
        writer.write(slow + LASTING * 3)
        await server.hear("storing")
        writer.close()
        await writer.wait_closed()
        gone = START + b"Connection: close\r\n\r\n"
        assert b'{"status":"ok"}' in await exchange(server.port, gone)  # the server has noticed the disconnect by now
        await asyncio.to_thread(gate.write_bytes, b"go on")
        assert b'{"status":"ok"}' in await exchange(server.port, gone)
        await server.stop()
        assert server.process.stdout is not None
        said = (await server.process.stdout.read()).decode().splitlines()
    wrong = [line for line in said if "drained" not in line and "INFO" not in line]
    assert len(wrong) <= most, said
    assert "Traceback" not in "".join(said)
