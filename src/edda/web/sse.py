"""Server-sent events: a word to every open page whenever something has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from edda.control.controller import Controller
from edda.engine.tasks import start_task
from edda.errors import EddaError
from edda.web.asgi import Receive, Send
from edda.web.request import Request

from .responses import HTTPError, retry_later, security_headers

MOST_STREAMS = 100
MAX_SECONDS = 60.0
"""Seconds after which a client has to ask anew, which browsers do by themselves: a server that stops waits for those
that are connected, and does not tell them."""
KEEPALIVE_SECONDS = 15.0
"""Seconds after which something is said, so that nobody on the way takes the connection for dead."""
_TICK = 1.0

_MEDIA = (b"content-type", b"text/event-stream; charset=utf-8")
# Proxies that keep answers back until they are whole would keep this one for ever.
_UNBUFFERED = (b"x-accel-buffering", b"no")
_BEGINNING = b"retry: 1000\n\n"


class ASGIResponse(Protocol):
    """Whatever can be sent back: an answer, or a stream of them."""

    @property
    def status(self) -> int: ...

    async def send(self, send: Send, *, private: bool, head: bool) -> None: ...


class EventStreams:
    """Those that are open, and a way to end them all."""

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self._ended = False
        self.count = 0

    def open(self, request: Request, control: Controller) -> EventStream:
        if self.count >= MOST_STREAMS:
            raise HTTPError(retry_later(429, f"{MOST_STREAMS} streams are open: close one", 10))
        return EventStream(self, control, request.receive)

    def end(self) -> None:
        """For a server that is about to stop: each ends within a second."""
        self._ended = True

    def is_active(self) -> bool:
        return not self._ended and self._is_open()


@dataclass(frozen=True, slots=True)
class EventStream:
    streams: EventStreams
    control: Controller
    receive: Receive
    status: int = 200

    async def send(self, send: Send, *, private: bool, head: bool) -> None:
        headers = [*security_headers(private=private), _MEDIA, _UNBUFFERED]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        if not head:
            self.streams.count += 1
            try:
                await self._send_marks(send)
            finally:
                self.streams.count -= 1
        await send({"type": "http.response.body", "body": b""})

    async def _send_marks(self, send: Send) -> None:
        await _say(send, _BEGINNING)
        gone = start_task(self._until_gone())
        try:
            async with aclosing(_ChangeIterator(self.control.watch())) as marks:
                await self._forward(marks, gone, send)
        except EddaError:
            return  # the database is away: the client asks again
        finally:
            gone.cancel()

    async def _forward(self, marks: _ChangeIterator, gone: asyncio.Task[None], send: Send) -> None:
        now = asyncio.get_running_loop().time
        begun = spoken = now()
        while self.streams.is_active() and now() < begun + MAX_SECONDS and not marks.is_over:
            mark = await marks.next(gone)
            if mark is not None:
                await _say(send, b"event: changed\ndata: " + _line(mark) + b"\n\n")
                spoken = now()
            elif gone.done():
                return
            elif now() > spoken + KEEPALIVE_SECONDS:
                await _say(send, b": still here\n\n")
                spoken = now()

    async def _until_gone(self) -> None:
        """Whoever has read all of a body hears next that the client went. A server that cannot tell, as those of WSGI,
        says once more that there is no body: then the stream is short, and the client asks again for each mark."""
        while (await self.receive()).get("more_body", False):
            pass
        if (await self.receive())["type"] != "http.disconnect":
            await asyncio.sleep(_TICK)


class _ChangeIterator:
    """One mark after the other, without losing the one that was waited for when the wait was given up."""

    def __init__(self, marks: AsyncIterator[str]) -> None:
        self._marks = marks
        self._next: asyncio.Future[str] | None = None
        self.is_over = False

    async def next(self, gone: asyncio.Task[None]) -> str | None:
        """None if there was none within a moment, or if the client has gone."""
        self._next = self._next or asyncio.ensure_future(anext(self._marks))
        awaited: set[asyncio.Future[Any]] = {self._next} if gone.done() else {self._next, gone}
        await asyncio.wait(awaited, timeout=_TICK, return_when=asyncio.FIRST_COMPLETED)
        if not self._next.done():
            return None
        found, self._next = self._next, None
        try:
            return found.result()
        except StopAsyncIteration:
            self.is_over = True
            return None

    async def aclose(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        close = getattr(self._marks, "aclose", None)
        if close is not None:
            await close()


async def _say(send: Send, text: bytes) -> None:
    await send({"type": "http.response.body", "body": text, "more_body": True})


def _line(text: str) -> bytes:
    return text.replace("\r", " ").replace("\n", " ").encode()
