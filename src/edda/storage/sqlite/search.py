"""Searching and counting runs.

Each query uses the index that leaves the fewest rows. If no index leaves few, runs are read newest first; unless the
query asks for open or unsuccessful runs, which are mostly rare and have a table or an index of their own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edda.core.model import RunId, RunRecord
from edda.core.queries import MAX_COUNT, RunQuery
from edda.core.states import ENDED, OPEN, RunStatus
from edda.storage.shared.rows import to_run_record

from .connection import Connection
from .runs import MAX_INTEGER, OPEN_STATUS, RECORD, STATUS
from .threads import Part, query

SCAN_LIMIT = 10_000
"""An index range with fewer rows is read row by row."""
RECENT_LIMIT = 2_000
"""How many of the newest runs are read first for a page of rare ones."""
_UNSUCCESSFUL = ENDED - {RunStatus.COMPLETED}

_Values = dict[str, Any]

_STATE = f"SELECT {STATUS} AS state"
_RUN_KEY = f"SELECT r.id AS run_id, r.generation AS run_generation, {STATUS} AS state"
_OF_RUN_KEY = """
 CROSS JOIN edda_run r ON r.id = k.run_id AND r.generation = k.run_generation
  LEFT JOIN edda_open_run s ON s.run_id = r.id LEFT JOIN edda_result x ON x.run_id = r.id"""
_COUNT_BY_STATE = "SELECT state, count(*)"
_COUNT = "SELECT count(*)"
_ANY = "SELECT 1"
_CREATED = "SELECT r.created_at"
_WANTED = "IN (SELECT value FROM json_each(:statuses))"
_TEXT_IN_REASON = "ifnull(instr(lower(s.reason), lower(:text)), 0)"
_FITS = f"""
   AND r.created_at >= :created_from AND r.created_at < :created_to
   AND (r.created_at, r.id) < (:after_at, :after_id)
   AND r.id >= :id_from AND (:id_to IS NULL OR r.id < :id_to)
   AND (:workflow IS NULL OR r.workflow = :workflow)
   AND (:parent IS NULL OR r.parent = :parent)
   AND (:text IS NULL OR r.id = :text OR {_TEXT_IN_REASON}
        OR instr(lower(r.id), lower(:text)) AND (r.created_at, r.id) > (:ids_at, :ids_id))
   AND (:statuses IS NULL OR state {_WANTED})
   AND NOT EXISTS ({_ANY} FROM edda_run later WHERE later.id = r.id AND later.generation > r.generation)"""
_NEWEST_FIRST = " ORDER BY r.created_at DESC, r.id DESC LIMIT :limit"


class _SearchSource(Struct, frozen=True):
    """The joined tables in their order, and the range of the first one's index."""

    tables: str
    range: str

    @property
    def page(self) -> str:
        """Sorts the keys alone and joins the records afterwards: inputs and results may be long."""
        keys = f"{_RUN_KEY} FROM {self.tables} WHERE {self.range} {_FITS} {_NEWEST_FIRST}"
        return f"{RECORD} FROM ({keys}) k {_OF_RUN_KEY} {_NEWEST_FIRST}"

    @property
    def count(self) -> str:
        """By status, of the first `:limit` runs that fit."""
        fitting = f"{_STATE} FROM {self.tables} WHERE {self.range} {_FITS} LIMIT :limit"
        return f"{_COUNT_BY_STATE} FROM ({fitting}) GROUP BY state"


_SourceWithValues = tuple[_SearchSource, _Values]


class _RunSource(_SearchSource, frozen=True):
    first: str

    @property
    def size(self) -> str:
        return f"{_COUNT} FROM ({_ANY} FROM {self.first} WHERE {self.range} LIMIT :scan_limit)"

    @property
    def scan_boundary(self) -> str:
        """When the run behind the newest `:scan_limit` was created."""
        newest_first = "ORDER BY r.created_at DESC, r.id DESC LIMIT 1 OFFSET :scan_limit"
        return f"{_CREATED} FROM {self.first} WHERE {self.range} {newest_first}"


def _by(index: str, range: str) -> _RunSource:
    first = f"edda_run r INDEXED BY {index}"
    others = "LEFT JOIN edda_open_run s ON s.run_id = r.id LEFT JOIN edda_result x ON x.run_id = r.id"
    return _RunSource(f"{first} {others}", range, first)


