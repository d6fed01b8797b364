"""Connections of `edda serve`: what uvicorn would wait for without end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edda.cli import connection
from edda.web import Web

from .fakes import FakeService
from .servers import PATIENCE

PROTOCOLS: dict[str, type[asyncio.Protocol]] = {"h11": H11Protocol, "httptools": HttpToolsProtocol}
START = b"GET /_edda/livez HTTP/1.1\r\nHost: localhost\r\n"
LARGE = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"


@pytest.fixture(params=PROTOCOLS)
async def port(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, service: FakeService
) -> AsyncIterator[int]:
    """A server that has little patience."""
    monkeypatch.setattr(connection, "SECONDS", 0.3)
    protocol = type("Connection", (connection.Impatient, PROTOCOLS[request.param]), {})
    config = uvicorn.Config(Web(service), port=0, http=protocol, log_level="critical", lifespan="off")
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
