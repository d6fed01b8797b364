"""The same responses under every supported server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest

from .calls import EVENT
from .servers import SERVERS, TIMEOUT, Server, serving

HEADERS = {name: value for name, value in EVENT.items() if name != "host"}


@pytest.fixture(params=SERVERS)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async with serving(request.param) as server:
        yield server


async def test_a_server_accepts_events_and_survives_invalid_ones(server: Server) -> None:
    """All in one: starting a server takes longer than all of it."""
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
        accepted = await client.post("/events", headers=HEADERS, content=b'{"a": 1}')
        assert (accepted.status_code, accepted.json()) == (202, {"status": "accepted"})
        assert "private" not in accepted.headers["cache-control"]
        assert (await client.post("/events", headers=HEADERS, content=pieces(b'{"a":', b" 1}"))).status_code == 202
        assert (await client.post("/events", content=b"hello")).status_code == 415
        assert (await client.get("/events")).headers["allow"] == "POST, OPTIONS"
        assert (await client.head("/events")).status_code == 405
        assert (await client.options("/events")).status_code == 204
        assert (await client.post("/cancel/a%2Fb")).json()["instance_id"] == "a/b"
        assert (await client.get("/_edda/livez")).json() == {"status": "ok"}
        assert (await client.get("/_edda/livez", headers={"host": "evil.example"})).status_code == 403
        large = await client.post("/events", headers=HEADERS, content=pieces(*[b"x" * 65536] * 20))
        assert large.status_code == 413
    await disconnect_in_the_middle_of_a_body(server)
    await stall_in_the_middle_of_a_body(server)
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
        assert (await client.post("/events", headers=HEADERS, content=b"{}")).status_code == 202
    assert await server.stop() in {0, -15}
    await server.hear("drained")


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def disconnect_in_the_middle_of_a_body(server: Server) -> None:
    for _ in range(10):
        _, writer = await server.connect()
        writer.write(request(b"{", length=1000))
        await writer.drain()
        writer.transport.abort()


async def stall_in_the_middle_of_a_body(server: Server) -> None:
    reader, writer = await server.connect()
    writer.write(request(b"{", length=1000))
    async with asyncio.timeout(TIMEOUT):
        assert b" 408 " in await reader.readline()
    writer.close()


def request(body: bytes, length: int) -> bytes:
    lines = ["POST /events HTTP/1.1", "Host: localhost", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in HEADERS.items()), "", ""]).encode() + body
