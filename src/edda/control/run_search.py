"""Searches runs by columns in the database, and by values of their input in Python.

`RunSearcher` serves the control API; `find_instances` serves `EddaApp.find_instances`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edda.core.codec import Codec
from edda.core.model import Entry, OutboxRow, RunFilter, RunId, RunRecord, StoredEvent
from edda.core.queries import Audit, RunQuery
from edda.core.redact import Redaction
from edda.core.states import RunStatus
from edda.errors import ArgumentError
from edda.storage.ports import Queries
from edda.workflow.context import as_datetime, as_microseconds

from .views import MAX_PAGE_SIZE, STATUS_GROUPS, Page, RunSearch

T = TypeVar("T")
N = TypeVar("N", Entry, StoredEvent, OutboxRow, Audit)
"""Records with a number."""

MISSING = object()


def at_path(value: Any, path: str) -> Any:
    """`address.city` is the city in the address; `MISSING` if there is none."""
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return MISSING
        value = value[key]
    return value


def same(found: Any, wanted: Any) -> bool:
    """Equal by value and kind: True is not 1."""
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)


class InputFilter(Struct, frozen=True):
    """`order.id=A-17` as a person typed it: 17 may be a number or a text, so both match."""

    path: str
    text: str

    def fits(self, arguments: Any) -> bool:
        found = at_path(arguments, self.path)
        if found is MISSING:
            return False
        return same(found, self._value) or (not isinstance(found, dict | list | bool) and str(found) == self.text)

    def touches(self, hides: Callable[[Sequence[str]], bool]) -> bool:
        """Whether it compares a redacted field: the one at its path, one around it, or one in its value."""
        path = self.path.split(".")
        is_inside = any(hides(path[:end]) for end in range(1, len(path) + 1))
        return is_inside or _has_hidden(self._value, path, hides)

    @property
    def _value(self) -> Any:
        try:
            return msgspec.json.decode(self.text)
        except ValueError:
            return self.text


def _has_hidden(value: Any, path: Sequence[str], hides: Callable[[Sequence[str]], bool]) -> bool:
    if isinstance(value, list):
        return any(_has_hidden(item, path, hides) for item in value)
    if not isinstance(value, dict):
        return False
    return any(hides([*path, name]) or _has_hidden(item, [*path, name], hides) for name, item in value.items())


_CHUNK = 1_000
_EARLIEST, _LATEST = 0, 2**62

TEXT_SCAN_LIMIT = 10_000
"""A text is searched in the ids of so many of the newest runs."""
INPUT_SCAN_LIMIT = 2_000
"""For one page, the inputs of at most so many runs are decoded and compared."""


class SearchPage(Struct, frozen=True):
    runs: list[RunRecord]
    after: tuple[int, RunId] | None = None
    """The key of the last row, if there may be more."""
    searched_to: int | None = None
    """When the last scanned run was created, if the search stopped at its scan limit."""


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
    if not 1 <= limit <= MAX_PAGE_SIZE:
        raise ArgumentError(f"limit {limit}: expected a number from 1 to {MAX_PAGE_SIZE}")
    return limit


def to_bound(time: datetime | None, name: str) -> int | None:
    if time is None:
        return None
    try:
        return min(max(as_microseconds(time), _EARLIEST), _LATEST)
    except (ValueError, OverflowError):
        raise ArgumentError(f"{name} {time.isoformat()}: expected a time with its zone") from None


def write_cursor(key: tuple[int, RunId] | None) -> str | None:
    return None if key is None else f"{key[0]}:{key[1]}"


def _read_cursor(cursor: str) -> tuple[int, RunId]:
    created, separator, run_id = cursor.partition(":")
    if not separator or not created.isascii() or not created.isdigit() or len(created) > 18:
        raise ArgumentError(f"cursor {cursor!r}: expected the `next` of the page before")
    return int(created), RunId(run_id)


def number_page(found: Sequence[N], limit: int, present: Callable[[N], T]) -> Page[T]:
    """`found` has one row more than the page, if there is a next page."""
    last = str(found[limit - 1].seq) if len(found) > limit else None
    return Page(tuple(map(present, found[:limit])), last)


def read_number(cursor: str | None) -> int | None:
    if not cursor:
        return None
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise ArgumentError(f"cursor {cursor!r}: expected the `next` of the page before")
    return int(cursor)


def read_place(cursor: str | None) -> tuple[str, str] | None:
    try:
        return msgspec.json.decode(cursor, type=tuple[str, str]) if cursor else None
    except ValueError:
        raise ArgumentError(f"cursor {cursor!r}: expected the `next` of the page before") from None


def _statuses(word: str) -> frozenset[RunStatus]:
    if word in STATUS_GROUPS:
        return STATUS_GROUPS[word]
    try:
        return frozenset({RunStatus(word)})
    except ValueError:
        known = ", ".join((*STATUS_GROUPS, *RunStatus))
        raise ArgumentError(f"status {word!r}: expected one of {known}") from None


class RunSearcher:
    def __init__(self, queries: Queries, codec: Codec, redaction: Redaction) -> None:
        self._queries = queries
        self._codec = codec
        self._redaction = redaction

    async def find(self, search: RunSearch) -> SearchPage:
        query, conditions = await self._with_scan_limit(read_search(search)), self._conditions(search)
        searched_to = query.ids_after[0] if query.ids_after else None
        if not conditions:
            records = await self._queries.search(replace(query, limit=query.limit + 1))
            page = list(records[: query.limit])
            more = (page[-1].created_at, page[-1].run_id) if len(records) > query.limit else None
            return SearchPage(page, more, searched_to)
        found: list[RunRecord] = []
        scanned, last = 0, query.after
        async for record in self._all(query):
            if len(found) == query.limit:
                return SearchPage(found, last, searched_to)
            if scanned == INPUT_SCAN_LIMIT:
                return SearchPage(found, last, record.created_at)
            last, scanned = (record.created_at, record.run_id), scanned + 1
            if self._fits(record, conditions):
                found.append(record)
        return SearchPage(found, None, searched_to)

    async def count(self, search: RunSearch, scan_limit: int = INPUT_SCAN_LIMIT) -> dict[RunStatus, int]:
        """Runs by status, counted within the scan limit of a page."""
        if not self._conditions(search):
            query = read_search(replace(search, cursor=None, limit=1))
            return await self._queries.count(await self._with_scan_limit(query))
        counts: Counter[RunStatus] = Counter()
        async for record in self.iterate(search, scan_limit):
            counts[record.status] += 1
        return dict(counts)

    async def iterate(self, search: RunSearch, scan_limit: int) -> AsyncIterator[RunRecord]:
        """The runs that `count` counts with the same scan limit."""
        query, conditions = read_search(replace(search, cursor=None, limit=1)), self._conditions(search)
        query = await self._with_scan_limit(query)
        scanned = 0
        async for record in self._all(query):
            if scanned == scan_limit:
                return
            scanned += 1
            if self._fits(record, conditions):
                yield record

    async def _with_scan_limit(self, query: RunQuery) -> RunQuery:
        if not query.text:
            return query
        return replace(query, ids_after=await self._queries.scan_boundary(query, TEXT_SCAN_LIMIT))

    async def _all(self, query: RunQuery) -> AsyncIterator[RunRecord]:
        query = replace(query, limit=_CHUNK)
        while True:
            records = await self._queries.search(query)
            for record in records:
                yield record
            if len(records) < _CHUNK:
                return
            query = replace(query, after=(records[-1].created_at, records[-1].run_id))

    def _conditions(self, search: RunSearch) -> tuple[InputFilter, ...]:
        """A filter on a redacted field is refused: its matches would reveal the value."""
        conditions: list[InputFilter] = []
        for text in search.input:
            path, separator, value = text.partition("=")
            if not separator or not path:
                raise ArgumentError("input: expected a path and a value, such as order.id=A-17")
            condition = InputFilter(path.strip(), value)
            if condition.touches(self._redaction.hides):
                raise ArgumentError(f"input {condition.path}: its value is redacted, and cannot be searched for")
            conditions.append(condition)
        return tuple(conditions)

    def _fits(self, record: RunRecord, conditions: tuple[InputFilter, ...]) -> bool:
        if not conditions:
            return True
        try:
            arguments = self._codec.decode(record.input)
        except Exception:  # encrypted with another key, or broken: the input is unknown
            return False
        return all(condition.fits(arguments) for condition in conditions)


SCAN_LIMIT = 10_000
"""Runs that one call reads when it filters by input."""


class Instance(TypedDict):
    instance_id: str
    workflow_name: str
    status: str
    input_data: Any
    started_at: datetime
    ended_at: datetime | None
    waiting_for: str | None


class InstancePage(TypedDict):
    instances: list[Instance]
    next_page_token: str | None
    has_more: bool


Find = Callable[[RunFilter], Awaitable[tuple[RunRecord, ...]]]


async def find_instances(
    find: Find, codec: Codec, filter: RunFilter, wanted: Mapping[str, Any], page_token: str | None
) -> InstancePage:
    if not 1 <= filter.limit <= 1000:
        raise ValueError(f"find_instances(limit={filter.limit}): expected a number from 1 to 1000")
    if page_token is not None:
        created, separator, run_id = page_token.partition(":")
        if not separator or not created.isdigit():
            raise ValueError(f"page_token {page_token!r} was not returned by find_instances")
        filter = replace(filter, before=(int(created), RunId(run_id)))
    found, last = await _find_matching(find, codec, filter, wanted)
    return {
        "instances": [
            {
                "instance_id": record.run_id,
                "workflow_name": record.workflow,
                "status": record.status.value,
                "input_data": codec.decode(record.input),
                "started_at": as_datetime(record.created_at),
                "ended_at": None if record.ended_at is None else as_datetime(record.ended_at),
                "waiting_for": record.reason,
            }
            for record in found
        ],
        "next_page_token": write_cursor(last),
        "has_more": last is not None,
    }


async def _find_matching(
    find: Find, codec: Codec, filter: RunFilter, wanted: Mapping[str, Any]
) -> tuple[list[RunRecord], tuple[int, RunId] | None]:
    """One page, and the key of the last run read if there may be more."""
    found: list[RunRecord] = []
    limit, scanned = filter.limit, 0
    filter = replace(filter, limit=limit + 1)
    while True:
        records = await find(filter)
        for record in records:
            key = (record.created_at, record.run_id)
            arguments = codec.decode(record.input) if wanted else None
            if all(same(at_path(arguments, path), value) for path, value in wanted.items()):
                if len(found) == limit:
                    return found, (found[-1].created_at, found[-1].run_id)
                found.append(record)
        scanned += len(records)
        if len(records) < filter.limit:
            return found, None
        if scanned >= SCAN_LIMIT:
            return found, key
        filter = replace(filter, before=key)
