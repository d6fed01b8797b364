"""With many events and waits, a statement about a few of them reads no others."""

from __future__ import annotations

from collections.abc import Iterable

from edda.core.model import Event, EventKey, NewEvent, RunId, RunWrite, Start, Suspend, Wait, WorkerId
from edda.core.states import RunStatus
from edda.storage.postgres.accept_sql import ACCEPT, ACCEPT_AND_START, DELIVER_MORE, AcceptBatch
from edda.storage.postgres.claims import READ_INBOXES, READ_RUNS
from edda.storage.postgres.connection import PostgresSession
from edda.storage.postgres.events import (
    BACKFILL_KEYS,
    EVENTS_OF_TYPE,
    EVENTS_UNDER_KEY,
    FIND_EVENT,
    LAST_EVENT_BEFORE,
    MATCH_PATHS,
    REGISTER_PATHS,
    WAITS,
)
from edda.storage.postgres.journal import build_batch
from edda.storage.postgres.pruning import (
    DELETE_EVENTS,
    DELETE_INBOX_ITEMS,
    DELETE_KEYS,
    DELETE_RUNS,
    OLD_EVENTS,
    OLD_INBOX_ITEMS,
    OLD_KEYS,
    OLD_RUNS,
)

from .plans import Look, look, seeded, session_at

# 100,000 runs, each waiting under a key of its own, and one in a thousand owned by "busy". 100,000 events; the first
# thousand has lost its keys, the others have one of their own without waits, and all of them BUSY. Every run has read
# an item with the event of its number, and the owned ones have another with the last event. And 100,000 runs have
# ended, with an item each.
SEEDS = (
    """
INSERT INTO edda_event (seq, source, id, type, received_at, body)
SELECT i, 'shop', 'e' || i, 'type' || i % 10, i, '' FROM generate_series(1, 100000) i""",
    "SELECT setval('edda_event_seq', 100000)",
    """
INSERT INTO edda_event_key (key, seq)
SELECT key, i FROM generate_series(1001, 100000) i,
       LATERAL (VALUES ('\\xb5'::bytea), (decode('e0' || lpad(to_hex(i), 8, '0'), 'hex'))) k (key)""",
    """
INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor, inbox_count, inbox_read)
SELECT 'run' || lpad(i::text, 8, '0'), 'workflow', 'waiting_for_event', CASE WHEN i % 1000 = 7 THEN 'busy' END, 1, 0, 0,
       1 + (i % 1000 = 7)::int, 1 FROM generate_series(1, 100000) i""",
    """
INSERT INTO edda_run (id, generation, workflow, input, created_at)
SELECT 'run' || lpad(i::text, 8, '0'), 0, 'workflow', '', i FROM generate_series(1, 100000) i""",
    """
INSERT INTO edda_wait (run_id, step, key, target_key, type, match)
SELECT 'run' || lpad(i::text, 8, '0'), '1', decode('aa' || lpad(to_hex(i), 8, '0'), 'hex'),
       decode('bb' || lpad(to_hex(i), 8, '0'), 'hex'), 'type', '' FROM generate_series(1, 100000) i""",
    """
INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value, event)
SELECT 'run' || lpad(i::text, 8, '0'), 1, 'event', '0', i, '', i FROM generate_series(1, 100000) i""",
    """
INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value, event)
SELECT 'run' || lpad(i::text, 8, '0'), 2, 'event', '1', i, '', 100000 FROM generate_series(7, 100000, 1000) i""",
    """
INSERT INTO edda_result (run_id, generation, status, value, ended_at)
SELECT 'done' || i, 0, 'completed', '', i FROM generate_series(1, 100000) i""",
    "INSERT INTO edda_inbox SELECT run_id, 1, 'cancel', '', ended_at, '' FROM edda_result",
    "INSERT INTO edda_run SELECT run_id, 0, 'workflow', '', 0 FROM edda_result",
    "INSERT INTO edda_history SELECT run_id, 0, 1, 1, 'step', '', '', true, 1, 1, NULL, NULL, '', '' FROM edda_result",
    "INSERT INTO edda_event_type SELECT 'type' || i, 1 FROM generate_series(0, 9) i",
    "INSERT INTO edda_match_paths SELECT 'type' || i, '', 0 FROM generate_series(0, 9) i",
    "INSERT INTO edda_fence VALUES ('busy', 0, 0)",
    "INSERT INTO edda_claim SELECT worker, 0 FROM edda_fence",
    "VACUUM ANALYZE",
)

