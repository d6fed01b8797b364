"""With 100,000 outbox events, messages, staged events and exclusive waits, statements read through indexes only."""

from __future__ import annotations

import pytest

from edda.core.model import AckInbox, Event, EventKey, NewEvent, RunId, RunWrite, Wait
from edda.storage.mysql.accept_sql import FIND_OF_RUN, FIND_SOME, WaitLookup, delete_staged, lookup_statements
from edda.storage.mysql.claims import READ_STEP_COMMITS
from edda.storage.mysql.connection import MySQLSession
from edda.storage.mysql.decisions import ExclusiveMessages, find_events
from edda.storage.mysql.events import FIND_FIRST, STAGED_EVENTS, TAKE
from edda.storage.mysql.journal import insert_side_effects
from edda.storage.mysql.outbox import (
    CLAIM,
    DELAY_KEY,
    FIND,
    FIND_DEAD,
    FIND_IN_STATE,
    FIND_OF_KEY,
    FIND_PENDING,
    NEXT,
    POSTPONE,
    READ,
    REJECTED,
    SENT,
    find_blocking,
    find_due_page,
)
from edda.storage.mysql.pruning import DELETE_SENT, FIND_SENT
from edda.storage.mysql.runs import RUN_VALUE, RUN_VALUES
from edda.storage.mysql.statement import Statement, join_values
from edda.storage.mysql.transactions import STEP_COMMIT

from .test_plans import NUMBERS, look, look_at

# Of a hundred outbox events twenty are new, of a busy key or of a quiet one; one was tried and is due again; thirty are
# not due; one is dead; the rest were sent, at the time of their number. All messages are under one key, and all runs
# wait under another. Each run has a step commit and a value.
SEEDS = (
    f"""INSERT INTO edda_outbox (id, order_key, type, source, body, created_at, due, attempts, state, ended_at)
    SELECT CONCAT('event', i),
           CASE WHEN k < 10 THEN 'busy' WHEN k < 21 THEN CONCAT('quiet', i % 1000) ELSE CONCAT('late', i % 100) END,
           'type', 'source', REPEAT('x', 100), 1,
           CASE WHEN k < 20 THEN 0 WHEN k = 20 THEN 1000 + i WHEN k < 51 THEN 4000000000000000 + i ELSE 1 END,
           k >= 20, CASE WHEN k < 51 THEN 'pending' WHEN k = 51 THEN 'dead' ELSE 'sent' END, CASE WHEN k > 50 THEN i END
      FROM (SELECT i, i % 100 AS k FROM ({NUMBERS}) n) x ORDER BY i""",
    f"INSERT INTO edda_staged_event (kind, body, due) SELECT 'message', 'x', 0 FROM ({NUMBERS}) n",
    f"""INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor)
    SELECT CONCAT('run', LPAD(i, 8, '0')), 'checkout', 'running', 'worker', 1, 0, 0 FROM ({NUMBERS}) n""",
    """INSERT INTO edda_wait (run_id, step, `key`, target_key, type, `match`, exclusive)
    SELECT run_id, 'w', UNHEX(MD5('jobs')), UNHEX(MD5(run_id)), 'type', '', TRUE FROM edda_open_run""",
    f"INSERT INTO edda_event_key SELECT UNHEX(MD5('stock')), i + 1 FROM ({NUMBERS}) n",
    "INSERT INTO edda_step_commit SELECT run_id, 0, 'pay:1', 1, 'x', 1 FROM edda_open_run",
    "INSERT INTO edda_run_value SELECT run_id, 'progress', 'x', 1 FROM edda_open_run",
    """ANALYZE TABLE edda_outbox, edda_staged_event, edda_open_run, edda_wait, edda_event_key,
    edda_step_commit, edda_run_value""",
)

RUNS = [RunId(f"run{i:08}") for i in range(10)]
LATE = 4_000_000_000_000_000


async def key(session: MySQLSession, name: str) -> bytes:
    return bytes((await session.run(b"SELECT UNHEX(MD5(%b))", name)).rows[0][0])


# The outbox


