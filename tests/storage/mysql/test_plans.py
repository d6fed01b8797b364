"""On a large table every query of the hot path stays on its index."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from edda.core.model import End, Fence, RunId, RunWrite, Suspend, WorkerId
from edda.core.states import RunStatus
from edda.storage.mysql.claims import (
    FIND_DUE,
    FIND_INBOXES,
    FIND_PARKED,
    READ_HISTORY,
    READ_RUNS,
    TAKE,
    next_due,
    read_inbox_items,
)
from edda.storage.mysql.connection import MySQLSession
from edda.storage.mysql.journal import OWNED, build_batch
from edda.storage.mysql.runs import NEWEST_FIRST, RECORDS
from edda.storage.mysql.statement import Statement, Value, bind
from edda.storage.mysql.workers import FIND_ORPHANED, FREE, RUNS_OF

# 0 to 99,999, without the servers' own series, which differ.
DIGITS = " UNION ALL ".join(f"SELECT {digit} AS d" for digit in range(10))
NUMBERS = f"""SELECT a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d AS i
    FROM ({DIGITS}) a, ({DIGITS}) b, ({DIGITS}) c, ({DIGITS}) e, ({DIGITS}) f"""

# Five workflows. Of ten runs two wait for an event, three for a timer, one is due, one is parked and three have
# an owner: one of three busy workers or, ten in all, a small one. One owned run in thirty has an unread item.
SEEDS = (
    f"""INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor, ready_at,
        inbox_count, inbox_read)
    SELECT CONCAT('run', LPAD(i, 8, '0')), CONCAT('workflow', i % 5),
           ELT(kind + 1, 'waiting_for_event', 'waiting_for_event', 'waiting_for_timer', 'waiting_for_timer',
               'waiting_for_timer', 'running', 'parked', 'running', 'running', 'running'),
           CASE WHEN i % 10000 = 35 THEN 'small' WHEN kind > 6 THEN CONCAT('busy', i % 3) END, 1, 0, 0,
           CASE WHEN kind = 5 THEN i WHEN kind IN (2, 3, 4, 6) THEN 4000000000000000 + i END, i % 100 = 37, 0
      FROM (SELECT i, i DIV 5 % 10 AS kind FROM ({NUMBERS}) n) x""",
    """INSERT INTO edda_run (id, generation, workflow, input, created_at)
    SELECT run_id, 0, workflow, '', ROW_NUMBER() OVER (ORDER BY run_id) FROM edda_open_run""",
    """INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value)
    SELECT run_id, 1, 'cancel', '', 1, '' FROM edda_open_run WHERE inbox_count = 1""",
    "INSERT INTO edda_fence (worker, batch_no, ownership_version)"
    " VALUES ('busy0', 0, 0), ('busy1', 0, 0), ('busy2', 0, 0)",
    "INSERT INTO edda_claim SELECT worker, 0 FROM edda_fence",
    "ANALYZE TABLE edda_open_run, edda_run, edda_inbox, edda_fence",
)

OWNED_BY_SMALL = [RunId(f"run{i * 10000 + 35:08}") for i in range(10)]

READS = b"SHOW SESSION STATUS WHERE Variable_name LIKE 'Handler\\_read%%'"


@dataclass(frozen=True)
class Look:
    """What one execution of a statement read."""

    plan: frozenset[object]
    """Every value of the plan's rows: 'ALL' is a scan of a whole table."""
    reads: int
    """Rows and index entries that were read, found or not."""
    rows: int


async def look(session: MySQLSession, template: bytes, *values: Value) -> Look:
    return (await look_at(session, bind(template, *values)))[0]


async def look_at(session: MySQLSession, *statements: Statement) -> list[Look]:
    """Execute the statements, and roll them back."""
    await session.run(b"START TRANSACTION")
    looks = []
    for statement in statements:
        plan = await session.send(Statement("EXPLAIN", b"EXPLAIN " + statement.body))
        idle = -await count_reads(session) + await count_reads(session)
        before = await count_reads(session)
        (reply,) = await session.send(statement)
        reads = await count_reads(session) - before - idle
        looks.append(Look(frozenset(word for row in plan[0].rows for word in row), reads, len(reply.rows)))
    await session.run(b"ROLLBACK")
    return looks


async def count_reads(session: MySQLSession) -> int:
    return sum(int(row[1]) for row in (await session.run(READS)).rows)


