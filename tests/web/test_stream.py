"""Server-sent events after every change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx2
import pytest

from edda.control.controller import PREFIX
from edda.errors import StorageUnavailableError
from edda.web import State, WebApp, sse
from edda.web.responses import Message

from .calls import Call
from .fake_controller import Showcase
from .fakes import FakeService
from .listening import listening
from .test_security import PROTECTION

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def showcase() -> Showcase:
    return Showcase()


@pytest.fixture
def web(service: FakeService, showcase: Showcase) -> WebApp:
    return WebApp(service, control=lambda: showcase)


class Listener:
    """A client of the ASGI application that gets every chunk when it is sent."""

    def __init__(self, web: WebApp) -> None:
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.headers: dict[str, str] = {}
        self.status = 0
        self._gone = asyncio.Event()
        self._asked = False
        self.task = asyncio.create_task(
            web(Call(method="GET", path=f"{PREFIX}/stream").scope(), self._receive, self._send)
        )

    def leave(self) -> None:
        self._gone.set()

    async def hear(self) -> bytes:
        async with asyncio.timeout(20):
            return await self.heard.get()

    async def ended(self) -> None:
        async with asyncio.timeout(20):
            await self.task

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message.get("body"):
            self.heard.put_nowait(message["body"])


@pytest.fixture
async def listen(web: WebApp) -> AsyncIterator[Callable[[], Listener]]:
    listeners: list[Listener] = []

    def begin() -> Listener:
        listeners.append(Listener(web))
        return listeners[-1]

    yield begin
    for listener in listeners:
        listener.leave()
        await listener.ended()


async def test_a_change_is_sent_at_once(showcase: Showcase, listen: Callable[[], Listener]) -> None:
    listener = listen()
    assert await listener.hear() == b"retry: 1000\n\n"
    assert await listener.hear() == b"event: changed\ndata: mark-0\n\n"
    assert {name: listener.headers.get(name) for name in PROTECTION} == PROTECTION
    assert listener.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in listener.headers
    await showcase.world.touch()
    assert await listener.hear() == b"event: changed\ndata: mark-1\n\n"


async def test_watching_ends_when_the_client_disconnects(showcase: Showcase, listen: Callable[[], Listener]) -> None:
    listener = listen()
    await listener.hear()
    await listener.hear()
    assert showcase.world.watchers == 1
    listener.leave()
    await listener.ended()
    assert showcase.world.watchers == 0


async def test_a_comment_is_sent_after_a_time_without_changes(
    listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEPALIVE_SECONDS", 0.02)
    monkeypatch.setattr(sse, "_TICK", 0.01)
    listener = listen()
    heard = [await listener.hear() for _ in range(4)]
    assert heard[2:] == [b": still here\n\n"] * 2


async def test_it_ends_when_the_app_drains(
    service: FakeService, listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "_TICK", 0.01)
    listener = listen()
    await listener.hear()
    service.state = State.DRAINING
    await listener.ended()


async def test_it_ends_when_the_server_is_about_to_stop(
    web: WebApp, listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "_TICK", 0.01)
    listener = listen()
    await listener.hear()
    web.end_streams()
    await listener.ended()


async def test_it_ends_after_a_while_and_the_client_asks_again(
    listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(sse, "_TICK", 0.01)
    await listen().ended()


async def test_it_ends_when_the_database_is_away(
    showcase: Showcase, listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch(_: Showcase) -> AsyncIterator[str]:
        yield "first"
        raise StorageUnavailableError("gone")

    monkeypatch.setattr(Showcase, "watch", watch)
    listener = listen()
    await listener.ended()
    assert listener.heard.qsize() == 2


async def test_the_number_of_streams_is_limited(
    listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "MAX_STREAMS", 2)
    first, second = listen(), listen()
    for listener in (first, second):
        await listener.hear()
    third = listen()
    await third.ended()
    assert third.status == 429
    first.leave()
    await first.ended()
    fourth = listen()
    assert await fourth.hear() == b"retry: 1000\n\n"


async def test_a_server_that_cannot_detect_disconnects_ends_it_after_the_first_change(
    web: WebApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of WSGI."""
    monkeypatch.setattr(sse, "_TICK", 0.05)
    heard = b""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal heard
        heard += message.get("body", b"")

    async with asyncio.timeout(20):
        await web(Call(method="GET", path=f"{PREFIX}/stream").scope(), receive, send)
    assert b"mark-0" in heard


async def test_a_real_server_sends_every_chunk(web: WebApp, showcase: Showcase) -> None:
    async with listening(web) as url, httpx2.AsyncClient(trust_env=False, timeout=20) as client:
        async with client.stream("GET", f"{url}{PREFIX}/stream") as response:
            lines = response.aiter_lines()
            async for line in lines:
                if line == "data: mark-0":
                    await showcase.world.touch()
                if line == "data: mark-1":
                    break
        async with asyncio.timeout(20):  # the disconnect is noticed
            await showcase.world.alone.wait()
