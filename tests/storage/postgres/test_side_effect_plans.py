"""With many outbox events, messages, step commits and run values, statements about a few rows read a few pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from edda.core.model import (
    Event,
    EventKey,
    NewEvent,
    OutboxEvent,
    OutboxState,
    RunId,
    RunValue,
    RunWrite,
    StagedEvent,
    StagedKind,
    Suspend,
    Wait,
    WorkerId,
)
from edda.core.states import RunStatus
from edda.storage.postgres.accept_sql import DELIVER_MORE_MESSAGES, AcceptBatch
from edda.storage.postgres.claims import READ_RUNS
from edda.storage.postgres.connection import PostgresSession
from edda.storage.postgres.events import DELETE_STAGED, STAGED_EVENTS, TAKE_MESSAGE
from edda.storage.postgres.journal import build_batch
from edda.storage.postgres.outbox import (
    CLAIM,
    FIND_OUTBOX,
    FIND_OUTBOX_IN,
    NEXT_OUTBOX_DUE,
    RECORD_REJECTED,
    RECORD_SEND_LATER,
    RECORD_SENT,
    RETRY,
    RETRY_ALL,
)
from edda.storage.postgres.pruning import DELETE_GENERATIONS, DELETE_OUTBOX, DELETE_RUNS, OLD_OUTBOX
from edda.storage.postgres.runs import RUN_VALUE, RUN_VALUES
from edda.storage.postgres.transactions import STEP_COMMIT

from .plans import Look, look, seeded, session_at

LAST = 50_000
FAR = 4_000_000_000_000_000

# 50,000 events were sent, 100 are dead; 50,000 more are pending, each under a key of its own but for a key with 1,000,
# and only the last 100 are due. 50,000 staged events, of which the first 1,000 are not due. 10,000 runs wait under
# CROWDED, and 50,000 messages are under FULL. Every run has a step commit and a value.
SEEDS = (
    """
INSERT INTO edda_outbox (id, order_key, type, source, body, created_at, due, attempts, state, ended_at)
SELECT 's' || i, 'k' || i % 100, 't', '/s', '', i, i, 1, 'sent', i FROM generate_series(1, 50000) i""",
    """
INSERT INTO edda_outbox (id, order_key, type, source, body, created_at, due, attempts, state, reason, ended_at)
SELECT 'd' || i, 'k' || i, 't', '/s', '', i, i, 1, 'dead', 'no', i FROM generate_series(1, 100) i""",
    """
INSERT INTO edda_outbox (id, order_key, type, source, body, created_at, due, attempts, state)
SELECT 'p' || i, CASE WHEN i <= 1000 THEN 'busy' ELSE 'p' || i END, 't', '/s', '', i, 4000000000000000, 1, 'pending'
  FROM generate_series(1, 49900) i""",
    """
INSERT INTO edda_outbox (id, order_key, type, source, body, created_at, due, attempts, state)
SELECT 'n' || i, 'n' || i % 10, 't', '/s', '', i, i % 2, 0, 'pending' FROM generate_series(1, 100) i""",
    """
INSERT INTO edda_staged_event (kind, body, due)
SELECT 'event', '', CASE WHEN i <= 1000 THEN 4000000000000000 ELSE 0 END FROM generate_series(1, 50000) i""",
    """
INSERT INTO edda_event (seq, source, id, type, received_at, body)
SELECT i, 'shop', 'e' || i, 'type', i, '' FROM generate_series(1, 50000) i""",
    "SELECT setval('edda_event_seq', 50000)",
    "INSERT INTO edda_event_key (key, seq) SELECT '\\xf0', i FROM generate_series(1, 50000) i",
    """
INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor)
SELECT 'run' || lpad(i::text, 8, '0'), 'workflow', 'running', CASE WHEN i > 10000 THEN 'busy' END, 1, 0, 0
  FROM generate_series(1, 50000) i""",
    """
INSERT INTO edda_run (id, generation, workflow, input, created_at)
SELECT 'run' || lpad(i::text, 8, '0'), 0, 'workflow', '', i FROM generate_series(1, 50000) i""",
    """
INSERT INTO edda_wait (run_id, step, key, target_key, type, match, exclusive)
SELECT 'run' || lpad(i::text, 8, '0'), '1', '\\xc0', '', 'type', '', true FROM generate_series(1, 10000) i""",
    """
INSERT INTO edda_step_commit (run_id, generation, step, attempt, value, at)
SELECT 'run' || lpad(i::text, 8, '0'), 0, 'pay:1', 1, '', i FROM generate_series(1, 50000) i""",
    """
