"""With much in the outbox, under the keys and in the tables of steps and facts, a few rows cost a few pages."""

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
from edda.storage.postgres.accept_sql import GIVE_MORE_MESSAGES, AcceptBatch
from edda.storage.postgres.batch import build_batch
from edda.storage.postgres.claims import READ_RUNS
from edda.storage.postgres.outbox import (
    CLAIM,
    FIND_OUTGOING,
    FIND_OUTGOING_IN,
    NEXT_OUTGOING,
    RETRY,
    RETRY_ALL,
    SETTLE_POSTPONED,
    SETTLE_REFUSED,
    SETTLE_SENT,
)
from edda.storage.postgres.pruning import DELETE_GENERATIONS, DELETE_OUTGOING, DELETE_RUNS, OLD_OUTGOING
from edda.storage.postgres.runs import FACT, FACTS
from edda.storage.postgres.session import Session
from edda.storage.postgres.staged_events import DISPATCHES, FORWARD, TAKE
from edda.storage.postgres.transactions import DONE

from .plans import Look, look, seeded, session_at

LAST = 50_000
FAR = 4_000_000_000_000_000

# 50,000 events were sent, 100 are dead; 50,000 more are pending, each under a key of its own but for a key with 1,000,
# and only the last 100 are due. 50,000 dispatches, of which the first 1,000 are not due. 10,000 runs wait under
# CROWDED, and 50,000 messages are under FULL. Every run has a step that is done, and a fact.
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
INSERT INTO edda_dispatch (kind, body, due)
SELECT 'event', '', CASE WHEN i <= 1000 THEN 4000000000000000 ELSE 0 END FROM generate_series(1, 50000) i""",
    """
INSERT INTO edda_event (seq, source, id, type, received_at, body)
SELECT i, 'shop', 'e' || i, 'type', i, '' FROM generate_series(1, 50000) i""",
    "SELECT setval('edda_event_seq', 50000)",
    "INSERT INTO edda_event_key (key, seq) SELECT '\\xf0', i FROM generate_series(1, 50000) i",
    """
INSERT INTO edda_sched (run_id, workflow, status, owner, epoch, gen, start_seq)
SELECT 'run' || lpad(i::text, 8, '0'), 'workflow', 'running', CASE WHEN i > 10000 THEN 'busy' END, 1, 0, 0
  FROM generate_series(1, 50000) i""",
    """
INSERT INTO edda_run (id, gen, workflow, input, created_at)
SELECT 'run' || lpad(i::text, 8, '0'), 0, 'workflow', '', i FROM generate_series(1, 50000) i""",
    """
INSERT INTO edda_wait (run_id, step, key, own_key, type, match, once)
SELECT 'run' || lpad(i::text, 8, '0'), '1', '\\xc0', '', 'type', '', true FROM generate_series(1, 10000) i""",
    """
INSERT INTO edda_done (run_id, gen, step, attempt, value, at)
SELECT 'run' || lpad(i::text, 8, '0'), 0, 'pay:1', 1, '', i FROM generate_series(1, 50000) i""",
    """
INSERT INTO edda_fact (run_id, name, value, at)
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


async def write(session: Session, batch: Iterable[RunWrite]) -> Look:
    statement, values = build_batch(WorkerId("busy"), list(batch))
    return await look(session, statement, "busy", 0, 0, 0, 0, 0, *values)


def talkative(number: int) -> RunWrite:
    return RunWrite(
        run(number),
        1,
        0,
        dispatches=(StagedEvent(StagedKind.EVENT, b"b"),),
        outgoing=(OutboxEvent("id", "key", "type", "source", b"b", 1, run(number)),),
        facts=(RunValue("progress", b"1"),),
        recorded=("pay:1",),
    )


def receiver(number: int, key: bytes) -> RunWrite:
    release = Suspend(0, None, RunStatus.WAITING_FOR_MESSAGE)
    wait = Wait("2", key, key + number.to_bytes(4, "big"), "type", b"", once=True)
    return RunWrite(run(number), 1, 0, move=release, waits=(wait,))


def post(count: int, key: bytes) -> AcceptBatch:
    return AcceptBatch.of(
        [
            NewEvent(Event("shop", f"new{i}", "type", None, b"{}"), (EventKey(key, key, once=True),))
            for i in range(count)
        ]
    )


