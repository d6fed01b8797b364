"""Finding runs, also by what they were started with, which no index knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime

from msgspec.structs import replace

from edda.core.codec import Codec
from edda.core.model import RunId, RunRecord
from edda.core.states import ENDED, OPEN, WAITING, RunStatus
from edda.core.survey import MOST_COUNTED, RunQuery
from edda.errors import ArgumentError
from edda.storage.ports import Survey
from edda.workflow.context import as_microseconds

from .inputs import Condition, read_condition
from .views import RunSearch

MOST_ON_PAGE = 200
_CHUNK = 200
_GROUPS = {"open": OPEN, "waiting": WAITING, "ended": ENDED}
_EARLIEST, _LATEST = 0, 2**62

Found = tuple[list[RunRecord], tuple[int, RunId] | None]
"""The runs of a page, and the key to go on from if there may be more."""


def read_search(search: RunSearch) -> RunQuery:
    return RunQuery(
        statuses=frozenset().union(*map(_statuses, search.status)),
        workflow=search.workflow or None,
        id_prefix=search.id or None,
        text=search.q or None,
        created_from=as_bound(search.since, "since"),
        created_to=as_bound(search.until, "until"),
        parent=RunId(search.parent) if search.parent else None,
        after=_read_cursor(search.cursor) if search.cursor else None,
        limit=check_limit(search.limit),
    )


def check_limit(limit: int) -> int:
    if not 1 <= limit <= MOST_ON_PAGE:
        raise ArgumentError(f"limit {limit}: expected a number from 1 to {MOST_ON_PAGE}")
    return limit


def as_bound(moment: datetime | None, name: str) -> int | None:
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
    if word in _GROUPS:
        return _GROUPS[word]
    try:
        return frozenset({RunStatus(word)})
    except ValueError:
        known = ", ".join((*_GROUPS, *RunStatus))
        raise ArgumentError(f"status {word!r}: expected one of {known}") from None


class Finder:
    def __init__(self, survey: Survey, codec: Codec) -> None:
        self._survey = survey
        self._codec = codec

    async def find(self, search: RunSearch) -> Found:
        query, conditions = read_search(search), _conditions(search)
        if not conditions:
            return _page(await self._survey.search(replace(query, limit=query.limit + 1)), query.limit)
        found: list[RunRecord] = []
        looked_at, last = 0, query.after
        async for record in self._all(query):
            if len(found) == query.limit or looked_at == MOST_COUNTED:
                return found, last
            last, looked_at = (record.created_at, record.run_id), looked_at + 1
            if self._fits(record, conditions):
                found.append(record)
        return found, None

    async def count(self, search: RunSearch) -> dict[RunStatus, int]:
        """By status, of those that were asked for."""
        query, conditions = read_search(replace(search, cursor=None, limit=1)), _conditions(search)
        if not conditions:
            return await self._survey.count(query)
        counts: Counter[RunStatus] = Counter()
        looked_at = 0
        async for record in self._all(query):
            if self._fits(record, conditions):
                counts[record.status] += 1
            looked_at += 1
            if looked_at == MOST_COUNTED:
                break
        return dict(counts)

    async def pages(self, search: RunSearch, most: int) -> AsyncIterator[list[RunRecord]]:
        """All of them, up to so many."""
        cursor: str | None = None
        while most > 0:
            found, last = await self.find(replace(search, cursor=cursor, limit=min(MOST_ON_PAGE, most)))
            yield found
            most -= len(found)
            if last is None:
                return
            cursor = write_cursor(last)

    async def _all(self, query: RunQuery) -> AsyncIterator[RunRecord]:
        query = replace(query, limit=_CHUNK)
        while True:
            records = await self._survey.search(query)
            for record in records:
                yield record
            if len(records) < _CHUNK:
                return
            query = replace(query, after=(records[-1].created_at, records[-1].run_id))

    def _fits(self, record: RunRecord, conditions: tuple[Condition, ...]) -> bool:
        try:
            arguments = self._codec.decode(record.input)
        except Exception:  # encrypted under another key, or broken: nobody can say what it was started with
            return False
        return all(condition.fits(arguments) for condition in conditions)


def _conditions(search: RunSearch) -> tuple[Condition, ...]:
    return tuple(map(read_condition, search.input))


def _page(records: tuple[RunRecord, ...], limit: int) -> Found:
    if len(records) <= limit:
        return list(records), None
    return list(records[:limit]), (records[limit - 1].created_at, records[limit - 1].run_id)
