"""On a large table every query of the hot path stays on its index, with generic and with custom plans."""

from __future__ import annotations

import json

from edda.core.model import End, RunId, RunWrite, Suspend, WorkerId
from edda.core.states import RunStatus
from edda.storage.postgres.claims import CLAIM_FEW, CLAIM_MANY, NEXT_DUE, READ_INBOXES, WAKE_PARKED
from edda.storage.postgres.connection import PostgresSession
from edda.storage.postgres.journal import OWNED, build_batch
from edda.storage.postgres.runs import FIND_ANY
from edda.storage.postgres.workers import FIND_ORPHANS, FREE

from .plans import literal, look, seeded, session_at

RUNS = 120_000
EVER = 2**63 - 1

# Five workflows. Of ten runs two wait for an event, three for a timer, one is due, one is parked and three have
# an owner: one of three busy workers or, ten in all, a small one. One owned run in thirty has an unread item.
SEEDS = (
    """
INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor, ready_at, inbox_count,
    inbox_read)
SELECT 'run' || lpad(i::text, 8, '0'), 'workflow' || i % 5,
       (ARRAY['waiting_for_event', 'waiting_for_event', 'waiting_for_timer', 'waiting_for_timer', 'waiting_for_timer',
              'running', 'parked', 'running', 'running', 'running'])[kind + 1],
       CASE WHEN i % 12000 = 35 THEN 'small' WHEN kind > 6 THEN 'busy' || i % 3 END, 1, 0, 0,
       CASE WHEN kind = 5 THEN i WHEN kind IN (2, 3, 4, 6) THEN 4000000000000000 + i END, (i % 100 = 37)::int, 0
  FROM (SELECT i, i / 5 % 10 AS kind FROM generate_series(1, 120000) i) x""",
    """
INSERT INTO edda_run (id, generation, workflow, input, created_at)
SELECT 'run' || lpad(i::text, 8, '0'), 0, 'workflow' || i % 5, '', i FROM generate_series(1, 120000) i""",
    """
INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value)
SELECT 'run' || lpad(i::text, 8, '0'), 1, 'cancel', '', i, '' FROM generate_series(1, 120000) i WHERE i % 100 = 37""",
    "INSERT INTO edda_fence SELECT 'busy' || i, 0, 0 FROM generate_series(0, 2) i",
    "INSERT INTO edda_claim SELECT worker, 0 FROM edda_fence",
    "VACUUM ANALYZE",
)


NAMES = ["workflow0", "workflow1", "unheard_of"]


async def test_a_claim_reads_little_more_than_it_takes(session: PostgresSession) -> None:
    seen = await look(session, CLAIM_FEW, "busy0", NAMES, 10, 0)
    assert seen.rows == 10
    assert "edda_open_run_ready" in seen.indexes
    assert not seen.read_whole & {"edda_open_run", "edda_fence"}
    assert seen.pages < 300


async def test_a_large_claim_stays_on_the_index_too(session: PostgresSession) -> None:
    seen = await look(session, CLAIM_MANY, "busy0", NAMES, 300, 0)
    assert seen.rows == 300
    assert not seen.read_whole
    assert seen.pages < 300 * 25


async def test_a_claim_does_not_walk_through_the_timers_of_the_future(session: PostgresSession) -> None:
    seen = await look(session, CLAIM_FEW.replace("clock_timestamp()", "'epoch'::timestamptz"), "busy0", NAMES, 10, 0)
    assert seen.rows == 1  # the time alone
    assert seen.pages < 30


async def test_a_claim_by_a_worker_without_a_fence_locks_nothing(session: PostgresSession) -> None:
    seen = await look(session, CLAIM_FEW, "nobody", NAMES, 10, 0)
    assert seen.rows == 1
    assert seen.pages < 30


async def test_the_next_due_time_is_the_first_entry_of_each_name(session: PostgresSession) -> None:
    seen = await look(session, NEXT_DUE, NAMES)
    assert seen.indexes == {"edda_open_run_ready"}
    assert seen.pages < 30


async def test_looking_for_inbox_costs_nothing_when_there_is_none(session: PostgresSession) -> None:
    seen = await look(session, READ_INBOXES, "small")
    assert "edda_open_run_inbox" in seen.indexes
    assert seen.pages < 10


async def test_inbox_is_read_run_by_run(session: PostgresSession) -> None:
    seen = await look(session, READ_INBOXES, "busy0")
    assert seen.rows == RUNS / 100 / 3
    assert "edda_open_run_inbox" in seen.indexes
    assert not seen.read_whole
    assert seen.pages < seen.rows * 6


async def test_what_a_worker_owns_is_found_by_its_owner(session: PostgresSession) -> None:
    seen = await look(session, OWNED, "small")
    assert seen.rows == 10
    assert seen.indexes == {"edda_open_run_owner"}
    assert seen.pages < 30


async def test_taking_over_a_small_worker_does_not_touch_the_others(session: PostgresSession) -> None:
    seen = await look(session, FREE, "small")
    assert "edda_open_run_owner" in seen.indexes
    assert not seen.read_whole
    assert seen.pages < 500


async def test_orphans_are_looked_for_owner_by_owner(session: PostgresSession) -> None:
    seen = await look(session, FIND_ORPHANS)
    assert seen.rows == 1  # the small worker has no fence
    assert "edda_open_run_owner" in seen.indexes
    assert seen.pages < 60


async def test_a_batch_touches_the_runs_it_is_about(session: PostgresSession) -> None:
    release = Suspend(0, None, RunStatus.WAITING_FOR_EVENT)
    owned = [RunId(f"run{i * 12000 + 35:08}") for i in range(10)]
    batch = [
        RunWrite(run, 1, 0, transition=release if i % 2 else End(RunStatus.COMPLETED, b"", 1))
        for i, run in enumerate(owned)
    ]
    statement, values = build_batch(WorkerId("busy0"), batch)
    seen = await look(session, statement, "busy0", 0, 0, 0, 0, 0, *values)
    assert seen.rows == 1
    assert "edda_open_run_pkey" in seen.indexes
    assert not seen.read_whole
    assert seen.pages < 600


async def test_unparking_one_workflow_leaves_the_others_alone(session: PostgresSession) -> None:
    seen = await look(session, WAKE_PARKED, ["unheard_of"])
    assert "edda_open_run_parked" in seen.indexes
    assert seen.pages < 30


async def test_a_page_of_runs_is_read_from_the_newest_on(session: PostgresSession) -> None:
    seen = await look(session, FIND_ANY, 0, EVER, EVER, "", None, None, 50)
    assert seen.rows == 50
    assert "edda_run_created" in seen.indexes
    assert seen.pages < 600


async def test_the_look_notices_a_query_that_has_left_its_index(session: PostgresSession) -> None:
    """The control: without its index the claim reads the whole table."""
    await session.execute("BEGIN")
    await session.execute("DROP INDEX edda_open_run_ready")
    answer = await session.fetch("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + NEXT_DUE.replace("$1", literal(NAMES)))
    await session.execute("ROLLBACK")
    plan = json.loads(answer[0][0])[0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] > 1000


async def test_a_plan_made_on_an_empty_database_is_one_for_a_large_one_already() -> None:
    async with seeded() as url, session_at(url) as session:
        looks = [
            await look(session, CLAIM_MANY, "busy0", NAMES, 10, 0),
            await look(session, READ_INBOXES, "busy0"),
            await look(session, OWNED, "busy0"),
            await look(session, FREE, "busy0"),
        ]
    assert not any(seen.read_whole for seen in looks)