async def test_a_page_of_new_events_is_read_in_order_and_no_further(session: MySQLSession) -> None:
    (seen,) = await look_at(session, find_due_page(0, (), 50))
    assert seen.rows == 50
    assert "edda_outbox_due" in seen.plan
    assert seen.reads <= 1_000 + 6 * 50  # those that were tried and are due again are sorted


def at_the_beginning_of_time() -> Statement:
    """A page when nothing is new, and nothing due."""
    body = find_due_page(0, (), 50).body.replace(b"due = 0", b"due = -1").replace(b"UTC_TIMESTAMP(6)", b"'1970-01-01'")
    assert b"due = -1" in body
    assert b"'1970-01-01')" in body
    return Statement("", body)


async def test_looking_for_due_events_costs_nothing_when_there_are_none(session: MySQLSession) -> None:
    (seen,) = await look_at(session, at_the_beginning_of_time())
    assert seen.rows == 0
    assert seen.reads <= 8


async def test_the_control_a_page_without_its_index_reads_all_that_is_pending(session: MySQLSession) -> None:
    statement = at_the_beginning_of_time()
    (seen,) = await look_at(session, Statement("", statement.body.replace(b"FORCE", b"IGNORE")))
    assert seen.reads > 10_000


async def test_what_is_behind_another_is_passed_over_within_the_index(session: MySQLSession) -> None:
    (seen,) = await look_at(session, find_due_page(0, [b"busy"], 50))
    assert seen.rows == 50
    assert seen.reads <= 2_000


