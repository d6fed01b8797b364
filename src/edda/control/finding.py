"""Finding runs, also by what they were started with, which no index knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from edda.core.codec import Codec
from edda.core.model import RunId, RunRecord
from edda.core.redaction import Redaction
from edda.core.states import RunStatus
from edda.core.survey import RunQuery
from edda.errors import ArgumentError
from edda.storage.ports import Queries
from edda.workflow.context import as_microseconds

from .inputs import InputFilter, read_condition
from .views import STATUS_GROUPS, RunSearch

MOST_ON_PAGE = 200
_CHUNK = 1_000
_EARLIEST, _LATEST = 0, 2**62

TEXT_SCAN_LIMIT = 10_000
"""Of so many of the newest runs the ids are searched for a text."""
INPUT_SCAN_LIMIT = 2_000
"""So many runs are looked into for a page, one by one."""


class SearchPage(Struct, frozen=True):
    runs: list[RunRecord]
    after: tuple[int, RunId] | None = None
    """The key to go on from if there may be more."""
    searched_to: int | None = None
    """When the run was created with which the search ended, if it did not look through all of them."""


def read_search(search: RunSearch) -> RunQuery:
    return RunQuery(
        statuses=frozenset().union(*map(_statuses, search.status)),
        workflow=search.workflow or None,
        id_prefix=search.id or None,
        text=search.q or None,
        created_from=to_bound(search.since, "since"),
        created_to=to_bound(search.until, "until"),
        parent=RunId(search.parent) if search.parent else None,
        after=_read_cursor(search.cursor) if search.cursor else None,
        limit=check_limit(search.limit),
    )


def check_limit(limit: int) -> int:
    if not 1 <= limit <= MOST_ON_PAGE:
        raise ArgumentError(f"limit {limit}: expected a number from 1 to {MOST_ON_PAGE}")
    return limit


def to_bound(moment: datetime | None, name: str) -> int | None:
    if moment is None:
        return None
    try:
        return min(max(as_microseconds(moment), _EARLIEST), _LATEST)
    except (ValueError, OverflowError):
        raise ArgumentError(f"{name} {moment.isoformat()}: expected a time with its zone") from None


def write_cursor(key: tuple[int, RunId] | None) -> str | None:
    return None if key is None else f"{key[0]}:{key[1]}"


def _read_cursor(cursor: str) -> tuple[int, RunId]:
    created, separator, run_id = cursor.partition(":")
    if not separator or not created.isascii() or not created.isdigit() or len(created) > 18:
        raise ArgumentError(f"cursor {cursor!r}: expected what the page before gave as `next`")
    return int(created), RunId(run_id)


def _statuses(word: str) -> frozenset[RunStatus]:
    if word in STATUS_GROUPS:
        return STATUS_GROUPS[word]
    try:
        return frozenset({RunStatus(word)})
    except ValueError:
        known = ", ".join((*STATUS_GROUPS, *RunStatus))
        raise ArgumentError(f"status {word!r}: expected one of {known}") from None


class RunSearcher:
    def __init__(self, survey: Queries, codec: Codec, redaction: Redaction) -> None:
        self._survey = survey
        self._codec = codec
        self._redaction = redaction

    async def find(self, search: RunSearch) -> SearchPage:
        query, conditions = await self._with_scan_limit(read_search(search)), self._conditions(search)
        searched_to = query.ids_after[0] if query.ids_after else None
        if not conditions:
            return _page(await self._survey.search(replace(query, limit=query.limit + 1)), query.limit, searched_to)
        found: list[RunRecord] = []
        looked_at, last = 0, query.after
        async for record in self._all(query):
            if len(found) == query.limit:
                return SearchPage(found, last, searched_to)
            if looked_at == INPUT_SCAN_LIMIT:
                return SearchPage(found, last, record.created_at)
            last, looked_at = (record.created_at, record.run_id), looked_at + 1
            if self._fits(record, conditions):
                found.append(record)
        return SearchPage(found, None, searched_to)

    async def count(self, search: RunSearch, reach: int = INPUT_SCAN_LIMIT) -> dict[RunStatus, int]:
        """By status, of those that were asked for, as far as a page looks."""
        query, conditions = read_search(replace(search, cursor=None, limit=1)), self._conditions(search)
        query = await self._with_scan_limit(query)
        if not conditions:
            return await self._survey.count(query)
        counts: Counter[RunStatus] = Counter()
        async for record in self._fitting(query, conditions, reach):
            counts[record.status] += 1
        return dict(counts)

    async def iterate(self, search: RunSearch, reach: int) -> AsyncIterator[RunRecord]:
        """Those that `count` tells with this reach."""
        query = await self._with_scan_limit(read_search(replace(search, cursor=None, limit=1)))
        async for record in self._fitting(query, self._conditions(search), reach):
            yield record

    async def _fitting(
        self, query: RunQuery, conditions: tuple[InputFilter, ...], reach: int
    ) -> AsyncIterator[RunRecord]:
        looked_at = 0
        async for record in self._all(query):
            if looked_at == reach:
                return
            looked_at += 1
            if self._fits(record, conditions):
                yield record

    async def _with_scan_limit(self, query: RunQuery) -> RunQuery:
        if not query.text:
            return query
        return replace(query, ids_after=await self._survey.scan_boundary(query, TEXT_SCAN_LIMIT))

    async def _all(self, query: RunQuery) -> AsyncIterator[RunRecord]:
        query = replace(query, limit=_CHUNK)
        while True:
            records = await self._survey.search(query)
            for record in records:
                yield record
            if len(records) < _CHUNK:
                return
            query = replace(query, after=(records[-1].created_at, records[-1].run_id))

    def _conditions(self, search: RunSearch) -> tuple[InputFilter, ...]:
        """Who may look could else find out what is not shown, by asking for it."""
        conditions = tuple(map(read_condition, search.input))
        for condition in conditions:
            if condition.touches(self._redaction.hides):
                raise ArgumentError(f"input {condition.path}: its value is redacted, and cannot be searched for")
        return conditions

    def _fits(self, record: RunRecord, conditions: tuple[InputFilter, ...]) -> bool:
        if not conditions:
            return True
        try:
            arguments = self._codec.decode(record.input)
        except Exception:  # encrypted under another key, or broken: nobody can say what it was started with
            return False
        return all(condition.fits(arguments) for condition in conditions)


def _page(records: tuple[RunRecord, ...], limit: int, horizon: int | None) -> SearchPage:
    if len(records) <= limit:
        return SearchPage(list(records), None, horizon)
    return SearchPage(list(records[:limit]), (records[limit - 1].created_at, records[limit - 1].run_id), horizon)
