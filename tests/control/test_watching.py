"""One look for all who watch, and none if nobody does."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from edda.control.change_feed import ChangeFeed
from edda.errors import StorageUnavailableError
from tests.engine.facts import until

QUICK = 0.001


class Pulse:
    """A mark that moves when the test says so, and counts how often it is asked for."""

    def __init__(self) -> None:
        self.mark = "1"
        self.looks = 0
        self.error: Exception | None = None

    async def look(self) -> str:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.mark


async def listen(watch: ChangeFeed, heard: list[str]) -> None:
    async with aclosing(watch.changes()) as marks:
        async for mark in marks:
            heard.append(mark)


async def stop(*listeners: asyncio.Task[None]) -> None:
    for listener in listeners:
        listener.cancel()
    await asyncio.gather(*listeners, return_exceptions=True)


async def test_everybody_hears_each_change_once() -> None:
    pulse = Pulse()
    watch = ChangeFeed(pulse.look, QUICK)
    first: list[str] = []
    second: list[str] = []
    listeners = [asyncio.create_task(listen(watch, heard)) for heard in (first, second)]
    await until(lambda: first == second == ["1"] and pulse.looks > 5, "both have heard the first mark")
    pulse.mark = "2"
    await until(lambda: first == second == ["1", "2"], "both have heard of the change")
    third: list[str] = []
    listeners.append(asyncio.create_task(listen(watch, third)))
    await until(lambda: third == ["2"], "who comes later hears where things stand")
    await stop(*listeners)
    assert not watch.is_looking
    assert (first, third) == (["1", "2"], ["2"])


async def test_nobody_looks_when_nobody_watches() -> None:
    pulse = Pulse()
    watch = ChangeFeed(pulse.look, QUICK)
    heard: list[str] = []
    listener = asyncio.create_task(listen(watch, heard))
    await until(lambda: pulse.looks > 3, "somebody looks")
    await stop(listener)
    looks = pulse.looks
    await asyncio.sleep(20 * QUICK)  # time in which somebody would have looked
    assert pulse.looks == looks


async def test_a_database_that_is_away_for_a_while_is_asked_again() -> None:
    pulse = Pulse()
    watch = ChangeFeed(pulse.look, QUICK)
    heard: list[str] = []
    listener = asyncio.create_task(listen(watch, heard))
    await until(lambda: watch.is_looking, "somebody looks")
    pulse.error = StorageUnavailableError("away")
    looks = pulse.looks
    await until(lambda: pulse.looks > looks + 3, "it is asked again and again")
    pulse.error, pulse.mark = None, "2"
    await until(lambda: heard == ["1", "2"], "the change was heard")
    await stop(listener)


async def test_watching_ends_with_the_database() -> None:
    pulse = Pulse()
    watch = ChangeFeed(pulse.look, QUICK)
    heard: list[str] = []
    listener = asyncio.create_task(listen(watch, heard))
    await until(lambda: watch.is_looking, "somebody looks")
    pulse.error = RuntimeError("closed")
    await asyncio.wait_for(listener, 20)
    assert not watch.is_looking


async def test_who_cannot_look_at_all_is_told() -> None:
    pulse = Pulse()
    pulse.error = StorageUnavailableError("away")
    with pytest.raises(StorageUnavailableError):
        await listen(ChangeFeed(pulse.look, QUICK), [])
