"""OutboxRelayer: a process that only sends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edda.errors import MigrationError
from edda.outbox import HttpSink, OutboxRelayer, RelaySettings
from edda.storage.ports import Storage
from tests.conftest import Database, MakeDatabase
from tests.engine.conditions import until
from tests.engine.conftest import url_of

from .fakes import ListSink, forever
from .outbox_rows import are_over, put, states
from .receiver import receiving


async def test_it_sends_the_outbox_of_a_database_to_a_url(storage: Storage, database: Database) -> None:
    async with receiving() as receiver:
        await put(storage, range(5))
        relayer = OutboxRelayer(None, receiver.url, storage=database.storage())
        async with relayer:
            await until(lambda: are_over(storage), "all are sent")
        assert sorted(receiver.ids) == ["0", "1", "2", "3", "4"]
        assert (relayer.sent, relayer.postponed, relayer.refused) == (5, 0, 0)
        await put(storage, ["6"])
        await relayer.start()
        await relayer.start()
        await until(lambda: "6" in receiver.ids, "it can be started again")
        await relayer.stop()
        await relayer.stop()


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
async def test_it_finds_its_database_by_url_or_in_the_environment(
    kind: str, make_database: MakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = make_database(kind)
    storage = database.storage()
    await storage.open()
    await storage.migrate()
    sink = ListSink()
    async with OutboxRelayer(url_of(database), sink=sink):
        await put(storage, ["by url"])
        await until(lambda: sink.taken == ["by url"], "it is sent")
    monkeypatch.setenv("EDDA_DB_URL", url_of(database))
    async with OutboxRelayer(sink=sink):
        await put(storage, ["by name"])
        await until(lambda: sink.taken == ["by url", "by name"], "it is sent")
    assert sink.closed == 2
    await storage.close()


async def test_a_relayer_that_is_cancelled_hands_back_what_it_has(storage: Storage, database: Database) -> None:
    stuck = ListSink(forever)
    await put(storage, range(3), key="A")
    running = asyncio.create_task(
        OutboxRelayer(sink=stuck, storage=database.storage(), settings=RelaySettings(timeout=0.5)).run()
    )
    await until(lambda: stuck.under_way == 1, "one is under way")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    sink = ListSink()
    async with OutboxRelayer(sink=sink, storage=database.storage()):
        await until(lambda: sink.taken == ["0", "1", "2"], "another sends them, long before the lease", within=10.0)


async def test_one_that_is_killed_leaves_its_events_to_the_lease(storage: Storage, database: Database) -> None:
    stuck, sink = ListSink(forever), ListSink()
    await put(storage, ["1"])
    dying = OutboxRelayer(sink=stuck, storage=database.storage(), settings=RelaySettings(timeout=1.0, lease=1.5))
    await dying.start()
    await until(lambda: stuck.under_way == 1, "it is under way")
    dying.kill()
    assert await states(storage) == {"1": "pending"}
    async with OutboxRelayer(sink=sink, storage=database.storage()):
        await until(lambda: sink.taken == ["1"], "another sends it")


@pytest.mark.databases("sqlite")
async def test_a_database_without_its_tables_is_refused_if_they_are_not_to_be_made(make_database: MakeDatabase) -> None:
    relayer = OutboxRelayer(url_of(make_database("sqlite")), sink=ListSink(), auto_migrate=False)
    with pytest.raises(MigrationError, match="edda migrate"):
        await relayer.start()


def test_where_events_go_has_to_be_said_once() -> None:
    sink = HttpSink("http://localhost/")
    both: dict[str, Any] = {"broker_url": "http://localhost/", "sink": sink}
    for wrong in ({}, both, {"sink": sink, "secret": "whsec_YQ=="}):
        with pytest.raises(ValueError, match="broker_url"):
            OutboxRelayer("memory://", **wrong)


@pytest.mark.parametrize("url", ["kafka://host/topic", "nats://host:4222", "nats://host/a/b", "example.com", "http://"])
def test_a_broker_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"http://|stream"):
        OutboxRelayer("memory://", url)


def test_a_secret_is_for_webhooks_alone() -> None:
    with pytest.raises(ValueError, match="secret signs HTTP requests only"):
        OutboxRelayer("memory://", "nats://host/stream", secret="whsec_YQ==")
