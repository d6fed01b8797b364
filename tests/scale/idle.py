"""What open pages cost while nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
from msgspec import Struct

from tests.web.servers import Server

from .page_requests import serving, visiting

_TICKS = 100
"""Of the kernel's clock in a second, as Linux tells processes."""


class Idleness(Struct, frozen=True):
    """The server's CPU in percent of one core."""

    pages: int
    alone: float
    watched: float

    @property
    def each(self) -> float:
        return (self.watched - self.alone) / self.pages


async def measure_idleness(url: str, pages: int, seconds: float) -> Idleness:
    async with serving(url) as server, visiting(server) as client:
        await asyncio.sleep(5)  # what it does at its start is over
        alone = await _cpu(server, seconds)
        async with AsyncExitStack() as streams:
            for _ in range(pages):
                await streams.enter_async_context(_watching(client))
            await asyncio.sleep(1)
            return Idleness(pages, alone, await _cpu(server, seconds))


@asynccontextmanager
async def _watching(client: httpx2.AsyncClient) -> AsyncIterator[None]:
    """As a page that is open, which asks again whenever the server has ended the stream."""
    opened = asyncio.Event()
    task = asyncio.create_task(_watch(client, opened))
    try:
        await opened.wait()
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _watch(client: httpx2.AsyncClient, opened: asyncio.Event) -> None:
    while True:
        async with client.stream("GET", "/_edda/api/v1/stream") as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_lines():
                opened.set()


async def _cpu(server: Server, seconds: float) -> float:
    before = _used(server.process.pid)
    await asyncio.sleep(seconds)
    return (_used(server.process.pid) - before) / seconds * 100


def _used(pid: int) -> float:
    """Seconds in user and kernel mode. The name of the program, which may have spaces, ends with the last bracket."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS
