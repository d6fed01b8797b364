"""Runs looked for among many.

Every question is put to the index that leaves the fewest rows. If none leaves few, runs are gone through newest first;
unless those that are looked for are seldom, which the open and the unsuccessful ones mostly are: they have tables and
indexes of their own.
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

from .connection import Connection
from .runs import OPEN_STATUS, RECORD, STATUS, as_record

SCAN_LIMIT = 10_000
"""So many rows are looked at one by one."""
RECENT_LIMIT = 2_000
"""So many runs are gone through in the hope of a page of the seldom ones."""
_LAST = 2**63 - 1
_UNUSUAL = ENDED - {RunStatus.COMPLETED}

_Values = dict[str, Any]

_STATE = f"SELECT {STATUS} AS state"
_PLACE = f"SELECT r.id AS run_id, r.gen AS run_gen, {STATUS} AS state"
_OF_PLACE = """
 CROSS JOIN edda_run r ON r.id = p.run_id AND r.gen = p.run_gen
  LEFT JOIN edda_sched s ON s.run_id = r.id LEFT JOIN edda_result x ON x.run_id = r.id"""
_TALLY = "SELECT state, count(*)"
_NUMBER = "SELECT count(*)"
_ANY = "SELECT 1"
_MOMENT = "SELECT r.created_at"
_WANTED = "IN (SELECT value FROM json_each(:statuses))"
_EXPLAINED = "ifnull(instr(lower(s.reason), lower(:text)), 0)"
_FITS = f"""
   AND r.created_at >= :created_from AND r.created_at < :created_to
   AND (r.created_at, r.id) < (:after_at, :after_id)
   AND r.id >= :id_from AND (:id_to IS NULL OR r.id < :id_to)
   AND (:workflow IS NULL OR r.workflow = :workflow)
   AND (:parent IS NULL OR r.parent = :parent)
   AND (:text IS NULL OR r.id = :text OR {_EXPLAINED}
        OR instr(lower(r.id), lower(:text)) AND (r.created_at, r.id) > (:ids_at, :ids_id))
   AND (:statuses IS NULL OR state {_WANTED})
   AND NOT EXISTS ({_ANY} FROM edda_run later WHERE later.id = r.id AND later.gen > r.gen)"""
_NEWEST_FIRST = " ORDER BY r.created_at DESC, r.id DESC LIMIT :limit"


class _SearchSource(Struct, frozen=True):
    """Where to begin: the tables in their order, and the range of the first one's index."""

    tables: str
    range: str

    @property
    def events_under_key(self) -> str:
        """Sorted by what is needed for it alone: inputs and results may be long."""
        places = f"{_PLACE} FROM {self.tables} WHERE {self.range} {_FITS} {_NEWEST_FIRST}"
        return f"{RECORD} FROM ({places}) p {_OF_PLACE} {_NEWEST_FIRST}"

    @property
    def count(self) -> str:
        """By status, of the first so many that fit."""
        fitting = f"{_STATE} FROM {self.tables} WHERE {self.range} {_FITS} LIMIT :limit"
        return f"{_TALLY} FROM ({fitting}) GROUP BY state"


_Part = tuple[_SearchSource, _Values]
"""Where to begin, and the values that limit it."""


class _RunSource(_SearchSource, frozen=True):
    first: str

    @property
    def size(self) -> str:
        return f"{_NUMBER} FROM ({_ANY} FROM {self.first} WHERE {self.range} LIMIT :few)"

    @property
    def scan_boundary(self) -> str:
        """When the first of the newest few was created."""
        newest_first = "ORDER BY r.created_at DESC, r.id DESC LIMIT 1 OFFSET :few"
        return f"{_MOMENT} FROM {self.first} WHERE {self.range} {newest_first}"


def _by(index: str, range: str) -> _RunSource:
    first = f"edda_run r INDEXED BY {index}"
    others = "LEFT JOIN edda_sched s ON s.run_id = r.id LEFT JOIN edda_result x ON x.run_id = r.id"
    return _RunSource(f"{first} {others}", range, first)


