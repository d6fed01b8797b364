"""The run search.

The first statement filters the newest `SCAN_LIMIT` runs. If they do not fill the page, matching runs are rare among
them; further statements then collect all matches through selective indexes and sort them. Going on from the newest run
would read all runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from edda.core.model import RunId, RunRecord
from edda.core.queries import MAX_COUNT, Generation, RunQuery
from edda.core.states import ENDED, OPEN, RunStatus
from edda.storage.shared.rows import to_run_record

from .connection import MySQLPool
from .runs import COLUMNS, OPEN_STATUS, STATUS
from .statement import Statement, int_or_null, literal, quote_text

_LAST = "\U0010ffff" * 64
"""Appended to a prefix it sorts after all ids with that prefix, because ids are shorter."""
SCAN_LIMIT = 2_000
"""How many of the newest runs the first statement reads."""

_OPEN_RUN = b" LEFT JOIN edda_open_run s ON s.run_id = r.id AND s.generation = r.generation"
_RESULT = b" LEFT JOIN edda_result e ON e.run_id = r.id AND e.generation = r.generation"
# A generation that is not the newest has neither an open-run row nor a result.
_NEWEST_GENERATION = b" WHERE (s.run_id IS NOT NULL OR e.run_id IS NOT NULL)"

_AMONG_NEWEST = (
    b"(SELECT r.id, r.generation FROM edda_run r FORCE INDEX (%b) WHERE TRUE%b"
    b" ORDER BY r.created_at DESC, r.id DESC LIMIT %b) c"
    b" STRAIGHT_JOIN edda_run r ON r.id = c.id AND r.generation = c.generation"
    + _OPEN_RUN
    + _RESULT
    + _NEWEST_GENERATION
)
# The join with edda_result skips open runs in the indexes alone.
_AMONG_ENDED = (
    b"(SELECT r.id, r.generation FROM edda_run r FORCE INDEX (%b)"
    b" STRAIGHT_JOIN edda_result e ON e.run_id = r.id AND e.generation = r.generation WHERE e.status IN (%b)%b"
    b" ORDER BY r.created_at DESC, r.id DESC LIMIT %b) c"
    b" STRAIGHT_JOIN edda_run r ON r.id = c.id AND r.generation = c.generation"
    + _OPEN_RUN
    + _RESULT
    + _NEWEST_GENERATION
)
_ALONG = b"edda_run r FORCE INDEX (%b)" + _OPEN_RUN + _RESULT + _NEWEST_GENERATION
_OPEN = (
    b"edda_open_run s STRAIGHT_JOIN edda_run r FORCE INDEX (PRIMARY) ON r.id = s.run_id AND r.generation = s.generation"
    + _RESULT
    + b" WHERE TRUE"
)
# Sorts ids only and joins the other columns afterwards: inputs and results may be large.
_COLLECTED = (
    b"(SELECT r.id, r.generation FROM %b%b ORDER BY r.created_at DESC, r.id DESC LIMIT %b) c"
    b" STRAIGHT_JOIN edda_run r ON r.id = c.id AND r.generation = c.generation" + _OPEN_RUN + _RESULT + b" WHERE TRUE"
)
_ENDED = (
    b"edda_result e FORCE INDEX (edda_result_status)"
    b" STRAIGHT_JOIN edda_run r FORCE INDEX (PRIMARY) ON r.id = e.run_id AND r.generation = e.generation"
    + _OPEN_RUN
    + b" WHERE TRUE"
)
_ORDER = b" ORDER BY r.created_at DESC, r.id DESC LIMIT %b"

_WORKFLOW = b" AND %b.workflow = %b"
_SINCE = b" AND r.created_at >= %b"
_UNTIL = b" AND r.created_at < %b"
# Not as a comparison of two pairs, for which the server uses no index.
_AFTER = b" AND r.created_at <= %b AND (r.created_at < %b OR r.id < %b)"
_PARENT = b" AND r.parent = %b"
_PREFIX = b" AND %b >= %b AND %b <= %b"
# Ids are binary columns, and LOWER does nothing on those.
_IN_ID = b"LOWER(CONVERT(%b USING utf8mb4)) COLLATE utf8mb4_bin LIKE %b ESCAPE '|'"
_IN_REASON = b"LOWER(s.reason) COLLATE utf8mb4_bin LIKE %b ESCAPE '|'"
_RECENT = b" AND r.created_at >= %b AND (r.created_at > %b OR r.id > %b)"
_EXACT = b" AND r.id = %b"
_OPEN_IN = b" AND " + OPEN_STATUS + b" IN (%b)"
_ENDED_IN = b" AND e.status IN (%b)"
_STATUS_IN = b" AND " + STATUS + b" IN (%b)"

COUNT_OPEN = b"""SELECT o.status, LEAST(COUNT(*), %b) FROM (
    SELECT %b AS status FROM edda_open_run s%b WHERE TRUE%b) o GROUP BY o.status"""
# One statement for each status, so that each stops at the limit.
COUNT_ENDED = b"""SELECT %b, COUNT(*) FROM (
    SELECT 1 FROM edda_result e%b WHERE e.status = %b%b LIMIT %b) o"""
# The runs whose id contains the text; each part uses an index.
NAMED = b"""SELECT r.id, r.generation FROM edda_run r FORCE INDEX (%b) WHERE TRUE%b
    UNION SELECT r.id, r.generation FROM edda_run r FORCE INDEX (PRIMARY) WHERE TRUE%b"""
COUNT_NAMED = (
    b"SELECT o.status, LEAST(COUNT(*), %b) FROM (SELECT " + STATUS + b" AS status FROM (%b) n"
    b" STRAIGHT_JOIN edda_run r ON r.id = n.id AND r.generation = n.generation"
    + _OPEN_RUN
    + _RESULT
    + _NEWEST_GENERATION
    + b"%b) o"
    b" GROUP BY o.status"
)
COUNT_BY_REASON = (
    b"SELECT o.status, COUNT(*) FROM (SELECT " + OPEN_STATUS + b" AS status FROM edda_open_run s%b"
    b" WHERE %b AND s.run_id NOT IN (SELECT n.id FROM (%b) n)%b) o GROUP BY o.status"
)
_RUN_OF_OPEN = b" JOIN edda_run r ON r.id = s.run_id AND r.generation = s.generation"
_RUN_OF_RESULT = b" JOIN edda_run r ON r.id = e.run_id AND r.generation = e.generation"

SCAN_BOUNDARY = b"""SELECT r.created_at, r.id FROM edda_run r FORCE INDEX (%b) WHERE TRUE%b
    ORDER BY r.created_at DESC, r.id DESC LIMIT %b, 1"""
GENERATIONS = b"""SELECT r.generation, r.created_at, (SELECT COUNT(*) FROM edda_history h WHERE h.run_id = r.id
    AND h.generation = r.generation)
    FROM edda_run r WHERE r.id = %b ORDER BY r.generation"""


class MySQLSearch:
    _queries: MySQLPool

    async def search(self, query: RunQuery) -> tuple[RunRecord, ...]:
        found: tuple[RunRecord, ...] = ()
        async with self._queries.session() as session:
            for statements in pages(query):
                replies = await session.send(*statements)
                found = _merge(to_run_record(row) for reply in replies for row in reply.rows)[: query.limit]
                if len(found) == query.limit:
                    break
        return found

    async def count(self, query: RunQuery) -> dict[RunStatus, int]:
        replies = await self._queries.send(*count_statements(query))
        counts: Counter[RunStatus] = Counter()
        for status, count in (row for reply in replies for row in reply.rows):
            counts[RunStatus(status)] += count
        statuses = query.statuses or frozenset(RunStatus)
        return {status: min(count, MAX_COUNT) for status, count in counts.items() if count and status in statuses}

    async def scan_boundary(self, query: RunQuery, scan_limit: int) -> tuple[int, RunId] | None:
        body = SCAN_BOUNDARY % (_index(query), _span(query), int_or_null(scan_limit))
        (found,) = await self._queries.send(Statement("scan_boundary", body))
        return (found.rows[0][0], RunId(found.rows[0][1].decode())) if found.rows else None

    async def generations(self, run_id: RunId) -> tuple[Generation, ...]:
        return tuple(Generation(*row) for row in (await self._queries.run(GENERATIONS, run_id)).rows)


def _merge(records: Iterable[RunRecord]) -> tuple[RunRecord, ...]:
    """Newest first; a run that two statements found counts once."""
    by_id = {record.run_id: record for record in records}
    return tuple(sorted(by_id.values(), key=_key, reverse=True))


def _key(record: RunRecord) -> tuple[int, bytes]:
    return record.created_at, record.run_id.encode()


def pages(query: RunQuery) -> Iterator[list[Statement]]:
    """The statements in order: the search stops at the first list that fills the page. The last one finds every
    match."""
    if query.parent is not None:
        yield [_page(query, _ALONG % b"edda_run_parent", _rest(query))]
        return
    if query.statuses or query.id_prefix or query.text:
        newest = _AMONG_NEWEST % (_index(query), _keyset(query), int_or_null(SCAN_LIMIT))
        yield [_page(query, newest, _rest(query))]
    yield list(_full_search(query))


def _full_search(query: RunQuery) -> Iterator[Statement]:
    if query.id_prefix:
        yield _page(query, _ALONG % b"PRIMARY", _rest(query))
    elif query.statuses and RunStatus.COMPLETED not in query.statuses:
        if query.statuses & OPEN:
            yield _collected(query, _OPEN, _OPEN_IN % _listed(query.statuses) + _text(query))
        if query.statuses & ENDED:
            yield _collected(query, _ENDED, _ENDED_IN % _listed(query.statuses) + _text(query))
    elif query.text:
        yield _page(query, _ALONG % _index(query), _text_in_id(query) + _statuses(query))
        yield _page(query, _ALONG % b"PRIMARY", _EXACT % quote_text(query.text) + _statuses(query))
        yield _collected(query, _OPEN, b" AND " + _IN_REASON % _pattern(query.text) + _statuses(query))
    elif query.statuses and query.statuses <= ENDED:
        values = (_index(query), _listed(query.statuses), _keyset(query), int_or_null(query.limit))
        yield _page(query, _AMONG_ENDED % values, b"")
    else:
        yield _page(query, _ALONG % _index(query), _rest(query))


def _collected(query: RunQuery, source: bytes, conditions: bytes) -> Statement:
    candidates = _COLLECTED % (source, _keyset(query) + conditions, int_or_null(query.limit))
    return Statement("search", COLUMNS + candidates + _ORDER % int_or_null(query.limit))


def _page(query: RunQuery, source: bytes, conditions: bytes) -> Statement:
    body = COLUMNS + source + _keyset(query) + conditions + _ORDER % int_or_null(query.limit)
    return Statement("search", body)


def _index(query: RunQuery) -> bytes:
    return b"edda_run_created" if query.workflow is None else b"edda_run_workflow"


def _keyset(query: RunQuery) -> bytes:
    """The conditions that the two indexes by time cover."""
    conditions = _span(query)
    if query.after is not None:
        at, last = int_or_null(query.after[0]), quote_text(query.after[1])
        conditions += _AFTER % (at, at, last)
    return conditions


def _span(query: RunQuery) -> bytes:
    return _workflow(query, b"r") + _time(query)


def _workflow(query: RunQuery, table: bytes) -> bytes:
    return b"" if query.workflow is None else _WORKFLOW % (table, quote_text(query.workflow))


def _time(query: RunQuery) -> bytes:
    conditions = b""
    if query.created_from is not None:
        conditions += _SINCE % int_or_null(query.created_from)
    if query.created_to is not None:
        conditions += _UNTIL % int_or_null(query.created_to)
    return conditions


def _rest(query: RunQuery) -> bytes:
    return _statuses(query) + _parent(query) + _prefix(query) + _text(query)


def _statuses(query: RunQuery) -> bytes:
    return _STATUS_IN % _listed(query.statuses) if query.statuses else b""


def _parent(query: RunQuery) -> bytes:
    return b"" if query.parent is None else _PARENT % quote_text(query.parent)


def _prefix(query: RunQuery, id: bytes = b"r.id") -> bytes:
    if not query.id_prefix:
        return b""
    return _PREFIX % (id, quote_text(query.id_prefix), id, quote_text(query.id_prefix + _LAST))


def _text(query: RunQuery) -> bytes:
    if not query.text:
        return b""
    pattern = _pattern(query.text)
    in_id = b"(TRUE%b)" % _text_in_id(query)
    return b" AND (r.id = %b OR %b OR %b)" % (quote_text(query.text), _IN_REASON % pattern, in_id)


def _text_in_id(query: RunQuery) -> bytes:
    if not query.text:
        return b""
    return b" AND " + _IN_ID % (b"r.id", _pattern(query.text)) + _recent(query)


def _recent(query: RunQuery) -> bytes:
    if query.ids_after is None:
        return b""
    at = int_or_null(query.ids_after[0])
    return _RECENT % (at, at, quote_text(query.ids_after[1]))


def _listed(statuses: Iterable[RunStatus]) -> bytes:
    return literal(sorted(statuses))


def _pattern(text: str) -> bytes:
    return quote_text(f"%{escape_like(text)}%")


def escape_like(text: str) -> str:
    """In lower case, with the wildcards of LIKE escaped."""
    return text.lower().replace("|", "||").replace("%", "|%").replace("_", "|_")


def count_statements(query: RunQuery) -> Sequence[Statement]:
    if query.text:
        return _count_with_text(query, query.text)
    statuses = query.statuses or frozenset(RunStatus)
    counts = [_count_open(query)] if statuses & OPEN else []
    return counts + [_count_ended(query, status) for status in sorted(statuses & ENDED)]


def _count_open(query: RunQuery) -> Statement:
    of_run = _time(query) + _parent(query)
    of_open = _workflow(query, b"s") + _prefix(query, b"s.run_id")
    run = _RUN_OF_OPEN if of_run else b""
    return Statement("count", COUNT_OPEN % (int_or_null(MAX_COUNT), OPEN_STATUS, run, of_open + of_run))


def _count_ended(query: RunQuery, status: RunStatus) -> Statement:
    of_run = _span(query) + _parent(query)
    of_result = _prefix(query, b"e.run_id")
    run, name = _RUN_OF_RESULT if of_run else b"", quote_text(status)
    return Statement("count", COUNT_ENDED % (name, run, name, of_result + of_run, int_or_null(MAX_COUNT)))


def _count_with_text(query: RunQuery, text: str) -> Sequence[Statement]:
    """The runs whose id contains the text, and those of the others whose reason does."""
    span, rest = _span(query), _parent(query) + _prefix(query)
    named = NAMED % (_index(query), span + _text_in_id(query), span + _EXACT % quote_text(text))
    run = _RUN_OF_OPEN if span + rest else b""
    return [
        Statement("count", COUNT_NAMED % (int_or_null(MAX_COUNT), named, rest)),
        Statement("count", COUNT_BY_REASON % (run, _IN_REASON % _pattern(text), named, span + rest)),
    ]