INSERT INTO edda_run_value (run_id, name, value, at)
SELECT 'run' || lpad(i::text, 8, '0'), 'progress', '', i FROM generate_series(1, 50000) i""",
    "INSERT INTO edda_fence VALUES ('busy', 0, 0)",
    "INSERT INTO edda_claim SELECT worker, 0 FROM edda_fence",
    "VACUUM ANALYZE",
)
CROWDED, FULL, EMPTY = b"\xc0", b"\xf0", b"\xee"
SENT, DEAD = LAST, 100
FIRST_PENDING = SENT + DEAD + 1


def run(number: int) -> RunId:
    return RunId(f"run{number:08}")


async def write(session: PostgresSession, batch: Iterable[RunWrite]) -> Look:
    statement, values = build_batch(WorkerId("busy"), list(batch))
    return await look(session, statement, "busy", 0, 0, 0, 0, 0, *values)


def talkative(number: int) -> RunWrite:
    return RunWrite(
        run(number),
        1,
        0,
        staged_events=(StagedEvent(StagedKind.EVENT, b"b"),),
        outbox_events=(OutboxEvent("id", "key", "type", "source", b"b", 1, run(number)),),
        values=(RunValue("progress", b"1"),),
        recorded_steps=("pay:1",),
    )


def receiver(number: int, key: bytes) -> RunWrite:
    release = Suspend(0, None, RunStatus.WAITING_FOR_MESSAGE)
    wait = Wait("2", key, key + number.to_bytes(4, "big"), "type", b"", exclusive=True)
    return RunWrite(run(number), 1, 0, transition=release, waits=(wait,))


def post(count: int, key: bytes) -> AcceptBatch:
    return AcceptBatch.of(
        [
            NewEvent(Event("shop", f"new{i}", "type", None, b"{}"), (EventKey(key, key, exclusive=True),))
            for i in range(count)
        ]
    )


async def test_what_runs_say_touches_their_own_rows(session: PostgresSession) -> None:
    seen = await write(session, map(talkative, range(20_000, 20_100)))
    assert {"edda_step_commit_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 100 * 50


async def test_what_runs_say_is_not_compared_with_each_other(session: PostgresSession) -> None:
    few, many = [await write(session, map(talkative, range(20_000, 20_000 + count))) for count in (10, 100)]
    assert many.work < few.work * 15


async def test_a_claim_of_the_outbox_reads_only_what_is_due(session: PostgresSession) -> None:
    seen = await look(session, CLAIM, 10, 1_000_000)
    assert seen.rows == 10
    assert {"edda_outbox_due", "edda_outbox_key", "edda_outbox_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 800


@pytest.mark.parametrize(("due", "rows"), [("0", 10), ("4000000000000000", 0)])
async def test_a_claim_does_not_read_a_large_outbox(due: str, rows: int) -> None:
    """Neither if all events are due, nor if none is; and the server has no statistics yet."""
    async with empty() as session:
        await session.execute(f"""