_WHEN = "r.created_at >= :created_from AND r.created_at < :created_to"
_BY_PARENT = _by("edda_run_parent", "r.parent = :parent")
_BY_ID = _by("sqlite_autoindex_edda_run_1", "r.id >= :id_from AND r.id < :id_to")
_BY_WORKFLOW = _by("edda_run_workflow", f"r.workflow = :workflow AND {_WHEN}")
_BY_TIME = _by("edda_run_created", _WHEN)
_OPEN_ONES = _SearchSource(
    """edda_sched s
 CROSS JOIN edda_run r ON r.id = s.run_id AND r.gen = s.gen
  LEFT JOIN edda_result x ON x.run_id = r.id""",
    f"{OPEN_STATUS} {_WANTED} AND (:workflow IS NULL OR s.workflow = :workflow)",
)
_UNUSUAL_ONES = _SearchSource(
    """edda_result x INDEXED BY edda_result_unusual
 CROSS JOIN edda_run r ON r.id = x.run_id AND r.gen = x.gen
  LEFT JOIN edda_sched s ON s.run_id = r.id""",
    f"x.status <> 'completed' AND x.status {_WANTED}",
)
# Those that a text finds though they are older than the ids it is looked for in.
_EXPLAINED_ONES = _SearchSource(
    """edda_sched s
 CROSS JOIN edda_run r ON r.id = s.run_id AND r.gen = s.gen
  LEFT JOIN edda_result x ON x.run_id = r.id""",
    _EXPLAINED,
)
_BY_WHOLE_ID = _by("sqlite_autoindex_edda_run_1", f"r.id = :text AND NOT {_EXPLAINED}")
_HORIZON = "SELECT r.created_at, r.id"
# Without a look at the runs themselves.
_OPEN_TALLY = f"SELECT {OPEN_STATUS} AS state, count(*)"
_COUNT_OPEN = f"""
{_OPEN_TALLY} FROM edda_sched s
 WHERE s.run_id >= :id_from AND (:id_to IS NULL OR s.run_id < :id_to)
   AND (:workflow IS NULL OR s.workflow = :workflow) GROUP BY state"""
_COUNT_UNUSUAL = """
SELECT :status, count(*)
  FROM (SELECT 1 FROM edda_result INDEXED BY edda_result_unusual
         WHERE status = :status AND status <> 'completed' AND run_id >= :id_from AND (:id_to IS NULL OR run_id < :id_to)
         LIMIT :limit)"""
_COUNT_COMPLETED = """
SELECT 'completed', count(*)
  FROM (SELECT 1 FROM edda_result INDEXED BY edda_result_ended WHERE status = 'completed' LIMIT :limit)"""


def search(db: Connection, query: RunQuery, now: int) -> tuple[RunRecord, ...]:
    values = _values(query, now)
    if query.text and query.ids_after is not None:
        return _page(db, _text_sources(query, values))
    if source := _selective_index(db, query, values):
        return _page(db, [(source, values)])
    broad, seldom = _time_index(query), _rare_sources(query)
    if not seldom:
        return _page(db, [(broad, values)])
    newest = _page(db, [(broad, values | _moment(db, broad, values))])
    return newest if len(newest) == query.limit else _page(db, [(source, values) for source in seldom])


def _rare_sources(query: RunQuery) -> Sequence[_SearchSource]:
    """Where to look for what may be seldom among the newest."""
    if _prefix_end(query.id_prefix or ""):
        return [_BY_ID]
    return [_OPEN_ONES, _UNUSUAL_ONES] if query.statuses and RunStatus.COMPLETED not in query.statuses else []


def _page(db: Connection, parts: Sequence[_Part]) -> tuple[RunRecord, ...]:
    found = [as_record(row) for source, values in parts for row in db.rows(source.events_under_key, values)]
    found.sort(key=lambda run: (run.created_at, run.run_id), reverse=True)
    return tuple(found[: parts[0][1]["limit"]])


def _text_sources(query: RunQuery, values: _Values) -> list[_Part]:
    """By the text: those that are new enough for a look at their ids, and the older ones, none of them twice."""
    since = values["ids_at"]
    recent = values | {"created_from": max(values["created_from"], since)}
    older = values | {"created_to": min(values["created_to"], since)}
    return [(_time_index(query), recent), (_EXPLAINED_ONES, older), (_BY_WHOLE_ID, older)]


