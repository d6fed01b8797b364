"""The run search.

The first statement filters the newest `SCAN_LIMIT` runs. If they do not fill the page, matching runs are rare among
them; the second statement then collects all matches through a selective index and sorts them. One statement for both
cases would let the planner scan all runs from the newest on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from edda.core.model import RunId, RunRecord
from edda.core.queries import MAX_COUNT, Generation, RunQuery
from edda.core.states import ENDED, OPEN, RunStatus
from edda.storage.shared.named_parameters import bind_positional
from edda.storage.shared.rows import to_run_record

from .pool import PostgresPool
from .runs import OPEN_STATUS, VIEW_COLUMNS, VIEW_STATES

_LAST = "\U0010ffff" * 64
"""Appended to a prefix it sorts after all ids with that prefix, because ids are shorter."""
SCAN_LIMIT = 2_000
"""How many of the newest runs the first statement reads."""

# The candidates are sorted before the other tables are joined, so that only the rows of the page are joined.
_PAGE = (
    """
SELECT {columns}
  FROM ({candidates} ORDER BY created_at DESC, id DESC {limit}) c JOIN edda_run r USING (id, generation) {states}
 WHERE state.status IS NOT NULL {conditions}
 ORDER BY c.created_at DESC, c.id DESC LIMIT :limit""".replace("{columns}", VIEW_COLUMNS)
    .replace("{states}", VIEW_STATES)
    .replace("{open}", "LEFT")
    .replace("{ended}", "LEFT")
)
_NEWEST = "SELECT id, generation, created_at FROM edda_run r WHERE true {keyset}"
# MATERIALIZED, here and below: else the planner joins the runs from the newest on.
_BY_CONDITION = """
WITH matched AS MATERIALIZED (SELECT id, generation, created_at FROM edda_run r WHERE {condition} {keyset})
SELECT id, generation, created_at FROM matched"""
_IN_STATE = """
WITH matched AS MATERIALIZED ({states})
SELECT r.id, r.generation, r.created_at FROM matched JOIN edda_run r USING (id, generation) WHERE true {keyset}"""
_OPEN = "SELECT s.run_id AS id, s.generation FROM edda_open_run s WHERE {status} = ANY (:statuses::text[])".replace(
    "{status}", OPEN_STATUS
)
_ENDED = """
SELECT e.run_id AS id, e.generation FROM edda_result e WHERE e.status = ANY (:statuses::text[])
    AND e.status <> 'completed'"""
# The join with edda_result skips open runs before the other tables are read. All of these candidates are on the page,
# so they get the page's LIMIT; without it the planner may sort all runs that ever ended.
_NEWEST_ENDED = """
SELECT r.id, r.generation, r.created_at FROM edda_run r JOIN edda_result e ON e.run_id = r.id
    AND e.generation = r.generation
 WHERE e.status = ANY (:statuses::text[]) {keyset}"""
# Each part uses an index, or reads the few rows of open runs.
_NAMED = """
SELECT r.id, r.generation FROM edda_run r WHERE r.id ILIKE :text {recent} {span}
UNION SELECT r.id, r.generation FROM edda_run r WHERE r.id = :exact {span}"""
_CONTAINING = """
WITH matched AS MATERIALIZED ({named} UNION SELECT run_id, generation FROM edda_open_run WHERE reason ILIKE :text)
SELECT r.id, r.generation, r.created_at FROM matched JOIN edda_run r USING (id, generation) WHERE true {keyset}"""

_WORKFLOW = "r.workflow = :workflow"
_SINCE = "r.created_at >= :since"
_UNTIL = "r.created_at < :until"
_AFTER = "(r.created_at, r.id) < (:last_at, :last_id)"
_PARENT = "r.parent = :parent"
_PREFIX = "r.id >= :prefix AND r.id <= :prefix_end"
_TEXT = "(r.id = :exact OR s.reason ILIKE :text OR r.id ILIKE :text {recent})"
_RECENT = "AND (r.created_at, r.id) > (:ids_at, :ids_id)"
_STATUSES = "state.status = ANY (:statuses::text[])"

# One part for each status, so that each stops at the limit. The open runs are counted in one part: they are few
# compared with the ended ones.
_COUNT_OPEN = """
SELECT status, least(count(*), {max_count}) FROM (
    SELECT {status} AS status FROM edda_open_run s {run} WHERE true {conditions}) o GROUP BY status""".replace(
    "{status}", OPEN_STATUS
)
_COUNT_ENDED = """
SELECT '{ended}', count(*) FROM (
    SELECT FROM edda_result e {run} WHERE e.status = '{ended}' {conditions} LIMIT {max_count}) o"""
_COUNT_CONTAINING = """
WITH named AS MATERIALIZED ({named})
SELECT status, least(count(*), {max_count}) FROM (
    SELECT {status} AS status FROM edda_open_run s {run}
     WHERE (s.reason ILIKE :text OR (s.run_id, s.generation) IN (SELECT id, generation FROM named)) {of_open}
    UNION ALL
    SELECT e.status FROM named JOIN edda_result e ON e.run_id = named.id
        AND e.generation = named.generation {run_of_result}
     WHERE true {of_result}) o GROUP BY status""".replace("{status}", OPEN_STATUS)
_RUN_OF_OPEN = "JOIN edda_run r ON r.id = s.run_id AND r.generation = s.generation"
_RUN_OF_RESULT = "JOIN edda_run r ON r.id = e.run_id AND r.generation = e.generation"

_SCAN_BOUNDARY = """
SELECT r.created_at, r.id FROM edda_run r WHERE true {span}
 ORDER BY r.created_at DESC, r.id DESC OFFSET :scan_limit LIMIT 1"""

GENERATIONS = """
SELECT r.generation, r.created_at, count(h.seq)
  FROM edda_run r LEFT JOIN edda_history h ON h.run_id = r.id AND h.generation = r.generation
 WHERE r.id = $1 GROUP BY r.generation, r.created_at ORDER BY r.generation"""


class PostgresSearch:
    _queries: PostgresPool

    async def search(self, query: RunQuery) -> tuple[RunRecord, ...]:
        values = _values(query)
        for page in pages(query):
            statement, arguments = bind_positional(page, values)
            rows = await self._queries.fetch(statement, *arguments)
            if len(rows) >= query.limit:
                break
        return tuple(to_run_record(row) for row in rows)

    async def count(self, query: RunQuery) -> dict[RunStatus, int]:
        statement, arguments = bind_positional(count_statement(query), _values(query))
        rows = await self._queries.fetch(statement, *arguments)
        counts = {RunStatus(status): count for status, count in rows if count}
        return {status: count for status, count in counts.items() if not query.statuses or status in query.statuses}

    async def scan_boundary(self, query: RunQuery, scan_limit: int) -> tuple[int, RunId] | None:
        statement, arguments = bind_positional(
            _SCAN_BOUNDARY.replace("{span}", _all(_span(query))), _values(query) | {"scan_limit": scan_limit}
        )
        rows = await self._queries.fetch(statement, *arguments)
        return (rows[0][0], rows[0][1]) if rows else None

    async def generations(self, run_id: RunId) -> tuple[Generation, ...]:
        rows = await self._queries.fetch(GENERATIONS, run_id)
        return tuple(Generation(*row) for row in rows)


def pages(query: RunQuery) -> Iterator[str]:
    """The statements in order: the search stops at the first that fills the page. The last one finds every match."""
    if query.parent is not None:
        yield _page(query, _BY_CONDITION.replace("{condition}", _PARENT))
        return
    if query.statuses or query.id_prefix or query.text:
        yield _page(query, _NEWEST, f"LIMIT {SCAN_LIMIT}")
    last = _full_search(query)
    yield _page(query, last, "LIMIT :limit" if last == _NEWEST_ENDED else "")


def _full_search(query: RunQuery) -> str:
    if query.id_prefix:
        return _BY_CONDITION.replace("{condition}", _PREFIX)
    if query.statuses and RunStatus.COMPLETED not in query.statuses:
        states = [_OPEN] * bool(query.statuses & OPEN) + [_ENDED] * bool(query.statuses & ENDED)
        return _IN_STATE.replace("{states}", " UNION ALL ".join(states))
    if query.text:
        return _CONTAINING.replace("{named}", _named(query))
    return _NEWEST_ENDED if query.statuses and query.statuses <= ENDED else _NEWEST


def _page(query: RunQuery, candidates: str, limit: str = "") -> str:
    text = _PAGE.replace("{candidates}", candidates).replace("{keyset}", _all(_keyset(query)))
    # On the candidates (c): with a condition on r.id the planner may begin with all runs that fulfil it.
    conditions = _all(_filters(query)).replace("r.id", "c.id")
    return text.replace("{limit}", limit).replace("{conditions}", conditions)


def _named(query: RunQuery) -> str:
    """The runs whose id contains the text."""
    return _NAMED.replace("{recent}", _recent(query)).replace("{span}", _all(_span(query)))


def _recent(query: RunQuery) -> str:
    return "" if query.ids_after is None else _RECENT


def _keyset(query: RunQuery) -> Iterator[str]:
    """The conditions that the two indexes by time cover."""
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
    statuses = query.statuses or frozenset(RunStatus)
    parts = [_count_open(query)] if statuses & OPEN else []
    parts += [_count_ended(query, status) for status in sorted(statuses & ENDED)]
    return " UNION ALL ".join(parts).replace("{max_count}", str(MAX_COUNT))


def _count_open(query: RunQuery) -> str:
    conditions = _all(_count_conditions(query)).replace("r.id", "s.run_id").replace("r.workflow", "s.workflow")
    return _count(_COUNT_OPEN, conditions, _RUN_OF_OPEN)


def _count_ended(query: RunQuery, status: RunStatus) -> str:
    conditions = _all(_count_conditions(query)).replace("r.id", "e.run_id")
    return _count(_COUNT_ENDED, conditions, _RUN_OF_RESULT).replace("{ended}", status)


def _count_containing(query: RunQuery) -> str:
    conditions = _all(_count_conditions(query))
    return (
        _COUNT_CONTAINING.replace("{named}", _named(query))
        .replace("{run}", _RUN_OF_OPEN if conditions else "")
        .replace("{run_of_result}", _RUN_OF_RESULT if conditions else "")
        .replace("{of_open}", conditions)
        .replace("{of_result}", conditions)
        .replace("{max_count}", str(MAX_COUNT))
    )


def _count(statement: str, conditions: str, run: str) -> str:
    """Join edda_run only if a condition needs it."""
    return statement.replace("{run}", run if " r." in conditions else "").replace("{conditions}", conditions)


def _count_conditions(query: RunQuery) -> Iterator[str]:
    """Without statuses and text: each counting statement has its own conditions for them."""
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
        "exact": query.text,
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
    """Escape the wildcards of LIKE."""
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
