"""Server-sent events: every open page of the viewer gets one after each change in the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from edda.control.controller import Controller
from edda.engine.tasks import start_task
from edda.errors import EddaError
from edda.web.request import Request

from .responses import HTTPError, Receive, Send, retry_later, security_headers

MAX_STREAMS = 100
MAX_SECONDS = 60.0
"""A stream ends after that time and the browser opens the next one by itself: a server that shuts down waits for its
open connections, and ASGI does not notify the application of the shutdown."""
KEEPALIVE_SECONDS = 15.0
"""A comment is sent after that time without a change, so that no proxy closes the connection as idle."""
_TICK = 1.0

_MEDIA = (b"content-type", b"text/event-stream; charset=utf-8")
_UNBUFFERED = (b"x-accel-buffering", b"no")  # nginx would else keep the response back until it is complete
_RETRY = b"retry: 1000\n\n"


class ASGIResponse(Protocol):
    """A `Response` or an `EventStream`."""

    @property
    def status(self) -> int: ...

    async def send(self, send: Send, *, private: bool, head: bool) -> None: ...


class EventStreams:
    """Counts the open streams, and ends all of them."""

    def __init__(self, is_started: Callable[[], bool]) -> None:
        self._is_started = is_started
        self._ended = False
        self.count = 0

    def open(self, request: Request, control: Controller) -> EventStream:
        if self.count >= MAX_STREAMS:
            raise HTTPError(retry_later(429, f"{MAX_STREAMS} streams are open: close one", 10))
        return EventStream(self, control, request.receive)

    def end(self) -> None:
        """Each stream ends within `_TICK` seconds."""
        self._ended = True

    def is_active(self) -> bool:
        return not self._ended and self._is_started()


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
                await self._send_changes(send)
            finally:
                self.streams.count -= 1
        await send({"type": "http.response.body", "body": b""})

    async def _send_changes(self, send: Send) -> None:
        await _send_chunk(send, _RETRY)
        disconnected = start_task(self._wait_for_disconnect())
        try:
            async with aclosing(_ChangeIterator(self.control.watch())) as changes:
                await self._forward(changes, disconnected, send)
        except EddaError:
            return  # the database is not available: the browser connects again
        finally:
            disconnected.cancel()

    async def _forward(self, changes: _ChangeIterator, disconnected: asyncio.Task[None], send: Send) -> None:
        now = asyncio.get_running_loop().time
        started = last_sent = now()
        while self.streams.is_active() and now() < started + MAX_SECONDS and not changes.is_exhausted:
            token = await changes.next(disconnected)
            if token is not None:
                line = token.replace("\r", " ").replace("\n", " ")
                await _send_chunk(send, f"event: changed\ndata: {line}\n\n".encode())
                last_sent = now()
            elif disconnected.done():
                return
            elif now() > last_sent + KEEPALIVE_SECONDS:
                await _send_chunk(send, b": still here\n\n")
                last_sent = now()

    async def _wait_for_disconnect(self) -> None:
        """After the end of the body, `receive()` returns when the client has disconnected. The WSGI bridge cannot
        detect it and returns another empty body at once: the stream then ends after one tick, and the client connects
        again."""
        while (await self.receive()).get("more_body", False):
            pass
        if (await self.receive())["type"] != "http.disconnect":
            await asyncio.sleep(_TICK)


class _ChangeIterator:
    """Waits for the next change token with a time limit, and keeps the pending `anext()` when the limit is over."""

    def __init__(self, tokens: AsyncIterator[str]) -> None:
        self._tokens = tokens
        self._pending: asyncio.Future[str] | None = None
        self.is_exhausted = False

    async def next(self, disconnected: asyncio.Task[None]) -> str | None:
        """None after `_TICK` seconds without a change, or when the client has disconnected."""
        self._pending = self._pending or asyncio.ensure_future(anext(self._tokens))
        awaited: set[asyncio.Future[Any]] = {self._pending}
        if not disconnected.done():
            awaited.add(disconnected)
        await asyncio.wait(awaited, timeout=_TICK, return_when=asyncio.FIRST_COMPLETED)
        if not self._pending.done():
            return None
        done, self._pending = self._pending, None
        try:
            return done.result()
        except StopAsyncIteration:
            self.is_exhausted = True
            return None

    async def aclose(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
        close = getattr(self._tokens, "aclose", None)
        if close is not None:
            await close()


async def _send_chunk(send: Send, text: bytes) -> None:
    await send({"type": "http.response.body", "body": text, "more_body": True})