def scan_boundary(db: Connection, query: RunQuery, reach: int) -> tuple[int, RunId] | None:
    broad, values = _time_index(query), _values(replace(query, after=None), 0)
    newest_first = "ORDER BY r.created_at DESC, r.id DESC LIMIT 1 OFFSET :reach"
    row = db.row(f"{_HORIZON} FROM {broad.first} WHERE {broad.range} {newest_first}", values | {"reach": reach})
    return (row[0], row[1]) if row else None


def count(db: Connection, query: RunQuery, now: int) -> dict[RunStatus, int]:
    query = replace(query, after=None, limit=-1)
    values = _values(query, now)
    if query.text and query.ids_after is not None:
        counted = _count_told(db, _text_sources(query, values))
    elif source := _selective_index(db, query, values):
        counted = dict(db.rows(source.count, values))
    else:
        counted = _count_broadly(db, query, values)
    return {RunStatus(status): min(number, MAX_COUNT) for status, number in counted.items() if number}


def _count_told(db: Connection, parts: Iterable[_Part]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for source, values in parts:
        counted.update(dict(db.rows(source.count, values)))
    return counted


def _count_broadly(db: Connection, query: RunQuery, values: _Values) -> dict[str, int]:
    wanted = query.statuses or frozenset(RunStatus)
    counted = dict(_count_open(db, query, wanted & OPEN, values))
    limited = values | {"limit": MAX_COUNT}
    any_will_do = _is_plain(query) and query.workflow is None
    for status in wanted & _UNUSUAL:
        sql = _COUNT_UNUSUAL if any_will_do else _UNUSUAL_ONES.count
        counted |= dict(db.rows(sql, limited | _only({status}) | {"status": status.value}))
    if RunStatus.COMPLETED in wanted:
        sql = _COUNT_COMPLETED if any_will_do and not query.id_prefix else next(_candidate_indexes(query)).count
        counted |= dict(db.rows(sql, limited | _only({RunStatus.COMPLETED})))
    return counted


def _count_open(
    db: Connection, query: RunQuery, wanted: frozenset[RunStatus], values: _Values
) -> list[tuple[str, int]]:
    if not wanted:
        return []
    if not _is_plain(query):
        return db.rows(_OPEN_ONES.count, values | _only(wanted))
    return [(status, number) for status, number in db.rows(_COUNT_OPEN, values) if status in wanted]


def _is_plain(query: RunQuery) -> bool:
    """Asks for nothing but statuses, the workflow and the beginning of the id."""
    asked = (query.text, query.created_from, query.created_to, query.parent)
    return all(value is None for value in asked)


def _selective_index(db: Connection, query: RunQuery, values: _Values) -> _RunSource | None:
    """An index that leaves few rows."""
    for source in _candidate_indexes(query):
        if db.rows(source.size, values | {"few": SCAN_LIMIT})[0][0] < SCAN_LIMIT:
            return source
    return None


def _candidate_indexes(query: RunQuery) -> Iterator[_RunSource]:
    """Those that will likely leave the fewest rows first."""
    if query.parent is not None:
        yield _BY_PARENT
    if _prefix_end(query.id_prefix or ""):
        yield _BY_ID
    yield _time_index(query)
    if query.workflow is not None:
        yield _BY_TIME


def _time_index(query: RunQuery) -> _RunSource:
    """Newest first."""
    return _BY_TIME if query.workflow is None else _BY_WORKFLOW


def _moment(db: Connection, source: _RunSource, values: _Values) -> _Values:
    """Nothing before the newest few."""
    row = db.row(source.scan_boundary, values | {"few": RECENT_LIMIT})
    return {"created_from": row[0]} if row else {}


def _only(statuses: Iterable[RunStatus]) -> _Values:
    return {"statuses": json.dumps([status.value for status in statuses])}


def _values(query: RunQuery, now: int) -> _Values:
    after_at, after_id = query.after or (_LAST, "")
    ids_at, ids_id = query.ids_after or (-1, "")
    created_to = _LAST if query.created_to is None else query.created_to
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
    """The first text after all those that begin with it; None if there is no such text."""
    stem = prefix.rstrip("\U0010ffff")
    if not stem:
        return None
    following = ord(stem[-1]) + 1
    # Between these two there are halves of surrogate pairs, which no text has.
    return stem[:-1] + chr(0xE000 if following == 0xD800 else following)
