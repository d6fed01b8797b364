"""A healthy client gets its response within a second during attacks on the server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx2
import pytest

from .calls import EVENT
from .servers import TIMEOUT, Server, serving

HEADERS = {name: value for name, value in EVENT.items() if name != "host"}
FIELDS = "".join(f"{name}: {value}\r\n" for name, value in EVENT.items()).encode()
LASTING = b"POST /events HTTP/1.1\r\n" + FIELDS + b"Content-Length: 2\r\n\r\n{}"
GOOD = LASTING.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
MIB = 1024 * 1024
LARGE = 64 * MIB
NESTED = b"[" * 100_000 + b"]" * 100_000

Attack = Callable[[Server], Awaitable[set[int]]]


async def say(server: Server, *parts: bytes, abort: bool = False) -> list[int]:
    """The statuses of all responses until the server disconnects."""
    reader, writer = await server.connect()
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if abort:
            writer.transport.abort()
            return []
        return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", await reader.read())]
    except ConnectionError:
        return []  # disconnected before all was sent
    finally:
        writer.close()


async def disconnect(server: Server) -> set[int]:
    for number in range(100):
        half = GOOD[: len(FIELDS) // 2] if number % 2 else GOOD[:-1]
        assert await say(server, half, abort=True) == []
    return set()


async def lie_about_the_length(server: Server) -> set[int]:
    long = GOOD.replace(b"Content-Length: 2", b"Content-Length: 1000")
    short = GOOD.replace(b"Content-Length: 2", b"Content-Length: 1")
    twice = GOOD.replace(b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 3")
    negative = GOOD.replace(b"Content-Length: 2", b"Content-Length: -2")
    huge = GOOD.replace(b"Content-Length: 2", b"Content-Length: " + b"9" * 30)
    return {status for lie in (long, short, twice, negative, huge) for status in await say(server, lie)}


async def send_chunks_of_junk(server: Server) -> set[int]:
    chunked = GOOD.replace(b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n")
    long = b"2;" + b"x" * 9000 + b"\r\n{}\r\n0\r\n\r\n"
    junk = (b"zz\r\n{}\r\n", b"-1\r\n", b"f" * 40 + b"\r\n", b"2\r\n{}}}}}\r\n", long)
    both = GOOD.replace(b"Content-Length: 2", b"Content-Length: 2\r\nTransfer-Encoding: chunked")
    return {status for bytes_ in (*(chunked + j for j in junk), both) for status in await say(server, bytes_)}


async def pipeline(server: Server) -> set[int]:
    statuses = await say(server, LASTING * 49 + GOOD)
    assert statuses == [202] * 50
    return set(statuses)


async def send_many_headers(server: Server) -> set[int]:
    many = b"".join(b"x-%d: x\r\n" % number for number in range(10_000))
    assert await say(server, GOOD.replace(b"\r\n", b"\r\n" + many, 1)) == [431]
    return {431}


async def speak_old_http(server: Server) -> set[int]:
    assert await say(server, GOOD.replace(b"HTTP/1.1", b"HTTP/1.0")) == [202]
    return {*await say(server, b"GET /\r\n\r\n"), *await say(server, b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n")}


async def send_null_bytes(server: Server) -> set[int]:
    requests = (
        b"\0" * 1000 + b"\r\n\r\n",
        GOOD.replace(b"/events", b"/ev\0ents"),
        GOOD.replace(b"/events", b"/%00"),
        GOOD.replace(b"/events", b"/cancel/%00"),
        GOOD.replace(b"order.created", b"order\0created"),
    )
    return {status for request in requests for status in await say(server, request)}


async def send_odd_targets(server: Server) -> set[int]:
    assert await say(server, GOOD.replace(b"/events", b"http://127.0.0.1/events")) == [202]
    odd = (b"*", b"//evil.example/x", b"http://[", b"/" + b"a" * 50_000, b"/\xff\xfe", b"/%ff%fe", b"/%zz", b"?")
    return {status for target in odd for status in await say(server, GOOD.replace(b"/events", target))}


async def send_a_large_body(server: Server) -> set[int]:
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
        answers = [
            await client.post("/", headers=HEADERS, content=b"x" * LARGE),
            await client.post("/", headers=HEADERS, content=pieces()),
        ]
    assert [answer.status_code for answer in answers] == [413, 413]
    return {413}


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(LARGE // MIB):
        yield b"x" * MIB


async def nest_deeply(server: Server) -> set[int]:
    events = [NESTED, json.dumps({"specversion": "1.0", "id": "1"}).encode()[:-1] + b', "data": ' + NESTED + b"}"]
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
        types = ("application/cloudevents+json", "application/cloudevents-batch+json", "application/json")
        return {
            (await client.post("/", content=body, headers=HEADERS | {"content-type": kind})).status_code
            for body in events
            for kind in types
        }


ATTACKS: list[Attack] = [
    disconnect,
    lie_about_the_length,
    send_chunks_of_junk,
    pipeline,
    send_many_headers,
    speak_old_http,
    send_null_bytes,
    send_odd_targets,
    send_a_large_body,
    nest_deeply,
]


@asynccontextmanager
async def slow_clients(server: Server, count: int) -> AsyncIterator[None]:
    """Clients that start a request, half of them with a body, and never complete it.

    They use another address than the healthy client: connections above the limit per address are refused."""
    other = ("127.0.0.2", 0)
    connections = [await asyncio.open_connection("127.0.0.1", server.port, local_addr=other) for _ in range(count)]
    for number, (_, writer) in enumerate(connections):
        writer.write(GOOD[: len(FIELDS) // 2] if number % 2 else GOOD[:-1])
    try:
        yield
    finally:
        for _, writer in connections:
            writer.transport.abort()


async def stay_healthy(server: Server, stop: asyncio.Event) -> list[float]:
    """Seconds per response."""
    took = []
    loop = asyncio.get_running_loop()
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
        while not stop.is_set():
            begun = loop.time()
            assert (await client.post("/events", headers=HEADERS, content=b"{}")).status_code == 202
            took.append(loop.time() - begun)
            await asyncio.sleep(0.01)  # one client, not a flood
    return took


@pytest.mark.timed
@pytest.mark.parametrize("name", ["edda", "edda-h11"])
async def test_a_healthy_client_gets_responses_during_an_attack(name: str) -> None:
    stop = asyncio.Event()
    async with serving(name) as server, slow_clients(server, 300), asyncio.TaskGroup() as group:
        healthy = group.create_task(stay_healthy(server, stop))
        for attack in ATTACKS:
            async with asyncio.timeout(TIMEOUT):
                statuses = await attack(server)
            assert all(status < 500 for status in statuses), (attack, statuses)
        stop.set()
        took = await healthy
    assert max(took) < 1.0
    assert len(took) > len(ATTACKS)
