"""`ChangeFeed` queries once for all watchers, and not at all without watchers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from edda.control.change_feed import ChangeFeed
from edda.errors import StorageUnavailableError
from tests.engine.conditions import until

QUICK = 0.001


class TokenSource:
    """A change token that the test sets; counts how often it is read."""

    def __init__(self) -> None:
        self.token = "1"
        self.reads = 0
        self.error: Exception | None = None

    async def read(self) -> str:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.token


async def listen(watch: ChangeFeed, tokens: list[str]) -> None:
    async with aclosing(watch.watch()) as changes:
        async for token in changes:
            tokens.append(token)


async def stop(*listeners: asyncio.Task[None]) -> None:
    for listener in listeners:
        listener.cancel()
    await asyncio.gather(*listeners, return_exceptions=True)


async def test_every_watcher_gets_each_change_once() -> None:
    source = TokenSource()
    watch = ChangeFeed(source.read, QUICK)
    first: list[str] = []
    second: list[str] = []
    listeners = [asyncio.create_task(listen(watch, tokens)) for tokens in (first, second)]
    await until(lambda: first == second == ["1"] and source.reads > 5, "both have the first token")
    source.token = "2"
    await until(lambda: first == second == ["1", "2"], "both have the second token")
    third: list[str] = []
    listeners.append(asyncio.create_task(listen(watch, third)))
    await until(lambda: third == ["2"], "a later watcher gets the current token")
    await stop(*listeners)
    assert watch._polling is None
    assert (first, third) == (["1", "2"], ["2"])


async def test_there_is_no_query_without_watchers() -> None:
    source = TokenSource()
    watch = ChangeFeed(source.read, QUICK)
    tokens: list[str] = []
    listener = asyncio.create_task(listen(watch, tokens))
    await until(lambda: source.reads > 3, "the token is read")
    await stop(listener)
    reads = source.reads
    await asyncio.sleep(20 * QUICK)  # long enough for 20 reads
    assert source.reads == reads


async def test_a_failing_query_is_repeated() -> None:
    source = TokenSource()
    watch = ChangeFeed(source.read, QUICK)
    tokens: list[str] = []
    listener = asyncio.create_task(listen(watch, tokens))
    await until(lambda: watch._polling is not None, "the token is read")
    source.error = StorageUnavailableError("away")
    reads = source.reads
    await until(lambda: source.reads > reads + 3, "the query is repeated")
    source.error, source.token = None, "2"
    await until(lambda: tokens == ["1", "2"], "the watcher has the second token")
    await stop(listener)


async def test_watching_ends_with_the_database() -> None:
    source = TokenSource()
    watch = ChangeFeed(source.read, QUICK)
    tokens: list[str] = []
    listener = asyncio.create_task(listen(watch, tokens))
    await until(lambda: watch._polling is not None, "the token is read")
    source.error = RuntimeError("closed")
    await asyncio.wait_for(listener, 20)
    assert watch._polling is None


async def test_a_failing_first_query_is_raised() -> None:
    source = TokenSource()
    source.error = StorageUnavailableError("away")
    with pytest.raises(StorageUnavailableError):
        await listen(ChangeFeed(source.read, QUICK), [])
