"""URLs with several hosts: the storage, `ctx.session` and `ctx.transaction()` find the primary, also the next one."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy import text

from edda import EddaApp, RetryPolicy, RunStatus, WorkflowContext, activity, wait_event, workflow
from edda.control.views import RunSearch
from edda.engine.settings import Settings
from tests.databases import PostgresServer
from tests.engine.conditions import until, until_status
from tests.servers import Pair, Unavailable
from tests.tiers import skip_unless_ci

pytestmark = pytest.mark.processes

PATIENT = RetryPolicy(initial_interval=0.1, max_interval=0.5, max_attempts=200)
SETTINGS = Settings(takeover_grace=0.0)
DEMOTE = "ALTER SYSTEM SET default_transaction_read_only = on"
CAUGHT_UP = "SELECT replay_lsn >= pg_current_wal_lsn() FROM pg_stat_replication"


@pytest.fixture
def pair() -> Pair:
    try:
        return Pair(PostgresServer.answers)
    except Unavailable as error:
        skip_unless_ci(str(error))


@pytest.mark.parametrize("end", ["killed", "demoted"])
async def test_all_connections_follow_the_primary(pair: Pair, end: str) -> None:
    @activity(retry_policy=PATIENT)
    async def by_session(ctx: WorkflowContext, word: str) -> None:
        await ctx.session.execute(text("INSERT INTO words VALUES (:word)"), {"word": f"session {word}"})

    @activity(retry_policy=PATIENT)
    async def by_transaction(ctx: WorkflowContext, word: str) -> None:
        async with ctx.transaction() as connection:
            await connection.execute("INSERT INTO words VALUES ($1)", f"transaction {word}")

    @workflow(name="writing_on_primary")
    async def writing(ctx: WorkflowContext) -> str:
        for word in ("before", "after"):
            await by_session(ctx, word)
            await by_transaction(ctx, word)
            if word == "before":
                await wait_event(ctx, "promoted")
        return "written"

    primary = await asyncpg.connect(pair.primary)
    standby = await asyncpg.connect(pair.standby)
    await primary.execute("CREATE TABLE words (word text PRIMARY KEY)")
    # The standby comes first: it is passed over as long as it is one.
    hosts = ",".join(f"127.0.0.1:{urlsplit(url).port}" for url in (pair.standby, pair.primary))
    url = f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"
    async with EddaApp("shop", url, workflows=[writing], settings=SETTINGS) as app:
        run_id = await app.start(writing)
        await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
        assert len((await app.control.list_runs(RunSearch())).items) == 1

        async def caught_up() -> bool:
            return bool(await primary.fetchval(CAUGHT_UP))

        await until(caught_up, "the standby has everything")
        if end == "killed":
            pair.kill_primary()
            primary.terminate()
        else:
            await primary.execute(DEMOTE)
            await primary.fetchval("SELECT pg_reload_conf()")
            await primary.close()
        assert await standby.fetchval("SELECT pg_promote()")

        async def sent() -> bool:
            try:
                await app.send_event("promoted", "test", id="once")
            except Exception:  # the connections are being replaced; the event has an id and is stored once
                await asyncio.sleep(0.1)
                return False
            return True

        await until(sent, "an event is stored on the new primary")
        async with asyncio.timeout(60):
            assert await app.handle(run_id).result() == "written"
        assert len((await app.control.list_runs(RunSearch())).items) == 1
    found = await standby.fetch("SELECT word FROM words ORDER BY word")
    await standby.close()
    assert [row[0] for row in found] == ["session after", "session before", "transaction after", "transaction before"]
