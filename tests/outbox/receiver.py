"""An HTTP receiver that does what a test tells it, however rude."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

HANG = -1
HANG_UP = -2


@dataclass(frozen=True)
class Answer:
    status: int = 202
    """Or HANG: say nothing; HANG_UP: close the connection instead."""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def event_id(self) -> str:
        return self.headers.get("ce-id") or str(self.event["id"])


Behaviour = Callable[[Request, int], Answer]
"""What it answers to the n-th try of an event, from 1."""


@dataclass
class Receiver:
    behaviour: Behaviour = lambda request, attempt: Answer()
    requests: list[Request] = field(default_factory=list)
    taken: list[Request] = field(default_factory=list)
    """Those that were answered with 2xx, in the order of their answers."""
    connections: int = 0
    port: int = 0
    _tries: Counter[str] = field(default_factory=Counter)
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/events"

    @property
    def ids(self) -> list[str]:
        return [request.event_id for request in self.taken]

    def tries_of(self, event_id: str) -> list[Request]:
        return [request for request in self.requests if request.event_id == event_id]

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """As a server that is gone: its port refuses, its connections are cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answer_one(reader, writer):
                    pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(head[0].split()[1], headers, body)
        self.requests.append(request)
        self._tries[request.event_id] += 1
        answer = self.behaviour(request, self._tries[request.event_id])
        if answer.status == HANG:
            await reader.read()  # until whoever asked goes away
        if answer.status < 0:
            return False
        if 200 <= answer.status < 300:
            self.taken.append(request)
        lines = [f"HTTP/1.1 {answer.status} Said", f"content-length: {len(answer.body)}"]
        lines += [f"{name}: {value}" for name, value in answer.headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + answer.body)
        await writer.drain()
        return True


@asynccontextmanager
async def receiving(behaviour: Behaviour | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver() if behaviour is None else Receiver(behaviour)
    await receiver.open()
    try:
        yield receiver
    finally:
        await receiver.close()
