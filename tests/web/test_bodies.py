"""Request bodies: sizes, time-outs, disconnects."""

from __future__ import annotations

import asyncio

import pytest

from edda.cloudevents import json_format
from edda.web import WebApp, WebOptions

from .calls import DISCONNECT, EVENT, Call, Message, ask, chunk
from .fakes import FakeService


def with_length(length: object) -> dict[str, str]:
    return EVENT | {"content-length": str(length)}


async def test_a_body_in_pieces_is_one_body(web: WebApp, service: FakeService) -> None:
    pieces = [chunk(b'{"a"'), chunk(b""), chunk(b": 1}"), chunk(b"", more=False)]
    assert (await ask(web, messages=pieces)).status == 202
    assert json_format.value_of(service.stored[0]) == {"a": 1}


@pytest.mark.parametrize(("size", "status"), [(1000, 202), (1001, 413)])
async def test_a_body_over_the_limit_is_refused(service: FakeService, size: int, status: int) -> None:
    web = WebApp(service, WebOptions(max_body=1000))
    body = b'"' + b"x" * (size - 2) + b'"'
    assert (await ask(web, body=body, headers=with_length(size))).status == status
    assert (await ask(web, body=body)).status == status
    assert (await ask(web, messages=[chunk(body[:500]), chunk(body[500:], more=False)])).status == status


async def test_a_body_with_a_too_large_content_length_is_not_read(web: WebApp) -> None:
    for length in (1024 * 1024 + 1, 10**25, "9" * 5000):
        reply = await ask(web, headers=with_length(length))
        assert (reply.status, reply.receives) == (413, 0)
        assert "max_body" in reply.json["error"]


async def test_reading_an_endless_body_stops_at_the_limit(web: WebApp) -> None:
    endless = [chunk(b"x" * 65536)] * 1000
    reply = await ask(web, messages=endless)
    assert (reply.status, reply.receives) == (413, 17)


@pytest.mark.parametrize("length", ["-1", "1e3", "ten", "", "+1", "1, 1", "²"])
async def test_a_length_that_is_no_number_is_refused(web: WebApp, length: str) -> None:
    assert (await ask(web, headers=with_length(length))).status == 400


async def test_two_lengths_are_refused(web: WebApp) -> None:
    reply = await ask(web, headers=[*EVENT.items(), ("content-length", "2"), ("content-length", "3")])
    assert reply.status == 400


@pytest.mark.parametrize("before", [[], [chunk(b"{")], [chunk(b"{"), chunk(b""), chunk(b"}")]])
async def test_a_sender_that_disconnects_gets_no_response(
    web: WebApp, service: FakeService, before: list[Message]
) -> None:
    reply = await ask(web, messages=[*before, DISCONNECT])
    assert (reply.status, reply.receives) == (0, len(before) + 1)
    assert service.stored == []


async def stalled(web: WebApp, *first: bytes) -> int:
    """The status for a sender that sends these chunks and then nothing, without disconnecting."""
    status = 0
    pieces = [chunk(piece) for piece in first]

    async def receive() -> Message:
        if not pieces:
            await asyncio.Event().wait()
        return pieces.pop(0)

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            assert (b"connection", b"close") in message["headers"]
            assert (b"content-type", b"application/json") in message["headers"]

    async with asyncio.timeout(20):
        await web(Call().scope(), receive, send)
    return status


async def test_a_body_that_stalls_is_refused(service: FakeService) -> None:
    assert await stalled(WebApp(service, WebOptions(body_timeout=0.05)), b"{", b'"a"') == 408


async def test_a_body_slower_than_min_rate_is_refused_before_body_timeout(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edda.web.request._RATE_GRACE", 0.01)
    assert await stalled(WebApp(service, WebOptions(body_timeout=1000, min_rate=1000)), b"x" * 10) == 408


async def test_empty_chunks_without_a_wait_do_not_block_the_loop(service: FakeService) -> None:
    web = WebApp(service, WebOptions(body_timeout=0.2))

    async def receive() -> Message:
        return chunk(b"")

    statuses: list[int] = []

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    spinning = asyncio.create_task(web(Call().scope(), receive, send))
    assert (await ask(web)).status == 202
    assert not spinning.done()
    await spinning
    assert statuses[0] == 408


async def test_bodies_together_hold_only_so_much_memory(service: FakeService) -> None:
    web = WebApp(service, WebOptions(max_body=1000, max_buffered=1500))
    body = b'"' + b"x" * 900 + b'"'
    service.open.clear()
    first = asyncio.create_task(ask(web, body=body))
    await service.until_waiting()
    reply = await ask(web, body=body)
    assert (reply.status, "retry-after" in reply.headers) == (503, True)
    service.open.set()
    assert (await first).status == 202
    for _ in range(5):
        assert (await ask(web, body=body)).status == 202


async def test_memory_is_released_however_a_request_ends(service: FakeService) -> None:
    web = WebApp(service, WebOptions(max_body=1000, max_buffered=1000, body_timeout=0.02))
    body = b'"' + b"x" * 900 + b'"'
    await ask(web, messages=[chunk(body)])  # disconnects
    await stalled(web, body)
    await ask(web, messages=[chunk(body), chunk(body)])  # too large
    await ask(web, body=body, headers={"host": "localhost"})  # no event
    await ask(web, path="/cancel/run", body=body)  # no reason
    assert (await ask(web, body=body)).status == 202
