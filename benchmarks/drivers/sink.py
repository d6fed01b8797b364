"""Where the outbox delivers to: takes every post at once and counts the events. It must not be what is measured."""

from __future__ import annotations

import asyncio
import json
import time
from typing import cast

from benchmarks.figures import Arrived, Listening

from .driver import until_still
from .pipe import serve_pipe

TAKEN = b"HTTP/1.1 204 No Content\r\n\r\n"


class Counter:
    def __init__(self) -> None:
        self.server: asyncio.Server | None = None
        self.ids: set[str] = set()
        self.repeated = 0
        self.last = 0.0

    def count(self, body: bytes) -> None:
        known = len(self.ids)
        self.ids.add(json.loads(body)["id"])
        self.repeated += known == len(self.ids)
        self.last = time.monotonic()

    async def listen(self) -> Listening:
        self.server = await asyncio.get_running_loop().create_server(lambda: Line(self), "127.0.0.1", 0)
        return Listening(f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/")

    async def arrived(self, count: int, stall: float) -> Arrived:
        """Of all so far."""
        await until_still(lambda: len(self.ids), count, stall)
        return Arrived(len(self.ids), self.last, self.repeated)

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()


class Line(asyncio.Protocol):
    """One connection, kept alive."""

    transport: asyncio.Transport

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class, which is no subclass

    def data_received(self, data: bytes) -> None:
        self.received += data
        while self._take_one():
            self.transport.write(TAKEN)

    def _take_one(self) -> bool:
        head, found, rest = self.received.partition(b"\r\n\r\n")
        if not found or len(rest) < (length := length_of(head)):
            return False
        self.counter.count(rest[:length])
        self.received = rest[length:]
        return True


def length_of(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


if __name__ == "__main__":
    counter = Counter()
    serve_pipe({"listen": counter.listen, "arrived": counter.arrived}, counter.close, uvloop=True)
