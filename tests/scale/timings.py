"""How long answers take."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from statistics import median

import httpx2
from msgspec import Struct

from edda.errors import StorageUnavailableError
from edda.storage.ports import Storage

from .page_queries import questions
from .page_requests import pages, serving, visiting

Ask = Callable[[], Awaitable[object]]


class Timing(Struct, frozen=True):
    """Milliseconds; infinite if the server gave it up."""

    name: str
    median: float
    worst: float


async def time_storage(storage: Storage, tries: int) -> list[Timing]:
    return [await _time(name, ask, tries) for name, ask in (await questions(storage)).items()]


async def time_pages(url: str, tries: int) -> list[Timing]:
    async with serving(url) as server, visiting(server) as client:
        found = await pages(client)
        return [await _time(name, _visit(client, path), tries) for name, path in found.items()]


def _visit(client: httpx2.AsyncClient, path: str) -> Ask:
    async def visit() -> None:
        answer = await client.get(path)
        if answer.status_code == 503:
            raise StorageUnavailableError(path)
        answer.raise_for_status()

    return visit


async def _time(name: str, ask: Ask, tries: int) -> Timing:
    await _ask(ask)  # the first one also connects, and brings in what the others find in memory
    taken = [await _ask(ask) for _ in range(tries)]
    return Timing(name, median(taken), max(taken))


async def _ask(ask: Ask) -> float:
    begin = time.perf_counter()
    try:
        await ask()
    except StorageUnavailableError:
        return math.inf
    return (time.perf_counter() - begin) * 1000
