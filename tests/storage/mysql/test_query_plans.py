"""With 90,000 ended and 10,000 waiting runs, no page reads rows that it does not show."""

from __future__ import annotations

import pytest

from edda.core.model import RunId
from edda.core.queries import EventQuery, RunQuery
from edda.core.states import RunStatus
from edda.storage.mysql.admin import LOCK_ENDED, RESUME, reopen_statements
from edda.storage.mysql.connection import MySQLSession
from edda.storage.mysql.queries import (
    CHANGE_TOKEN_PARTS,
    DURATIONS,
    ENDED,
    EVENT,
    LIST_WORKERS,
    NAMES,
    OLDEST_OF_FEW,
    READY,
    READY_TOKEN,
    RECEIVERS,
    STARTED,
    WAITING,
    due,
    event_page,
    waits_page,
)
from edda.storage.mysql.search import GENERATIONS, SCAN_LIMIT, count_statements, pages
from edda.storage.mysql.statement import Statement, bind
from tests.scale.seeds import statements

from .test_plans import Look, look, look_at

ENDED_RUNS, OPEN_RUNS = 90_000, 10_000
SOMEBODY = RunId("run00050000")
CREATED = b"SELECT created_at FROM edda_run WHERE id = %b"
SEEDS = tuple(statements("mysql", ENDED_RUNS, OPEN_RUNS))


async def look_for(session: MySQLSession, query: RunQuery) -> list[Look]:
    """The statements of a search, up to the one that fills the page."""
    looks = []
    for asked in pages(query):
        looks += await look_at(session, *asked)
        if looks[-1].rows >= query.limit:
            break
    return looks


def of(*statuses: RunStatus) -> RunQuery:
    return RunQuery(statuses=frozenset(statuses))


async def moment(session: MySQLSession, place: int) -> int:
    """When a run was created."""
    return int((await session.run(CREATED, f"run{place:08}")).rows[0][0])


async def ready_of(session: MySQLSession, template: bytes) -> Statement:
    return due(template, (await session.run(NAMES)).rows, 1_000)


@pytest.mark.parametrize(
    "query",
    [
        RunQuery(),
        RunQuery(workflow="workflow3"),
        RunQuery(workflow="rare"),
        RunQuery(workflow="unheard_of"),
        RunQuery(parent=SOMEBODY),
        RunQuery(id_prefix=SOMEBODY[:-2]),
        of(RunStatus.WAITING_FOR_EVENT),
    ],
    ids=["newest", "of a workflow", "of a rare one", "of none", "children", "by id", "waiting"],
)
async def test_a_page_reads_few_runs_besides_its_own(session: MySQLSession, query: RunQuery) -> None:
    assert sum(seen.reads for seen in await look_for(session, query)) < SCAN_LIMIT * 9


async def test_a_page_from_the_middle_begins_there(session: MySQLSession) -> None:
    middle = await moment(session, 50_000)
    for query in (
        RunQuery(after=(middle, SOMEBODY)),
        RunQuery(created_to=middle),
        RunQuery(created_from=middle - 10_000_000, created_to=middle, workflow="workflow3"),
    ):
        (seen,) = await look_for(session, query)
        assert seen.reads < 600


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.RECURRED])
async def test_a_rare_end_is_found_by_its_index(session: MySQLSession, status: RunStatus) -> None:
    glance, gathered = await look_for(session, of(status))
    assert "edda_result_status" in gathered.plan
    assert glance.reads < SCAN_LIMIT * 9
    assert gathered.reads < 500


@pytest.mark.parametrize("status", [RunStatus.PARKED, RunStatus.RUNNING, RunStatus.WAITING_FOR_TIMER])
async def test_what_is_open_is_looked_for_among_the_open_runs_alone(session: MySQLSession, status: RunStatus) -> None:
    _, gathered = await look_for(session, of(status))
    assert gathered.reads < OPEN_RUNS * 4


async def test_what_completed_is_found_behind_all_that_wait(session: MySQLSession) -> None:
    _, walked = await look_for(session, of(RunStatus.COMPLETED))
    assert walked.rows == 50
    assert walked.reads < OPEN_RUNS * 4


async def test_counting_stops_where_nobody_reads_on(session: MySQLSession) -> None:
    for query in (RunQuery(), RunQuery(workflow="workflow3"), RunQuery(id_prefix="run0000")):
        looks = await look_at(session, *count_statements(query))
        assert sum(seen.reads for seen in looks) < 120_000


async def test_counting_what_is_rare_reads_no_more_than_that(session: MySQLSession) -> None:
    (seen,) = await look_at(session, *count_statements(of(RunStatus.FAILED)))
    assert seen.reads < 100


async def test_events_are_read_from_the_newest_on(session: MySQLSession) -> None:
    for query in (
        EventQuery(),
        EventQuery(type="rare"),
        EventQuery(source="shop", id=SOMEBODY),
        EventQuery(before=1_000),
        EventQuery(messages=True),
    ):
        (seen,) = await look_at(session, event_page(query))
        assert seen.reads < 300


async def test_looking_at_one_thing_reads_that_alone(session: MySQLSession) -> None:
    looks = [
        await look(session, EVENT, 10),
        await look(session, RECEIVERS, 10, 100),
        await look(session, GENERATIONS, SOMEBODY),
        *await look_at(session, waits_page(None, ("run00097000", ""), 50)),
        await look(session, LIST_WORKERS),
    ]
    assert max(seen.reads for seen in looks) < 300


async def test_the_figures_read_what_they_speak_of(session: MySQLSession) -> None:
    since, until = await moment(session, 60_000), await moment(session, 62_400)
    span = (since, (until - since) // 24, since, until)
    looks = [
        await look(session, STARTED, *span),
        await look(session, ENDED, *span),
        await look(session, DURATIONS, since, 1_000),
        await look(session, OLDEST_OF_FEW, SCAN_LIMIT),
    ]
    assert max(seen.reads for seen in looks) < SCAN_LIMIT * 9
    ready, waiting = await look_at(session, await ready_of(session, READY), bind(WAITING, 10_000))
    assert ready.reads < 100
    assert waiting.reads < OPEN_RUNS * 3


async def test_the_mark_that_pages_watch_costs_next_to_nothing(session: MySQLSession) -> None:
    looks = await look_at(session, bind(NAMES), await ready_of(session, READY_TOKEN), *map(bind, CHANGE_TOKEN_PARTS))
    assert sum(seen.reads for seen in looks) < 200


async def test_what_people_do_touches_one_run(session: MySQLSession) -> None:
    looks = [await look(session, LOCK_ENDED, SOMEBODY), await look(session, RESUME, SOMEBODY)]
    # EXPLAIN does not accept SELECT INTO a variable.
    changes = [one for one in reopen_statements(SOMEBODY, 0, 1) if b" INTO @" not in one.body]
    await session.run(b"SET @edda_epoch = 1, @edda_read = 0, @edda_last_seen = 0")
    looks += await look_at(session, *changes)
    assert max(seen.reads for seen in looks) < 30