LAST = 100_000
BUSY = b"\xb5"
MOMENT = LAST // 2
"""Half of all rows are older."""

OWNED = [f"run{i:08}" for i in range(1007, LAST, 1000)]

OLD = (OLD_KEYS, OLD_EVENTS, OLD_INBOX_ITEMS, OLD_RUNS)


def key(kind: int, number: int) -> bytes:
    return bytes([kind]) + number.to_bytes(4, "big")


def post(keys: Iterable[bytes], starts: tuple[Start, ...] = ()) -> AcceptBatch:
    return AcceptBatch.of(
        [
            NewEvent(Event("shop", f"new{i}", f"type{i % 10}", None, b"{}"), (EventKey(key, key),), starts)
            for i, key in enumerate(keys)
        ]
    )


VERSIONS = {f"type{i}": 1 for i in range(10)}
MET = [key(0xAA, i * 900) for i in range(1, 101)]
"""A hundred keys with one wait each."""


def idle(count: int) -> Iterable[tuple[int, str]]:
    """Runs without unread items."""
    return ((i, f"run{i * 900:08}") for i in range(1, count + 1))


async def register(session: PostgresSession, waits: Iterable[tuple[str, Wait]]) -> Look:
    release = Suspend(1, None, RunStatus.WAITING_FOR_EVENT)
    batch = [RunWrite(RunId(run), 1, 0, transition=release, waits=(wait,)) for run, wait in waits]
    statement, values = build_batch(WorkerId("busy"), batch)
    return await look(session, statement, "busy", 0, 0, 0, 0, 0, *values)