async def test_a_claim_reads_little_more_than_it_takes(session: MySQLSession) -> None:
    seen = await look(session, FIND_DUE, "workflow0", 10)
    assert seen.rows == 10
    assert "edda_open_run_ready" in seen.plan
    assert seen.reads <= 25


async def test_a_claim_does_not_walk_through_the_timers_of_the_future(session: MySQLSession) -> None:
    seen = await look(session, FIND_DUE.replace(b"UTC_TIMESTAMP(6)", b"'1970-01-01'"), "workflow0", 10)
    assert seen.rows <= 1
    assert seen.reads <= 4


async def test_taking_runs_touches_them_alone(session: MySQLSession) -> None:
    seen = await look(session, TAKE, "busy0", OWNED_BY_SMALL)
    assert "ALL" not in seen.plan
    assert seen.reads <= 40


@pytest.mark.parametrize("template", [READ_RUNS, READ_HISTORY])
async def test_what_a_claim_reads_afterwards_is_read_run_by_run(session: MySQLSession, template: bytes) -> None:
    seen = await look(session, template, OWNED_BY_SMALL)
    assert "ALL" not in seen.plan
    assert seen.reads <= 60


async def test_the_next_due_time_is_the_first_entry_of_its_name(session: MySQLSession) -> None:
    (seen,) = await look_at(session, next_due(["workflow0", "unheard_of"]))
    assert seen.reads <= 8


async def test_looking_for_inbox_costs_nothing_when_there_is_none(session: MySQLSession) -> None:
    seen = await look(session, FIND_INBOXES, "small")
    assert "edda_open_run_inbox" in seen.plan
    assert seen.reads <= 3


async def test_inbox_is_read_run_by_run(session: MySQLSession) -> None:
    found = await look(session, FIND_INBOXES, "busy0")
    assert 300 < found.rows < 360
    assert found.reads <= found.rows + 2
    (read,) = await look_at(session, *read_inbox_items((await session.run(FIND_INBOXES, "busy0")).rows))
    assert read.rows == found.rows
    assert read.reads <= read.rows * 4


async def test_what_a_worker_owns_is_found_by_its_owner(session: MySQLSession) -> None:
    for template, values in ((OWNED, ()), (RUNS_OF, (5000,))):
        seen = await look(session, template, "small", *values)
        assert seen.rows == 10
        assert "edda_open_run_owner" in seen.plan
        assert seen.reads <= 12


async def test_freeing_the_runs_of_a_small_worker_does_not_touch_the_others(session: MySQLSession) -> None:
    seen = await look(session, FREE, OWNED_BY_SMALL, "small")
    assert "ALL" not in seen.plan
    assert seen.reads <= 40


async def test_orphans_are_looked_for_owner_by_owner(session: MySQLSession) -> None:
    seen = await look(session, FIND_ORPHANED)
    assert seen.rows == 1  # the small worker has no fence
    assert seen.reads <= 60


async def test_a_batch_touches_the_runs_it_is_about(session: MySQLSession) -> None:
    release = Suspend(0, None, RunStatus.WAITING_FOR_EVENT)
    end = End(RunStatus.COMPLETED, b"", 1)
    batch = [RunWrite(run, 1, 0, transition=release if i % 2 else end) for i, run in enumerate(OWNED_BY_SMALL)]
    statements = build_batch(Fence(WorkerId("busy0"), 0, 0), batch, 1_000_000)
    on_open_run = [statement for statement in statements if b"edda_open_run" in statement.body]
    assert len(on_open_run) == 3  # lock, release, end
    for seen in await look_at(session, *on_open_run):
        assert seen.reads <= 60


async def test_unparking_one_workflow_leaves_the_others_alone(session: MySQLSession) -> None:
    seen = await look(session, FIND_PARKED, ["unheard_of"])
    assert "edda_open_run_parked" in seen.plan
    assert seen.reads <= 2


async def test_a_page_of_runs_is_read_from_the_newest_on(session: MySQLSession) -> None:
    seen = await look(session, RECORDS + NEWEST_FIRST, 50)
    assert seen.rows == 50
    assert "edda_run_created" in seen.plan
    assert seen.reads <= 50 * 6


async def test_the_look_notices_a_query_that_has_left_its_index(session: MySQLSession) -> None:
    """The control: without its index the claim reads far more rows than it claims."""
    seen = await look(session, FIND_DUE.replace(b"FORCE", b"IGNORE"), "workflow0", 10)
    assert seen.reads > 1000
