"""With many runs, watchers and generations, a statement about a few of them reads no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from edda.core.model import AckInbox, Recur, RunId, RunWrite, WorkerId
from edda.storage.postgres.batch_sql import start_row
from edda.storage.postgres.connection import PostgresSession
from edda.storage.postgres.journal import build_batch
from edda.storage.postgres.pruning import DELETE_GENERATIONS, DELETE_RUNS, OLD_GENERATIONS
from edda.storage.postgres.runs import START, WATCH, WATCHERS
from tests.storage.records import child, done, end_signal, entry, run_write, start

from . import plans
from .plans import Look, seeded, session_at

# 100,000 open runs, all owned by "busy", each with one watcher and two generations; of the second half the first
# generation is pruned already.
SEEDS = (
    """
INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor, watchers)
SELECT 'run' || lpad(i::text, 8, '0'), 'workflow', 'running', 'busy', 1, 1, 0, 1 FROM generate_series(1, 100000) i""",
    """
INSERT INTO edda_run (id, generation, workflow, input, created_at)
SELECT run_id, g, 'workflow', '', g * substr(run_id, 4)::int FROM edda_open_run, generate_series(0, 1) g
 WHERE g = 1 OR run_id <= 'run00050000'""",
    """
INSERT INTO edda_history SELECT id, generation, 1, 1, 'step', '', '', true, 1, 1, NULL, NULL, '', '' FROM edda_run""",
    "INSERT INTO edda_watcher SELECT run_id, 'run00000001', 'child:1' FROM edda_open_run",
    "INSERT INTO edda_fence VALUES ('busy', 0, 0)",
    "INSERT INTO edda_claim SELECT worker, 0 FROM edda_fence",
    "VACUUM ANALYZE",
)

OPEN = 100_000
MOMENT = OPEN // 4
"""A quarter of the second generations is older, and so are their first generations."""


async def look(session: PostgresSession, statement: str, *values: object) -> Look:
    """A sequence has one row, and no index."""
    seen = await plans.look(session, statement, *values)
    return replace(seen, read_whole=seen.read_whole - {"edda_event_seq"})


def run(number: int) -> str:
    return f"run{number * 97:08}"


async def write(session: PostgresSession, batch: Iterable[RunWrite]) -> Look:
    statement, values = build_batch(WorkerId("busy"), list(batch))
    return await look(session, statement, "busy", 0, 0, 0, 0, 0, *values)


def telling(number: int) -> RunWrite:
    return run_write(run(number), transition=AckInbox(0), signals=[end_signal(run(number + 500))])


def parent(number: int) -> RunWrite:
    return run_write(run(number), transition=AckInbox(0), children=[child(f"new{number}", run(number))])


def watched(number: int) -> RunWrite:
    """Every other one does not know who watches."""
    return run_write(run(number), transition=done(watchers=number % 2), signals=[end_signal(run(number + 500))])


def recurring(number: int) -> RunWrite:
    return run_write(run(number), transition=Recur(0, b"again", 5_000, entry(1)), generation=1)


BATCHES = (telling, parent, watched, recurring)


@pytest.mark.parametrize("make", BATCHES)
async def test_a_batch_touches_the_runs_it_is_about(session: PostgresSession, make: Callable[[int], RunWrite]) -> None:
    seen = await write(session, map(make, range(1, 101)))
    assert "edda_open_run_pkey" in seen.indexes
    assert not seen.read_whole
    assert seen.pages < 100 * 60


@pytest.mark.parametrize("make", BATCHES)
async def test_what_is_in_a_batch_is_not_compared_with_each_other(
    session: PostgresSession, make: Callable[[int], RunWrite]
) -> None:
    few, many = [await write(session, map(make, range(1, 1 + count))) for count in (10, 100)]
    assert many.work < few.work * 15


async def test_an_end_removes_its_own_watchers_alone(session: PostgresSession) -> None:
    seen = await write(session, [run_write(run(1), transition=done(watchers=1))])
    assert seen.rows == 1
    assert {"edda_watcher_pkey", "edda_open_run_pkey"} <= seen.indexes
    assert not seen.read_whole
    assert seen.pages < 100


async def test_the_answer_names_the_ends_that_did_not_happen(session: PostgresSession) -> None:
    """The control: the statements of the plans above have written their rows."""
    seen = await write(session, map(watched, range(1, 101)))
    assert seen.rows == 1 + 50


async def test_runs_are_started_by_id(session: PostgresSession) -> None:
    known = [start_row(start(run(i))) for i in range(1, 51)]
    new = [start_row(start(f"new{i}")) for i in range(50)]
    seen = await look(session, START, [*new, *known])
    assert seen.rows == 50
    assert not seen.read_whole
    assert seen.pages < 100 * 20


async def test_watching_touches_one_run(session: PostgresSession) -> None:
    looks = [
        await look(session, WATCH, run(1), "run00000001", "child:2"),
        await look(session, WATCHERS, [run(i) for i in range(1, 11)]),
    ]
    assert [seen.rows for seen in looks] == [1, 10]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 100


async def test_pruning_generations_reads_little_more_than_it_removes(session: PostgresSession) -> None:
    old = await look(session, OLD_GENERATIONS, MOMENT, 100)
    gone = await look(session, DELETE_GENERATIONS, [run(i) for i in range(1, 101)], [0] * 100)
    assert old.rows == 100
    assert "edda_run_followed" in old.indexes
    assert not old.read_whole | gone.read_whole
    assert max(old.pages, gone.pages) < 100 * 30


async def test_pruning_finds_at_once_that_no_generation_is_old(session: PostgresSession) -> None:
    seen = await look(session, OLD_GENERATIONS, 1, 100)
    assert seen.rows == 0
    assert not seen.read_whole
    assert seen.pages < 40


async def test_a_plan_made_on_an_empty_database_is_one_for_a_large_one_already() -> None:
    async with seeded() as url, session_at(url) as session:
        looks = [
            *[await write(session, map(make, range(1, 11))) for make in BATCHES],
            await look(session, START, [start_row(start("a"))]),
            await look(session, WATCH, "a", "b", "child:1"),
            await look(session, WATCHERS, [RunId("a")]),
            await look(session, OLD_GENERATIONS, 1, 100),
            await look(session, DELETE_GENERATIONS, ["a"], [0]),
            await look(session, DELETE_RUNS, ["a"]),
        ]
    assert not any(seen.read_whole for seen in looks)
