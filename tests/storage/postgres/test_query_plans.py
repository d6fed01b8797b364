"""With 90,000 ended and 10,000 waiting runs, no page reads rows that it does not show."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from edda.core.model import RunId
from edda.core.queries import EventQuery, RunQuery
from edda.core.states import RunStatus
from edda.storage.postgres import queries, search
from edda.storage.postgres.admin import AUDITS, IS_OPEN, LOCK_ENDED, REOPEN, RESUME
from edda.storage.postgres.connection import PostgresSession
from edda.storage.postgres.pool import PostgresConnectionFactory
from edda.storage.postgres.queries import (
    BACKLOG,
    CHANGE_TOKEN,
    DURATIONS,
    ENDED,
    EVENT,
    LIST_WAITS,
    LIST_WORKERS,
    RECEIVERS,
    STARTED,
    event_page,
)
from edda.storage.postgres.search import GENERATIONS, count_statement, pages
from edda.storage.postgres.target import PostgresTarget
from edda.storage.shared.named_parameters import bind_positional
from tests.scale.seeds import statements

from .plans import Look, look

ENDED_RUNS, OPEN_RUNS = 90_000, 10_000
SOMEBODY = RunId("run00050000")
EVER = 2**63 - 1
SEEDS = tuple(statements("postgres", ENDED_RUNS, OPEN_RUNS))


@pytest.fixture
async def session(url: str) -> AsyncIterator[PostgresSession]:
    """A session as the storage opens it for people's queries."""
    session = await PostgresConnectionFactory(PostgresTarget(url, 0), probe=None, is_query=True).connect(None)
    yield session
    await session.close()


async def look_for(session: PostgresSession, query: RunQuery) -> list[Look]:
    """The statements of a search, up to the one that fills the page."""
    looks = []
    for page in pages(query):
        statement, values = bind_positional(page, search._values(query))
        looks.append(await look(session, statement, *values))
        if looks[-1].rows >= query.limit:
            break
    return looks


async def count(session: PostgresSession, query: RunQuery) -> Look:
    statement, values = bind_positional(count_statement(query), search._values(query))
    return await look(session, statement, *values)


def of(*statuses: RunStatus) -> RunQuery:
    return RunQuery(statuses=frozenset(statuses))


async def moment(session: PostgresSession, place: int) -> int:
    """When a run was created."""
    created: int = (await session.fetch("SELECT created_at FROM edda_run WHERE id = $1", f"run{place:08}"))[0][0]
    return created


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
async def test_a_page_reads_few_runs_besides_its_own(session: PostgresSession, query: RunQuery) -> None:
    looks = await look_for(session, query)
    assert not any(seen.read_whole for seen in looks)
    assert sum(seen.work for seen in looks) < search.SCAN_LIMIT * 9


async def test_a_page_from_the_middle_begins_there(session: PostgresSession) -> None:
    middle = await moment(session, 50_000)
    for query in (
        RunQuery(after=(middle, SOMEBODY)),
        RunQuery(created_to=middle),
        RunQuery(created_from=middle - 10_000_000, created_to=middle, workflow="workflow3"),
    ):
        (seen,) = await look_for(session, query)
        assert not seen.read_whole
        assert seen.work < 600


async def test_the_page_behind_one_of_a_status_begins_where_that_ended(session: PostgresSession) -> None:
    middle = await moment(session, 50_000)
    query = RunQuery(statuses=frozenset({RunStatus.COMPLETED}), after=(middle, SOMEBODY))
    (seen,) = await look_for(session, query)
    assert seen.rows == 50
    assert seen.work < 600


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.RECURRED])
async def test_a_rare_end_is_found_by_its_index(session: PostgresSession, status: RunStatus) -> None:
    glance, gathered = await look_for(session, of(status))
    assert not glance.read_whole | gathered.read_whole
    assert "edda_result_status" in gathered.indexes
    assert glance.work < search.SCAN_LIMIT * 9
    assert gathered.work < 500


@pytest.mark.parametrize("status", [RunStatus.PARKED, RunStatus.RUNNING, RunStatus.WAITING_FOR_TIMER])
async def test_what_is_open_is_looked_for_among_the_open_runs_alone(
    session: PostgresSession, status: RunStatus
) -> None:
    _, gathered = await look_for(session, of(status))
    assert gathered.read_whole <= {"edda_open_run"}
    assert gathered.work < OPEN_RUNS * 4


async def test_what_completed_is_found_behind_all_that_wait(session: PostgresSession) -> None:
    _, walked = await look_for(session, of(RunStatus.COMPLETED))
    assert walked.rows == 50
    assert not walked.read_whole
    assert walked.work < OPEN_RUNS * 2


async def test_counting_stops_where_nobody_reads_on(session: PostgresSession) -> None:
    for query in (RunQuery(), RunQuery(workflow="workflow3"), RunQuery(id_prefix="run0000")):
        seen = await count(session, query)
        assert seen.read_whole <= {"edda_open_run", "edda_result"}  # and of the latter no more than is counted
        assert seen.work < 80_000


async def test_counting_what_is_rare_reads_no_more_than_that(session: PostgresSession) -> None:
    failed = await count(session, of(RunStatus.FAILED))
    assert not failed.read_whole
    assert failed.work < 100


async def test_events_are_read_from_the_newest_on(session: PostgresSession) -> None:
    for query in (
        EventQuery(),
        EventQuery(type="rare"),
        EventQuery(source="shop", id=SOMEBODY),
        EventQuery(before=1_000),
        EventQuery(messages=True),
    ):
        statement, values = bind_positional(event_page(query), queries._values(query))
        seen = await look(session, statement, *values)
        assert not seen.read_whole
        assert seen.pages < 300


async def test_looking_at_one_thing_reads_that_alone(session: PostgresSession) -> None:
    looks = [
        await look(session, EVENT, 10),
        await look(session, RECEIVERS, 10, 100),
        await look(session, GENERATIONS, SOMEBODY),
        await look(session, LIST_WAITS, None, "run00097000", "", 50),
        await look(session, AUDITS, EVER, 50),
        await look(session, IS_OPEN, SOMEBODY),
        await look(session, LIST_WORKERS),
    ]
    assert not any(seen.read_whole - {"edda_worker"} for seen in looks)
    assert max(seen.pages for seen in looks) < 400


async def test_the_figures_read_what_they_speak_of(session: PostgresSession) -> None:
    since = await moment(session, 60_000)
    backlog = await look(session, BACKLOG)
    assert backlog.read_whole <= {"edda_open_run"}
    assert backlog.work < OPEN_RUNS * 8
    width = (await moment(session, 62_400) - since) // 24
    looks = [
        await look(session, STARTED, since, width, 24),
        await look(session, ENDED, since, width, 24),
        await look(session, DURATIONS, since, 1_000),
    ]
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.work for seen in looks) < 8_000


async def test_the_mark_that_pages_watch_costs_next_to_nothing(session: PostgresSession) -> None:
    seen = await look(session, CHANGE_TOKEN)
    assert seen.read_whole <= {"edda_fence", "edda_definition", "edda_event_schema", "edda_event_seq"}
    assert seen.pages < 200


async def test_what_people_do_touches_one_run(url: str) -> None:
    session = await PostgresConnectionFactory(PostgresTarget(url, 0), probe=None).connect(None)
    looks = [
        await look(session, LOCK_ENDED, SOMEBODY),
        await look(session, REOPEN, SOMEBODY, 0, 1),
        await look(session, RESUME, SOMEBODY),
    ]
    await session.close()
    assert not any(seen.read_whole for seen in looks)
    assert max(seen.pages for seen in looks) < 150