_WHEN = "r.created_at >= :created_from AND r.created_at < :created_to"
_BY_PARENT = _by("edda_run_parent", "r.parent = :parent")
_BY_ID = _by("sqlite_autoindex_edda_run_1", "r.id >= :id_from AND r.id < :id_to")
_BY_WORKFLOW = _by("edda_run_workflow", f"r.workflow = :workflow AND {_WHEN}")
_BY_TIME = _by("edda_run_created", _WHEN)
_OPEN_RUNS = _SearchSource(
    """edda_open_run s
 CROSS JOIN edda_run r ON r.id = s.run_id AND r.generation = s.generation
  LEFT JOIN edda_result x ON x.run_id = r.id""",
    f"{OPEN_STATUS} {_WANTED} AND (:workflow IS NULL OR s.workflow = :workflow)",
)
_UNSUCCESSFUL_RUNS = _SearchSource(
    """edda_result x INDEXED BY edda_result_unusual
 CROSS JOIN edda_run r ON r.id = x.run_id AND r.generation = x.generation
  LEFT JOIN edda_open_run s ON s.run_id = r.id""",
    f"x.status <> 'completed' AND x.status {_WANTED}",
)
# Runs that a text finds though they are older than the ids it is searched in.
_WITH_REASON = _SearchSource(
    """edda_open_run s
 CROSS JOIN edda_run r ON r.id = s.run_id AND r.generation = s.generation
  LEFT JOIN edda_result x ON x.run_id = r.id""",
    _TEXT_IN_REASON,
)
_BY_WHOLE_ID = _by("sqlite_autoindex_edda_run_1", f"r.id = :text AND NOT {_TEXT_IN_REASON}")
_CREATED_AND_ID = "SELECT r.created_at, r.id"
# Reads no row of edda_run.
_COUNT_OPEN_BY_STATE = f"SELECT {OPEN_STATUS} AS state, count(*)"
_COUNT_OPEN = f"""
{_COUNT_OPEN_BY_STATE} FROM edda_open_run s
 WHERE s.run_id >= :id_from AND (:id_to IS NULL OR s.run_id < :id_to)
   AND (:workflow IS NULL OR s.workflow = :workflow) GROUP BY state"""
_COUNT_UNSUCCESSFUL = """
SELECT :status, count(*)
  FROM (SELECT 1 FROM edda_result INDEXED BY edda_result_unusual
         WHERE status = :status AND status <> 'completed' AND run_id >= :id_from AND (:id_to IS NULL OR run_id < :id_to)
         LIMIT :limit)"""
_COUNT_COMPLETED = """
SELECT 'completed', count(*)
  FROM (SELECT 1 FROM edda_result INDEXED BY edda_result_ended WHERE status = 'completed' LIMIT :limit)"""


class SQLiteSearch(Part):
    @query
    def search(self, db: Connection, query: RunQuery) -> tuple[RunRecord, ...]:
        values = _values(query, self._now())
        if query.text and query.ids_after is not None:
            return _page(db, _text_sources(query, values))
        if source := _selective_index(db, query, values):
            return _page(db, [(source, values)])
        broad, rare = _time_index(query), _rare_sources(query)
        if not rare:
            return _page(db, [(broad, values)])
        newest = _page(db, [(broad, values | _recent(db, broad, values))])
        return newest if len(newest) == query.limit else _page(db, [(source, values) for source in rare])

    @query
    def scan_boundary(self, db: Connection, query: RunQuery, scan_limit: int) -> tuple[int, RunId] | None:
        broad, values = _time_index(query), _values(replace(query, after=None), 0)
        newest_first = "ORDER BY r.created_at DESC, r.id DESC LIMIT 1 OFFSET :scan_limit"
        sql = f"{_CREATED_AND_ID} FROM {broad.first} WHERE {broad.range} {newest_first}"
        row = db.row(sql, values | {"scan_limit": scan_limit})
        return (row[0], row[1]) if row else None

    @query
    def count(self, db: Connection, query: RunQuery) -> dict[RunStatus, int]:
        query = replace(query, after=None, limit=-1)
        values = _values(query, self._now())
        if query.text and query.ids_after is not None:
            counted = _count_sources(db, _text_sources(query, values))
        elif source := _selective_index(db, query, values):
            counted = dict(db.rows(source.count, values))
        else:
            counted = _count_broadly(db, query, values)
        return {RunStatus(status): min(number, MAX_COUNT) for status, number in counted.items() if number}


def _rare_sources(query: RunQuery) -> Sequence[_SearchSource]:
    """Tables and indexes of runs that may be rare among the newest; empty if the query asks for frequent ones."""
    if _prefix_end(query.id_prefix or ""):
        return [_BY_ID]
    return [_OPEN_RUNS, _UNSUCCESSFUL_RUNS] if query.statuses and RunStatus.COMPLETED not in query.statuses else []


def _page(db: Connection, sources: Sequence[_SourceWithValues]) -> tuple[RunRecord, ...]:
    found = [to_run_record(row) for source, values in sources for row in db.rows(source.page, values)]
    found.sort(key=lambda run: (run.created_at, run.run_id), reverse=True)
    return tuple(found[: sources[0][1]["limit"]])


