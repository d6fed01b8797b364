"""Posts events over HTTP. Bare sockets and ready-made bytes: the sender must not be what is measured."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import cast

from benchmarks.figures import Posts

from .pipe import serve_pipe

ACCEPTED = 202
DATA = b'{"order_id": "A-17", "amount": 4200, "currency": "EUR"}'
SINGLE = (
    b"POST /events HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nce-specversion: 1.0\r\n"
    b"ce-source: /bench\r\nce-type: bench.posted\r\nce-id: %b\r\ncontent-length: %d\r\n\r\n%b"
)
BATCH = (
    b"POST /events HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/cloudevents-batch+json\r\n"
    b"content-length: %d\r\n\r\n%b"
)
EVENT = b'{"specversion":"1.0","source":"/bench","type":"bench.posted","id":"%b","data":%b}'


class Line(asyncio.Protocol):
    """One connection, kept alive, one request at a time."""

    transport: asyncio.Transport

    def __init__(self, answered: Callable[[Line, int], None], lost: Callable[[], None]) -> None:
        self.answered = answered
        self.lost = lost
        self.received = b""
        self.due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class, which is no subclass

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        if found and len(body) >= length_of(head):
            self.received = b""
            self.answered(self, int(head[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost()


def length_of(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


class Volley:
    """As fast as answers come, or at a rate: then a post counts from when it was due, also if no line was free."""

    def __init__(self, batch: int, seconds: float, rate: float | None) -> None:
        self.batch = batch
        self.seconds = seconds
        self.rate = rate
        self.times: list[float] = []
        self.refused = 0
        self.free: list[Line] = []
        self.waiting: deque[float] = deque()
        self.open = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.numbers = count()
        self.name = secrets.token_hex(6)

    async def fire(self, host: str, port: int, lines: int) -> Posts:
        loop = asyncio.get_running_loop()
        for _ in range(lines):
            _, line = await loop.create_connection(lambda: Line(self.answered, self.lost), host, port)
            self.free.append(line)
        began, cpu = time.monotonic(), time.process_time()
        self.deadline = began + self.seconds
        await (self.flood() if self.rate is None else self.pace(began, self.rate))
        await self.done
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        for line in self.free:
            line.lost = lambda: None
            line.transport.close()
        return self.outcome(seconds, cpu)

    async def flood(self) -> None:
        for line in self.free:
            self.post(line, time.monotonic())
        self.free = []

    async def pace(self, began: float, rate: float) -> None:
        planned = int(self.seconds * rate)
        for number in range(planned):
            due = began + number / rate
            if (rest := due - time.monotonic()) > 0:
                await asyncio.sleep(rest)
            if self.free:
                self.post(self.free.pop(), due)
            else:
                self.waiting.append(due)
        self.deadline = 0.0
        self.finish_if_over()

    def post(self, line: Line, due: float) -> None:
        self.open += 1
        line.due = due
        line.transport.write(self.request())

    def request(self) -> bytes:
        if self.batch == 1:
            return SINGLE % (self.next_id(), len(DATA), DATA)
        body = b"[" + b",".join(EVENT % (self.next_id(), DATA) for _ in range(self.batch)) + b"]"
        return BATCH % (len(body), body)

    def next_id(self) -> bytes:
        return b"%b-%d" % (self.name.encode(), next(self.numbers))

    def answered(self, line: Line, status: int) -> None:
        now = time.monotonic()
        self.open -= 1
        if status == ACCEPTED:
            self.times.append(now - line.due)
        else:
            self.refused += 1
        if self.waiting:
            self.post(line, self.waiting.popleft())
        elif self.rate is None and now < self.deadline:
            self.post(line, now)
        else:
            self.free.append(line)
            self.finish_if_over()

    def finish_if_over(self) -> None:
        if self.open == 0 and not self.waiting and time.monotonic() >= self.deadline and not self.done.done():
            self.done.set_result(None)

    def lost(self) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server hung up"))

    def outcome(self, seconds: float, cpu: float) -> Posts:
        ordered = sorted(self.times)
        p50, p99 = (1000 * ordered[int(share * (len(ordered) - 1))] for share in (0.50, 0.99))
        return Posts(len(ordered) * self.batch, seconds, p50, p99, self.refused * self.batch, cpu)


async def fire(host: str, port: int, lines: int, batch: int, seconds: float, rate: float | None) -> Posts:
    return await Volley(batch, seconds, rate).fire(host, port, lines)


async def close() -> None:
    """Every volley closes its own lines."""


if __name__ == "__main__":
    serve_pipe({"fire": fire}, close, uvloop=True)