async def test_what_runs_say_touches_their_own_rows(session: Session) -> None:
    seen = await write(session, map(talkative, range(20_000, 20_100)))
    assert {"edda_done_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 100 * 50


async def test_what_runs_say_is_not_compared_with_each_other(session: Session) -> None:
    few, many = [await write(session, map(talkative, range(20_000, 20_000 + count))) for count in (10, 100)]
    assert many.work < few.work * 15


async def test_a_claim_of_the_outbox_reads_only_what_is_due(session: Session) -> None:
    seen = await look(session, CLAIM, 10, 1_000_000)
    assert seen.rows == 10
    assert {"edda_outbox_due", "edda_outbox_key", "edda_outbox_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 800


@pytest.mark.parametrize(("due", "rows"), [("0", 10), ("4000000000000000", 0)])
async def test_a_claim_does_not_read_a_large_outbox(due: str, rows: int) -> None:
    """Neither if all of it is due, nor if nothing is; and the server knows nothing yet of what is there."""
    async with empty() as session:
        await session.execute(f"""
INSERT INTO edda_outbox (id, order_key, type, source, body, created_at, due, attempts, state)
SELECT 'e', 'k' || i % 1000, 't', '/s', '', i, {due}, 0, 'pending' FROM generate_series(1, 20000) i""")
        seen = await look(session, CLAIM, 10, 1_000_000)
    assert seen.rows == rows
    assert not seen.read_whole
    assert seen.pages < 400


async def test_settling_touches_the_events_and_their_keys(session: Session) -> None:
    due = list(range(FIRST_PENDING + 1_000, FIRST_PENDING + 1_050))
    attempts, reasons = [1] * len(due), ["no"] * len(due)
    looks = [
        await look(session, SETTLE_SENT, due),
        await look(session, SETTLE_REFUSED, due, attempts, reasons),
        await look(session, SETTLE_POSTPONED, due, attempts, [FAR] * len(due), reasons),
    ]
    assert "edda_outbox_key" in looks[2].indexes
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 50 * 40


async def test_looking_at_the_outbox_follows_its_indexes(session: Session) -> None:
    looks = [
        await look(session, NEXT_OUTGOING),
        await look(session, FIND_OUTGOING, SENT // 2, 50),
        await look(session, FIND_OUTGOING_IN[OutboxState.SENT], 0, 50),
        await look(session, FIND_OUTGOING_IN[OutboxState.DEAD], 0, 50),
        await look(session, OLD_OUTGOING, LAST // 2, 50),
    ]
    assert [seen.rows for seen in looks] == [1, 50, 50, 50, 50]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 200


async def test_dead_events_are_tried_again_without_a_look_at_the_others(session: Session) -> None:
    looks = [await look(session, RETRY, ["d1", "d2"]), await look(session, RETRY_ALL)]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < DEAD * 30


async def test_pruning_removes_by_key(session: Session) -> None:
    looks = [
        await look(session, DELETE_OUTGOING, list(range(1, 101))),
        await look(session, DELETE_RUNS, [run(i) for i in range(20_000, 20_100)]),
        await look(session, DELETE_GENERATIONS, [run(i) for i in range(20_000, 20_100)], [0] * 100),
    ]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 100 * 40


async def test_dispatches_are_read_and_forwarded_by_number(session: Session) -> None:
    looks = [await look(session, DISPATCHES, 100), await look(session, FORWARD, list(range(2_000, 2_100)))]
    assert looks[0].rows == 100
    assert all("edda_dispatch_pkey" in seen.indexes for seen in looks)
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 100 * 15


async def test_steps_and_facts_are_found_by_key(session: Session) -> None:
    looks = [
        await look(session, DONE, run(1), 0, "pay:1"),
        await look(session, FACTS, run(1)),
        await look(session, FACT, run(1), "progress"),
        await look(session, READ_RUNS, [run(i) for i in range(1, 11)], [0] * 10, [0] * 10),
    ]
    assert [seen.rows for seen in looks] == [1, 1, 1, 10]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 300


async def test_taking_a_message_reads_the_first_under_its_key(session: Session) -> None:
    looks = [await look(session, TAKE, f"\\x{key.hex()}", 1) for key in (FULL, EMPTY)]
    assert [seen.rows for seen in looks] == [1, 0]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 50


@pytest.mark.parametrize("key", [FULL, EMPTY])
async def test_waits_for_messages_read_as_many_as_they_take(session: Session, key: bytes) -> None:
    seen = await write(session, (receiver(number, key) for number in range(20_000, 20_050)))
    assert {"edda_event_key_pkey", "edda_sched_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 50 * 80


@pytest.mark.parametrize("key", [CROWDED, EMPTY])
async def test_messages_read_as_many_waits_as_they_meet(session: Session, key: bytes) -> None:
    statement, values = post(50, key).compose({})
    seen = await look(session, statement, *values)
    assert {"edda_wait_key"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 50 * 150


async def test_another_round_of_messages_costs_no_more_than_the_first(session: Session) -> None:
    messages = post(50, CROWDED)
    statement, values = messages.compose_more({i: LAST + 1 + i for i in range(50)}, range(1, 51))
    seen = await look(session, statement, *values)
    assert statement == GIVE_MORE_MESSAGES
    assert {"edda_wait_key", "edda_delivery_once"} <= seen.indexes
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
            await look(session, SETTLE_SENT, [1]),
            await look(session, SETTLE_REFUSED, [1], [1], ["no"]),
            await look(session, SETTLE_POSTPONED, [1], [1], [1], ["no"]),
            await look(session, NEXT_OUTGOING),
            await look(session, RETRY, ["a"]),
            await look(session, OLD_OUTGOING, 1, 10),
            await look(session, DISPATCHES, 10),
            await look(session, FORWARD, [1, 2]),
            await look(session, TAKE, r"\x00", 1),
            await look(session, READ_RUNS, ["a"], [0], [0]),
            await look(session, DELETE_RUNS, ["a"]),
        ]
    assert not any(seen.read_whole for seen in looks)


@asynccontextmanager
async def empty() -> AsyncIterator[Session]:
    async with seeded() as url, session_at(url) as session:
        yield session