def _text_sources(query: RunQuery, values: _Values) -> list[_SourceWithValues]:
    """A text is searched in the ids of recent runs, and in the reasons and as a whole id of older ones: none twice."""
    since = values["ids_at"]
    recent = values | {"created_from": max(values["created_from"], since)}
    older = values | {"created_to": min(values["created_to"], since)}
    return [(_time_index(query), recent), (_WITH_REASON, older), (_BY_WHOLE_ID, older)]


def _count_sources(db: Connection, sources: Iterable[_SourceWithValues]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for source, values in sources:
        counted.update(dict(db.rows(source.count, values)))
    return counted


def _count_broadly(db: Connection, query: RunQuery, values: _Values) -> dict[str, int]:
    wanted = query.statuses or frozenset(RunStatus)
    counted = dict(_count_open(db, query, wanted & OPEN, values))
    limited = values | {"limit": MAX_COUNT}
    counts_all = _is_plain(query) and query.workflow is None
    for status in wanted & _UNSUCCESSFUL:
        sql = _COUNT_UNSUCCESSFUL if counts_all else _UNSUCCESSFUL_RUNS.count
        counted |= dict(db.rows(sql, limited | _only({status}) | {"status": status.value}))
    if RunStatus.COMPLETED in wanted:
        sql = _COUNT_COMPLETED if counts_all and not query.id_prefix else next(_candidate_indexes(query)).count
        counted |= dict(db.rows(sql, limited | _only({RunStatus.COMPLETED})))
    return counted


def _count_open(
    db: Connection, query: RunQuery, wanted: frozenset[RunStatus], values: _Values
) -> list[tuple[str, int]]:
    if not wanted:
        return []
    if not _is_plain(query):
        return db.rows(_OPEN_RUNS.count, values | _only(wanted))
    return [(status, number) for status, number in db.rows(_COUNT_OPEN, values) if status in wanted]


def _is_plain(query: RunQuery) -> bool:
    """Whether the query limits only statuses, the workflow and the prefix of the id."""
    limits = (query.text, query.created_from, query.created_to, query.parent)
    return all(value is None for value in limits)


def _selective_index(db: Connection, query: RunQuery, values: _Values) -> _RunSource | None:
    """An index that leaves fewer than `SCAN_LIMIT` rows; None if there is none."""
    for source in _candidate_indexes(query):
        if db.rows(source.size, values | {"scan_limit": SCAN_LIMIT})[0][0] < SCAN_LIMIT:
            return source
    return None


def _candidate_indexes(query: RunQuery) -> Iterator[_RunSource]:
    """The index that likely leaves the fewest rows comes first."""
    if query.parent is not None:
        yield _BY_PARENT
    if _prefix_end(query.id_prefix or ""):
        yield _BY_ID
    yield _time_index(query)
    if query.workflow is not None:
        yield _BY_TIME


def _time_index(query: RunQuery) -> _RunSource:
    return _BY_TIME if query.workflow is None else _BY_WORKFLOW


def _recent(db: Connection, source: _RunSource, values: _Values) -> _Values:
    """The value that limits a query to the newest `RECENT_LIMIT` runs."""
    row = db.row(source.scan_boundary, values | {"scan_limit": RECENT_LIMIT})
    return {"created_from": row[0]} if row else {}


def _only(statuses: Iterable[RunStatus]) -> _Values:
    return {"statuses": json.dumps([status.value for status in statuses])}


def _values(query: RunQuery, now: int) -> _Values:
    after_at, after_id = query.after or (MAX_INTEGER, "")
    ids_at, ids_id = query.ids_after or (-1, "")
    created_to = MAX_INTEGER if query.created_to is None else query.created_to
    prefix = query.id_prefix or ""
    statuses = _only(query.statuses) if query.statuses else {"statuses": None}
    return statuses | {
        "now": now,
        "created_from": query.created_from or 0,
        "created_to": created_to if query.after is None else min(created_to, after_at + 1),
        "after_at": after_at,
        "after_id": after_id,
        "id_from": prefix,
        "id_to": _prefix_end(prefix),
        "workflow": query.workflow,
        "parent": query.parent,
        "text": query.text or None,
        "ids_at": ids_at,
        "ids_id": ids_id,
        "limit": query.limit,
    }


def _prefix_end(prefix: str) -> str | None:
    """The first text after all texts with this prefix; None if there is no such text."""
    stem = prefix.rstrip("\U0010ffff")
    if not stem:
        return None
    following = ord(stem[-1]) + 1
    # Between these two are halves of surrogate pairs, which no text contains.
    return stem[:-1] + chr(0xE000 if following == 0xD800 else following)
