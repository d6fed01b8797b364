"""Searching runs: by status, workflow, time, id and input."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edda.core.codec import Codec
from edda.core.model import RunId, RunRecord
from edda.core.queries import RunQuery
from edda.core.redact import Redaction
from edda.core.states import RunStatus
from edda.errors import ArgumentError
from edda.storage.ports import Queries
from edda.workflow.context import as_microseconds

from .views import STATUS_GROUPS, RunSearch

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
    """`order.id=A-17`, as somebody typed it: nobody says there whether 17 is a number or a text, so both fit."""

    path: str
    text: str

    def fits(self, arguments: Any) -> bool:
        found = at_path(arguments, self.path)
        if found is MISSING:
            return False
        return same(found, self._value) or (not isinstance(found, dict | list | bool) and str(found) == self.text)

    def touches(self, hides: Callable[[Sequence[str]], bool]) -> bool:
        """Whether it compares a field that is hidden: that at its path, one around it, or one in its value."""
        path = self.path.split(".")
        if any(hides(path[:end]) for end in range(1, len(path) + 1)):
            return True
        return _has_hidden(self._value, path, hides)

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


def read_condition(text: str) -> InputFilter:
    path, separator, value = text.partition("=")
    if not separator or not path:
        raise ArgumentError("input: expected a path and a value, such as order.id=A-17")
    return InputFilter(path.strip(), value)


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
