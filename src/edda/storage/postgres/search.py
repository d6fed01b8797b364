"""Runs that people look for.

A page is read from the newest run on. Where the newest few thousand do not fill it, what is looked for is rare among
them, and is gathered from where it is kept and sorted: the planner would go on through all there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from edda.core.model import RunId, RunRecord
from edda.core.queries import MAX_COUNT, Generation, RunQuery
from edda.core.states import ENDED, OPEN, RunStatus

from .parameters import bind
from .pool import Pool
from .rows import record_of
from .runs import OPEN_STATUS, VIEW_COLUMNS, VIEW_STATES

_LAST = "\U0010ffff" * 64
"""Behind a prefix it comes after all other ids: they are not as long as this."""
SCAN_LIMIT = 2_000
"""So many of the newest runs are looked at before what is rare is gathered."""

# The candidates are sorted before anything is joined to them, so that no more are looked at than the page takes.
_PAGE = (
    """
SELECT {columns}
  FROM ({candidates} ORDER BY created_at DESC, id DESC {limit}) c JOIN edda_run r USING (id, gen) {states}
 WHERE state.status IS NOT NULL {conditions}
 ORDER BY c.created_at DESC, c.id DESC LIMIT :limit""".replace("{columns}", VIEW_COLUMNS)
    .replace("{states}", VIEW_STATES)
    .replace("{open}", "LEFT")
    .replace("{ended}", "LEFT")
)
_NEWEST = "SELECT id, gen, created_at FROM edda_run r WHERE true {keyset}"
# MATERIALIZED, here and below: else the planner joins to the runs from the newest on.
_GATHERED = """
WITH found AS MATERIALIZED (SELECT id, gen, created_at FROM edda_run r WHERE {reason} {keyset})
SELECT id, gen, created_at FROM found"""
_IN_STATE = """
WITH found AS MATERIALIZED ({states})
SELECT r.id, r.gen, r.created_at FROM found JOIN edda_run r USING (id, gen) WHERE true {keyset}"""
_OPEN = "SELECT s.run_id AS id, s.gen FROM edda_sched s WHERE {status} = ANY (:statuses::text[])".replace(
    "{status}", OPEN_STATUS
)
_ENDED = """
SELECT e.run_id AS id, e.gen FROM edda_result e WHERE e.status = ANY (:statuses::text[]) AND e.status <> 'completed'"""
# What is still open is passed by before anything else is looked up. These are what the page shows, so that it takes no
# more of them; not told so, the planner may sort all runs that ever ended.
_NEWEST_ENDED = """
SELECT r.id, r.gen, r.created_at FROM edda_run r JOIN edda_result e ON e.run_id = r.id AND e.gen = r.gen
 WHERE e.status = ANY (:statuses::text[]) {keyset}"""
# Each by an index, or from the few rows of those that are open.
_NAMED = """
SELECT r.id, r.gen FROM edda_run r WHERE r.id ILIKE :text {recent} {span}
UNION SELECT r.id, r.gen FROM edda_run r WHERE r.id = :whole {span}"""
_CONTAINING = """
WITH found AS MATERIALIZED ({named} UNION SELECT run_id, gen FROM edda_sched WHERE reason ILIKE :text)
SELECT r.id, r.gen, r.created_at FROM found JOIN edda_run r USING (id, gen) WHERE true {keyset}"""

_WORKFLOW = "r.workflow = :workflow"
_SINCE = "r.created_at >= :since"
_UNTIL = "r.created_at < :until"
_AFTER = "(r.created_at, r.id) < (:last_at, :last_id)"
_PARENT = "r.parent = :parent"
_PREFIX = "r.id >= :prefix AND r.id <= :prefix_end"
_TEXT = "(r.id = :whole OR s.reason ILIKE :text OR r.id ILIKE :text {recent})"
_RECENT = "AND (r.created_at, r.id) > (:ids_at, :ids_id)"
_STATUSES = "state.status = ANY (:statuses::text[])"

# One part for each status: each counts no further than it needs to. Of those that are open there is a row for each
# anyway, and never a million.
_COUNT_OPEN = """
SELECT status, least(count(*), {most}) FROM (
    SELECT {status} AS status FROM edda_sched s {run} WHERE true {conditions}) o GROUP BY status""".replace(
    "{status}", OPEN_STATUS
)
_COUNT_ENDED = """
SELECT '{ended}', count(*) FROM (
    SELECT FROM edda_result e {run} WHERE e.status = '{ended}' {conditions} LIMIT {most}) o"""
_COUNT_CONTAINING = """
WITH named AS MATERIALIZED ({named})
SELECT status, least(count(*), {most}) FROM (
    SELECT {status} AS status FROM edda_sched s {run}
     WHERE (s.reason ILIKE :text OR (s.run_id, s.gen) IN (SELECT id, gen FROM named)) {of_sched}
    UNION ALL
    SELECT e.status FROM named JOIN edda_result e ON e.run_id = named.id AND e.gen = named.gen {run_of_result}
     WHERE true {of_result}) o GROUP BY status""".replace("{status}", OPEN_STATUS)
_RUN_OF_SCHED = "JOIN edda_run r ON r.id = s.run_id AND r.gen = s.gen"
_RUN_OF_RESULT = "JOIN edda_run r ON r.id = e.run_id AND r.gen = e.gen"

_HORIZON = """
SELECT r.created_at, r.id FROM edda_run r WHERE true {span}
 ORDER BY r.created_at DESC, r.id DESC OFFSET :reach LIMIT 1"""

GENERATIONS = """
SELECT r.gen, r.created_at, count(h.seq)
  FROM edda_run r LEFT JOIN edda_hist h ON h.run_id = r.id AND h.gen = r.gen
 WHERE r.id = $1 GROUP BY r.gen, r.created_at ORDER BY r.gen"""


class PostgresSearch:
    _survey: Pool

    async def search(self, query: RunQuery) -> tuple[RunRecord, ...]:
        values = _values(query)
        async with self._survey.session() as session:
            for page in pages(query):
                statement, arguments = bind(page, values)
                rows = await session.fetch(statement, *arguments)
                if len(rows) >= query.limit:
                    break
        return tuple(record_of(row) for row in rows)

    async def count(self, query: RunQuery) -> dict[RunStatus, int]:
        statement, arguments = bind(count_statement(query), _values(query))
        async with self._survey.session() as session:
            rows = await session.fetch(statement, *arguments)
        counts = {RunStatus(status): count for status, count in rows if count}
        return {status: count for status, count in counts.items() if not query.statuses or status in query.statuses}

    async def scan_boundary(self, query: RunQuery, reach: int) -> tuple[int, RunId] | None:
        statement, arguments = bind(_HORIZON.replace("{span}", _all(_span(query))), _values(query) | {"reach": reach})
        async with self._survey.session() as session:
            rows = await session.fetch(statement, *arguments)
        return (rows[0][0], rows[0][1]) if rows else None

    async def generations(self, run_id: RunId) -> tuple[Generation, ...]:
        async with self._survey.session() as session:
            rows = await session.fetch(GENERATIONS, run_id)
        return tuple(Generation(*row) for row in rows)


def pages(query: RunQuery) -> Iterator[str]:
    """The statements to try, until one fills the page; the last one always tells all there is."""
    if query.parent is not None:
        yield _page(query, _GATHERED.replace("{reason}", _PARENT))
        return
    if query.statuses or query.id_prefix or query.text:
        yield _page(query, _NEWEST, f"LIMIT {SCAN_LIMIT}")
    last = _full_search(query)
    yield _page(query, last, "LIMIT :limit" if last == _NEWEST_ENDED else "")


def _full_search(query: RunQuery) -> str:
    if query.id_prefix:
        return _GATHERED.replace("{reason}", _PREFIX)
    if query.statuses and RunStatus.COMPLETED not in query.statuses:
        states = [_OPEN] * bool(query.statuses & OPEN) + [_ENDED] * bool(query.statuses & ENDED)
        return _IN_STATE.replace("{states}", " UNION ALL ".join(states))
    if query.text:
        return _CONTAINING.replace("{named}", _named(query))
    return _NEWEST_ENDED if query.statuses and query.statuses <= ENDED else _NEWEST


def _page(query: RunQuery, candidates: str, limit: str = "") -> str:
    text = _PAGE.replace("{candidates}", candidates).replace("{keyset}", _all(_keyset(query)))
    # Of the candidates: asked of the run, the planner may begin with all runs of which it is true.
    conditions = _all(_filters(query)).replace("r.id", "c.id")
    return text.replace("{limit}", limit).replace("{conditions}", conditions)


def _named(query: RunQuery) -> str:
    """Those whose id has the text."""
    return _NAMED.replace("{recent}", _recent(query)).replace("{span}", _all(_span(query)))


def _recent(query: RunQuery) -> str:
    return "" if query.ids_after is None else _RECENT


def _keyset(query: RunQuery) -> Iterator[str]:
    """What the two indexes by time can tell."""
    yield from _span(query)
    if query.after is not None:
        yield _AFTER


def _span(query: RunQuery) -> Iterator[str]:
    if query.workflow is not None:
        yield _WORKFLOW
    if query.created_from is not None:
        yield _SINCE
    if query.created_to is not None:
        yield _UNTIL


def _filters(query: RunQuery) -> Iterator[str]:
    if query.statuses:
        yield _STATUSES
    if query.parent is not None:
        yield _PARENT
    if query.id_prefix:
        yield _PREFIX
    if query.text:
        yield _TEXT.replace("{recent}", _recent(query))


def count_statement(query: RunQuery) -> str:
    if query.text:
        return _count_containing(query)
    wanted = query.statuses or frozenset(RunStatus)
    parts = [_count_open(query)] if wanted & OPEN else []
    parts += [_count_ended(query, status) for status in sorted(wanted & ENDED)]
    return " UNION ALL ".join(parts).replace("{most}", str(MAX_COUNT))


def _count_open(query: RunQuery) -> str:
    conditions = _all(_counted(query)).replace("r.id", "s.run_id").replace("r.workflow", "s.workflow")
    return _count(_COUNT_OPEN, conditions, _RUN_OF_SCHED)


def _count_ended(query: RunQuery, status: RunStatus) -> str:
    conditions = _all(_counted(query)).replace("r.id", "e.run_id")
    return _count(_COUNT_ENDED, conditions, _RUN_OF_RESULT).replace("{ended}", status)


def _count_containing(query: RunQuery) -> str:
    conditions = _all(_counted(query))
    return (
        _COUNT_CONTAINING.replace("{named}", _named(query))
        .replace("{run}", _RUN_OF_SCHED if conditions else "")
        .replace("{run_of_result}", _RUN_OF_RESULT if conditions else "")
        .replace("{of_sched}", conditions)
        .replace("{of_result}", conditions)
        .replace("{most}", str(MAX_COUNT))
    )


def _count(statement: str, conditions: str, run: str) -> str:
    """The run itself is looked at only if it is asked about."""
    return statement.replace("{run}", run if " r." in conditions else "").replace("{conditions}", conditions)


def _counted(query: RunQuery) -> Iterator[str]:
    """Statuses are told apart by what is counted, and text by where it is looked for."""
    yield from _span(query)
    if query.parent is not None:
        yield _PARENT
    if query.id_prefix:
        yield _PREFIX


def _all(conditions: Iterable[str]) -> str:
    return "".join(f" AND {condition}" for condition in conditions)


def _values(query: RunQuery) -> dict[str, Any]:
    last_at, last_id = query.after or (None, None)
    ids_at, ids_id = query.ids_after or (None, None)
    return {
        "statuses": sorted(query.statuses),
        "workflow": query.workflow,
        "prefix": query.id_prefix,
        "prefix_end": f"{query.id_prefix}{_LAST}",
        "text": f"%{escape_like(query.text or '')}%",
        "whole": query.text,
        "ids_at": ids_at,
        "ids_id": ids_id,
        "since": query.created_from,
        "until": query.created_to,
        "parent": query.parent,
        "last_at": last_at,
        "last_id": last_id,
        "limit": query.limit,
    }


def escape_like(text: str) -> str:
    """What LIKE takes for its own stands for itself."""
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