INSERT INTO edda_outbox (id, order_key, type, source, body, created_at, due, attempts, state)
SELECT 'e', 'k' || i % 1000, 't', '/s', '', i, {due}, 0, 'pending' FROM generate_series(1, 20000) i""")
        seen = await look(session, CLAIM, 10, 1_000_000)
    assert seen.rows == rows
    assert not seen.read_whole
    assert seen.pages < 400


async def test_settling_touches_the_events_and_their_keys(session: PostgresSession) -> None:
    due = list(range(FIRST_PENDING + 1_000, FIRST_PENDING + 1_050))
    attempts, reasons = [1] * len(due), ["no"] * len(due)
    looks = [
        await look(session, RECORD_SENT, due),
        await look(session, RECORD_REJECTED, due, attempts, reasons),
        await look(session, RECORD_SEND_LATER, due, attempts, [FAR] * len(due), reasons),
    ]
    assert "edda_outbox_key" in looks[2].indexes
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 50 * 40


async def test_looking_at_the_outbox_follows_its_indexes(session: PostgresSession) -> None:
    looks = [
        await look(session, NEXT_OUTBOX_DUE),
        await look(session, FIND_OUTBOX, SENT // 2, 50),
        await look(session, FIND_OUTBOX_IN[OutboxState.SENT], 0, 50),
        await look(session, FIND_OUTBOX_IN[OutboxState.DEAD], 0, 50),
        await look(session, OLD_OUTBOX, LAST // 2, 50),
    ]
    assert [seen.rows for seen in looks] == [1, 50, 50, 50, 50]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 200


async def test_dead_events_are_tried_again_without_a_look_at_the_others(session: PostgresSession) -> None:
    looks = [await look(session, RETRY, ["d1", "d2"]), await look(session, RETRY_ALL)]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < DEAD * 30


async def test_pruning_removes_by_key(session: PostgresSession) -> None:
    looks = [
        await look(session, DELETE_OUTBOX, list(range(1, 101))),
        await look(session, DELETE_RUNS, [run(i) for i in range(20_000, 20_100)]),
        await look(session, DELETE_GENERATIONS, [run(i) for i in range(20_000, 20_100)], [0] * 100),
    ]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 100 * 40


async def test_staged_events_are_read_and_forwarded_by_number(session: PostgresSession) -> None:
    looks = [await look(session, STAGED_EVENTS, 100), await look(session, DELETE_STAGED, list(range(2_000, 2_100)))]
    assert looks[0].rows == 100
    assert all("edda_staged_event_pkey" in seen.indexes for seen in looks)
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 100 * 15


async def test_steps_and_values_are_found_by_key(session: PostgresSession) -> None:
    looks = [
        await look(session, STEP_COMMIT, run(1), 0, "pay:1"),
        await look(session, RUN_VALUES, run(1)),
        await look(session, RUN_VALUE, run(1), "progress"),
        await look(session, READ_RUNS, [run(i) for i in range(1, 11)], [0] * 10, [0] * 10),
    ]
    assert [seen.rows for seen in looks] == [1, 1, 1, 10]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 300


async def test_taking_a_message_reads_the_first_under_its_key(session: PostgresSession) -> None:
    looks = [await look(session, TAKE_MESSAGE, f"\\x{key.hex()}", 1) for key in (FULL, EMPTY)]
    assert [seen.rows for seen in looks] == [1, 0]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 50


@pytest.mark.parametrize("key", [FULL, EMPTY])
async def test_waits_for_messages_read_as_many_as_they_take(session: PostgresSession, key: bytes) -> None:
    seen = await write(session, (receiver(number, key) for number in range(20_000, 20_050)))
    assert {"edda_event_key_pkey", "edda_open_run_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 50 * 80


@pytest.mark.parametrize("key", [CROWDED, EMPTY])
async def test_messages_read_as_many_waits_as_they_meet(session: PostgresSession, key: bytes) -> None:
    statement, values = post(50, key).compose({})
    seen = await look(session, statement, *values)
    assert {"edda_wait_key"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 50 * 150


async def test_another_round_of_messages_costs_no_more_than_the_first(session: PostgresSession) -> None:
    messages = post(50, CROWDED)
    statement, values = messages.compose_more({i: LAST + 1 + i for i in range(50)}, range(1, 51))
    seen = await look(session, statement, *values)
    assert statement == DELIVER_MORE_MESSAGES
    assert {"edda_wait_key", "edda_inbox_event"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 50 * 150


async def test_a_plan_made_on_an_empty_database_is_one_for_a_large_one_already() -> None:
    messages = post(10, CROWDED)
    rounds = (messages.compose({}), messages.compose_more({i: i for i in range(10)}, range(1, 11)))
    async with empty() as session:
        looks = [
            await write(session, map(talkative, range(1, 11))),
            await write(session, (receiver(number, FULL) for number in range(1, 11))),
            *[await look(session, statement, *values) for statement, values in rounds],
            await look(session, CLAIM, 10, 1),
            await look(session, RECORD_SENT, [1]),
            await look(session, RECORD_REJECTED, [1], [1], ["no"]),
            await look(session, RECORD_SEND_LATER, [1], [1], [1], ["no"]),
            await look(session, NEXT_OUTBOX_DUE),
            await look(session, RETRY, ["a"]),
            await look(session, OLD_OUTBOX, 1, 10),
            await look(session, STAGED_EVENTS, 10),
            await look(session, DELETE_STAGED, [1, 2]),
            await look(session, TAKE_MESSAGE, r"\x00", 1),
            await look(session, READ_RUNS, ["a"], [0], [0]),
            await look(session, DELETE_RUNS, ["a"]),
        ]
    assert not any(seen.read_whole for seen in looks)


@asynccontextmanager
async def empty() -> AsyncIterator[PostgresSession]:
    async with seeded() as url, session_at(url) as session:
        yield session
