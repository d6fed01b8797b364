"""Connections of `edda serve`: what uvicorn would wait for without end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edda.cli import uvicorn_server
from edda.web import WebApp
from tests.engine.facts import until

from .fakes import FakeService
from .servers import PATIENCE, serving
from .test_abuse import LASTING

PROTOCOLS: dict[str, type[asyncio.Protocol]] = {"h11": H11Protocol, "httptools": HttpToolsProtocol}
START = b"GET /_edda/livez HTTP/1.1\r\nHost: localhost\r\n"
LARGE = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"


@pytest.fixture(params=PROTOCOLS)
async def port(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, service: FakeService
) -> AsyncIterator[int]:
    """A server that has little patience."""
    monkeypatch.setattr(uvicorn_server, "SECONDS", 0.3)
    monkeypatch.setattr(uvicorn_server, "WRITE_SECONDS", 0.3)
    monkeypatch.setenv(uvicorn_server.PER_ADDRESS, "20")
    protocol = type("Connection", (uvicorn_server.HeaderLimitProtocol, PROTOCOLS[request.param]), {})
    config = uvicorn.Config(
        WebApp(service), port=0, http=protocol, log_level="critical", lifespan="off", proxy_headers=False
    )
    server = Server(config)
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(PATIENCE):
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
    """All that the server says to these words until it hangs up; the client never does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_headers_that_never_end_are_given_up(port: int) -> None:
    assert (await exchange(port, START)).startswith(b"HTTP/1.1 408 ")


async def test_a_client_that_says_nothing_is_left_without_a_word(port: int) -> None:
    assert await exchange(port) == b""


async def test_the_headers_of_a_second_request_are_given_up_too(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(PATIENCE):
        writer.write(START + b"\r\n")
        assert b'{"status":"ok"}' in await reader.readuntil(b"}")
        writer.write(START)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_headers_without_end_are_given_up_at_their_limit(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(START)
    sent = 0
    async with asyncio.timeout(PATIENCE):
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


async def test_the_rest_of_a_body_that_is_not_wanted_is_read_for_a_while_so_that_its_answer_arrives(port: int) -> None:
    answer = await exchange(port, LARGE, *[b"x" * 65536] * 20)
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_request_that_is_being_answered_is_not_given_up(port: int, service: FakeService) -> None:
    service.open.clear()
    asked = asyncio.create_task(exchange(port, START.replace(b"livez", b"readyz") + b"Connection: close\r\n\r\n"))
    assert await exchange(port) == b""  # which takes as long as a client is given
    assert await exchange(port) == b""
    assert not asked.done()
    service.open.set()
    assert (await asked).startswith(b"HTTP/1.1 200 ")


# Clients that do not read

PIPELINED = (START + b"\r\n") * 200


def connect(port: int) -> socket.socket:
    """With little room for what it does not read."""
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
async def test_a_client_that_pipelines_and_never_reads_is_cut_off_without_a_word_in_the_log(
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
        await until(lambda: not uvicorn_server._open, "no connection is left")
    finally:
        for client in clients:
            client.close()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []
    assert b'{"status":"ok"}' in await exchange(port, START + b"Connection: close\r\n\r\n")


def is_full(client: socket.socket) -> bool:
    try:
        client.send(PIPELINED)
    except BlockingIOError:
        return True
    except ConnectionError:
        return True
    return False


async def test_a_slow_client_that_goes_on_reading_gets_all_of_its_answers(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    count, got = 2000, b""
    writer.write((START + b"\r\n") * (count - 1) + START + b"Connection: close\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        while part := await reader.read(65536):
            got += part
            await asyncio.sleep(0.02)
    writer.close()
    assert got.count(b'{"status":"ok"}') == count


async def test_an_address_has_so_many_connections_and_no_more(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uvicorn_server, "SECONDS", PATIENCE)  # or those that say nothing are gone too soon
    first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    try:
        await until(lambda: uvicorn_server._open["127.0.0.1"] == 20, "all are connected")
        for _ in range(3):
            assert (await exchange(port)).startswith(b"HTTP/1.1 429 ")
    finally:
        for _, writer in first:
            writer.close()
    said = [record.getMessage() for record in caplog.records if record.name == "edda.web"]
    assert said == ["127.0.0.1 has 20 connections open, more are refused (--connections-per-address)"]
    await until(lambda: not uvicorn_server._open, "no connection is left")
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
    assert uvicorn_server._is_trusted(address, config) is trusted


# Clients that go while they are answered


@pytest.mark.parametrize(("name", "most"), [("edda", 0), ("edda-h11", 0), ("uvicorn-httptools", 1), ("uvicorn-h11", 1)])
async def test_a_client_that_goes_in_the_middle_of_its_pipelined_requests_leaves_no_traceback(
    name: str, most: int, tmp_path: Path
) -> None:
    """uvicorn tells only the newest of pipelined requests that the client has gone, and uvloop raises for the answer
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
        assert b'{"status":"ok"}' in await exchange(server.port, gone)  # by now the server has heard of it
        await asyncio.to_thread(gate.write_bytes, b"go on")
        assert b'{"status":"ok"}' in await exchange(server.port, gone)
        await server.stop()
        assert server.process.stdout is not None
        said = (await server.process.stdout.read()).decode().splitlines()
    wrong = [line for line in said if "drained" not in line and "INFO" not in line]
    assert len(wrong) <= most, said
    assert "Traceback" not in "".join(said)