async def test_an_obstacle_is_looked_for_among_the_first_of_its_key(session: MySQLSession) -> None:
    (free,) = await look_at(session, *find_blocking({b"busy": 500}, LATE // 2))
    assert free.rows == 0
    assert free.reads <= 60  # the earlier events of the key
    (held,) = await look_at(session, *find_blocking({b"late%d" % n: 2**40 for n in range(21, 51)}, LATE // 2))
    assert held.rows == 30
    assert held.reads <= 4 * 30


async def test_events_are_read_and_claimed_by_their_numbers(session: MySQLSession) -> None:
    numbers = range(1, 2_000, 20)
    for template, values in ((READ, ()), (CLAIM, (5,)), (DELAY_KEY, (5,)), (SENT, ())):
        seen = await look(session, template, *values, numbers)
        assert "ALL" not in seen.plan
        assert seen.reads <= 4 * len(numbers)


async def test_receipts_touch_the_events_they_are_of(session: MySQLSession) -> None:
    rows = [b"SELECT %d AS seq, 0 AS attempts, 5 AS due, 'why' AS reason" % seq for seq in range(1, 2_000, 20)]
    for template in (REJECTED, FIND_PENDING, POSTPONE):
        (seen,) = await look_at(session, *join_values(template, rows))
        assert seen.reads <= 8 * len(rows)


async def test_the_others_of_a_key_are_found_by_it(session: MySQLSession) -> None:
    seen = await look(session, FIND_OF_KEY, "late21", 5 * LATE)
    assert seen.rows == 1_000
    assert seen.reads <= 1_002
    assert (await look(session, FIND_OF_KEY, "unheard of", 5 * LATE)).reads <= 2


async def test_the_next_due_time_is_the_first_entry_of_the_index(session: MySQLSession) -> None:
    seen = await look(session, NEXT)
    assert seen.rows == 1
    assert seen.reads <= 2


@pytest.mark.parametrize("state", ["pending", "sent", "dead"])
async def test_a_page_of_a_state_is_read_from_its_number_on(session: MySQLSession, state: str) -> None:
    seen = await look(session, FIND_IN_STATE, state, 50_000, 50)
    assert seen.rows == 50
    assert seen.reads <= 52
    seen = await look(session, FIND, 50_000, 50)
    assert seen.rows == 50
    assert seen.reads <= 52


async def test_the_dead_are_found_among_all_others(session: MySQLSession) -> None:
    seen = await look(session, FIND_DEAD)
    assert seen.rows == 1_000
    assert seen.reads <= 1_002


async def test_what_is_pruned_is_found_by_its_end(session: MySQLSession) -> None:
    seen = await look(session, FIND_SENT, 50_000, 100)
    assert seen.rows == 100
    assert "edda_outbox_ended" in seen.plan
    assert seen.reads <= 2 * 102
    assert (await look(session, FIND_SENT, 50, 100)).reads <= 4
    (seen,) = await look_at(session, *join_values(DELETE_SENT, [b"SELECT %d AS seq" % seq for seq in range(60, 99)]))
    assert seen.reads <= 8 * 39


# Staged events


async def test_the_first_staged_events_are_read_and_no_others(session: MySQLSession) -> None:
    seen = await look(session, STAGED_EVENTS, 50)
    assert seen.rows == 50
    assert seen.reads <= 52


async def test_forwarding_touches_the_staged_events_it_is_about(session: MySQLSession) -> None:
    (delete, _) = delete_staged(range(1, 500, 5))
    (seen,) = await look_at(session, delete)
    assert seen.reads <= 8 * 100


# Exclusive messages


async def test_a_message_looks_at_a_few_of_those_who_compete(session: MySQLSession) -> None:
    jobs = await key(session, "jobs")
    post = [
        NewEvent(Event("shop", "1", "type", None, b""), (EventKey(jobs, jobs, exclusive=True),)),
        NewEvent(Event("shop", "2", "type", RUNS[5], b""), (EventKey(jobs, b"x" * 16, exclusive=True),)),
    ]
    seen = {}
    for statement in lookup_statements(WaitLookup(post, 8), ()):
        if statement.label.encode() in (FIND_SOME, FIND_OF_RUN):
            (seen[statement.label.encode()],) = await look_at(session, statement)
    assert seen[FIND_SOME].rows == 10
    assert seen[FIND_SOME].reads <= 12
    assert seen[FIND_OF_RUN].rows == 1
    assert seen[FIND_OF_RUN].reads <= 4


async def test_who_asks_for_a_message_reads_the_first_ones(session: MySQLSession) -> None:
    stock, own = await key(session, "stock"), await key(session, "nobody's")
    run_writes = [
        RunWrite(run, 1, 0, transition=AckInbox(0), waits=(Wait("w", stock, own, "type", b"", exclusive=True),))
        for run in RUNS
    ]
    statements = list(find_events(run_writes))
    seen = await look_at(session, *statements)
    assert sum(each.rows for each in seen) == sum(range(1, 11))
    assert sum(each.reads for each in seen) <= 6 * sum(range(1, 11))
    found = ExclusiveMessages(row for reply in await session.send(*statements) for row in reply.rows)
    assert [found.take_lowest(i, ()) for i in range(10)] == list(range(1, 11))
    (delete, _) = found.statements()
    (seen_by_delete,) = await look_at(session, delete)
    assert seen_by_delete.reads <= 8 * 10


async def test_taking_a_message_reads_the_first_of_its_key(session: MySQLSession) -> None:
    stock = await key(session, "stock")
    seen = await look(session, FIND_FIRST, stock)
    assert seen.rows == 1
    assert seen.reads <= 2
    assert (await look(session, TAKE, stock, 1)).reads <= 2


# Step commits and run values


async def test_steps_that_are_done_are_found_run_by_run(session: MySQLSession) -> None:
    seen = await look(session, READ_STEP_COMMITS, RUNS)
    assert seen.rows == 10
    assert "ALL" not in seen.plan
    assert seen.reads <= 60
    assert (await look(session, STEP_COMMIT, RUNS[0], 0, "pay:1")).reads <= 2
    (seen,) = await look_at(
        session, *insert_side_effects([RunWrite(run, 1, 0, recorded_steps=("pay:1",)) for run in RUNS], 1_000_000)
    )
    assert seen.reads <= 60


async def test_the_values_of_a_run_are_found_by_its_id(session: MySQLSession) -> None:
    assert (await look(session, RUN_VALUES, RUNS[0])).reads <= 2
    assert (await look(session, RUN_VALUE, RUNS[0], "progress")).reads <= 2