async def test_a_post_touches_the_runs_that_wait_for_it(session: PostgresSession) -> None:
    statement, values = post(MET).compose(VERSIONS)
    seen = await look(session, statement, *values)
    assert statement == ACCEPT
    assert {"edda_wait_key", "edda_wait_pkey", "edda_open_run_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 100 * 60


async def test_the_events_of_a_post_are_not_compared_with_each_other(session: PostgresSession) -> None:
    few, many = [await look(session, ACCEPT, *post(MET[:count]).compose(VERSIONS)[1]) for count in (10, 100)]
    assert many.work < few.work * 15


async def test_a_post_that_starts_runs_reads_no_others(session: PostgresSession) -> None:
    starts = tuple(Start(RunId(f"new{i}"), "workflow", b"", 1) for i in range(10))
    statement, values = post([key(0xCC, 1)], starts).compose(VERSIONS)
    seen = await look(session, statement, *values)
    assert statement == ACCEPT_AND_START
    assert not seen.read_whole
    assert seen.pages < 400  # each of the ten goes into five indexes


async def test_another_round_of_a_post_costs_no_more_than_the_first(session: PostgresSession) -> None:
    statement, values = post(MET).compose_more({i: LAST + i for i in range(100)})
    seen = await look(session, statement, *values)
    assert {"edda_wait_key", "edda_inbox_event"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 100 * 60


async def test_waits_that_find_nothing_are_registered_by_key(session: PostgresSession) -> None:
    seen = await register(
        session, ((run, Wait("2", key(0xCC, i), BUSY, "t", b"", cursor=LAST)) for i, run in idle(100))
    )
    assert seen.rows == 1
    assert {"edda_event_key_pkey", "edda_open_run_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 100 * 60


async def test_the_waits_of_a_batch_are_not_compared_with_each_other(session: PostgresSession) -> None:
    few, many = [
        await register(session, ((run, Wait("2", key(0xCC, i), key(0xDD, i), "t", b"")) for i, run in idle(count)))
        for count in (10, 100)
    ]
    assert many.work < few.work * 15


async def test_a_wait_under_a_busy_key_looks_behind_its_cursor_only(session: PostgresSession) -> None:
    wait = Wait("2", BUSY, key(0xCC, 1), "t", b"", cursor=LAST - 10)
    seen = await register(session, [("run00000001", wait)])
    assert seen.rows == 2  # the fence, and the refused wait
    assert {"edda_event_key_pkey", "edda_inbox_event"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 100


async def test_a_run_that_had_an_event_steps_over_that_one_alone(session: PostgresSession) -> None:
    wait = Wait("2", BUSY, key(0xCC, 1), "t", b"", cursor=500 - 1)
    seen = await register(session, [("run00000500", wait)])
    assert seen.rows == 2
    assert seen.pages < 100


async def test_drops_and_frees_touch_their_own_rows(session: PostgresSession) -> None:
    transition = Suspend(2, None, RunStatus.WAITING_FOR_TIMER)
    batch = [
        RunWrite(RunId(run), 1, 0, transition=transition, cancelled_waits=("1",), released_items=(2,))
        for run in OWNED[:50]
    ]
    statement, values = build_batch(WorkerId("busy"), batch)
    seen = await look(session, statement, "busy", 0, 0, 0, 0, 0, *values)
    assert {"edda_wait_pkey", "edda_inbox_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 50 * 60


async def test_inbox_brings_the_bodies_of_its_events_alone(session: PostgresSession) -> None:
    seen = await look(session, READ_INBOXES, "busy")
    assert seen.rows == 100
    assert {"edda_open_run_inbox", "edda_inbox_pkey", "edda_event_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 100 * 15


async def test_a_claim_reads_the_waits_and_the_inbox_of_its_runs(session: PostgresSession) -> None:
    runs = await look(session, READ_RUNS, OWNED[:10], [0] * 10, [1] * 10)
    assert runs.rows == 10
    assert not runs.read_whole
    assert runs.pages < 300


async def test_looking_at_the_log_follows_its_indexes(session: PostgresSession) -> None:
    looks = [
        await look(session, EVENTS_OF_TYPE, "type3", 50_000, LAST, 50),
        await look(session, EVENTS_UNDER_KEY, BUSY, 50_000, 50),
        await look(session, LAST_EVENT_BEFORE, MOMENT),
        await look(session, FIND_EVENT, "shop", "e77"),
        await look(session, MATCH_PATHS, ["type3", "unheard_of"]),
        await look(session, WAITS, OWNED[0]),
        await look(session, REGISTER_PATHS, "type3", "order"),
        await look(session, BACKFILL_KEYS, "type3", "", [key(0xEE, i) for i in range(10)], list(range(1, 11)), 0),
    ]
    assert not any(seen.read_whole for seen in looks)
    assert [seen.rows for seen in looks[:6]] == [50, 50, 1, 1, 1, 1]
    assert max(seen.pages for seen in looks) < 300


async def test_pruning_reads_little_more_than_it_removes(session: PostgresSession) -> None:
    looks = [await look(session, find, MOMENT, 100) for find in OLD]
    assert [seen.rows for seen in looks] == [100] * 4
    assert not any(seen.read_whole for seen in looks)
    leading = ("edda_event_pkey", "edda_event_received", "edda_inbox_at", "edda_result_ended")
    assert all(index in seen.indexes for index, seen in zip(leading, looks, strict=True))
    assert max(seen.pages for seen in looks) < 100 * 20


async def test_pruning_removes_by_key(session: PostgresSession) -> None:
    looks = [
        await look(session, DELETE_KEYS, list(range(2001, 2101))),
        await look(session, DELETE_EVENTS, list(range(1, 101))),
        await look(session, DELETE_INBOX_ITEMS, OWNED, [1] * len(OWNED)),
        await look(session, DELETE_RUNS, [f"done{i}" for i in range(100)]),
    ]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 100 * 40


async def test_pruning_finds_at_once_that_nothing_is_old(session: PostgresSession) -> None:
    looks = [await look(session, find, 1, 100) for find in OLD]
    assert not any(seen.rows or seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 40


async def test_a_plan_made_on_an_empty_database_is_one_for_a_large_one_already() -> None:
    async with seeded() as url, session_at(url) as session:
        looks = [
            await look(session, ACCEPT, *post(MET).compose({})[1]),
            await look(session, DELIVER_MORE, *post(MET).compose_more({i: i for i in range(100)})[1]),
            await register(session, ((run, Wait("2", key(0xCC, i), BUSY, "t", b"")) for i, run in idle(10))),
            *[await look(session, find, 1, 100) for find in OLD],
        ]
    assert not any(seen.read_whole for seen in looks)
