"""Rows of a database as records. Each function names the columns that it takes, in their order.

MySQL's columns for ids and names are binary, so that no collation compares them, and come as bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from edda.core.model import (
    ClaimedRun,
    Crashes,
    EndWatcher,
    Entry,
    EntryKind,
    Event,
    InboxItem,
    MatchPaths,
    OutboxEvent,
    OutboxRow,
    OutboxState,
    RunId,
    RunRecord,
    RunValue,
    StagedEventRow,
    StagedKind,
    StepCommit,
    StoredEvent,
    Wait,
    WorkerId,
)
from edda.core.states import RunStatus

Row = Iterable[Any]

_KINDS = {kind.value: kind for kind in EntryKind}


def to_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def to_run_id(value: str | bytes) -> RunId:
    return RunId(to_text(value))


def to_worker_id(value: str | bytes) -> WorkerId:
    return WorkerId(to_text(value))


def _optional_run_id(value: str | bytes | None) -> RunId | None:
    return None if value is None else to_run_id(value)


def to_entry(row: Row) -> Entry:
    seq, kind, step, name, ok, at, input, value, attempt, inbox_no, event = row
    return Entry(seq, _KINDS[kind], step, name, bool(ok), at, input, value, attempt, inbox_no, event)


def to_inbox_item(row: Row) -> InboxItem:
    run_id, inbox_no, kind, at, step, value, event = row
    return InboxItem(to_run_id(run_id), inbox_no, _KINDS[kind], at, step, value, event)


def to_stored_event(row: Row) -> StoredEvent:
    seq, received_at, source, id, type, target, body = row
    event = Event(to_text(source), to_text(id), to_text(type), _optional_run_id(target), body)
    return StoredEvent(seq, received_at, event)


def to_wait(row: Row) -> Wait:
    step, key, target_key, type, match, due, exclusive = row
    return Wait(to_text(step), key, target_key, to_text(type), match, due, exclusive=bool(exclusive))


def to_watcher(row: Row) -> EndWatcher:
    watcher, step = row
    return EndWatcher(to_run_id(watcher), to_text(step))


def to_step_commit(row: Row) -> StepCommit:
    step, attempt, value, at = row
    return StepCommit(to_text(step), attempt, value, at)


def to_run_value(row: Row) -> RunValue:
    name, value = row
    return RunValue(to_text(name), value)


def to_staged_event(row: Row) -> StagedEventRow:
    seq, kind, body = row
    return StagedEventRow(seq, StagedKind(kind), body)


def to_outbox_row(row: Row) -> OutboxRow:
    seq, id, order_key, type, source, body, created_at, run_id, state, attempts, due, reason, ended_at = row
    names = (to_text(id), to_text(order_key), to_text(type), to_text(source))
    event = OutboxEvent(*names, body, created_at, _optional_run_id(run_id))
    return OutboxRow(seq, event, OutboxState(state), attempts, due, reason, ended_at)


def to_run_record(row: Row) -> RunRecord:
    run_id, workflow, generation, status, input, created_at, deadline, owner, *rest = row
    ready_at, reason, ended_at, value, parent, deaths, has_cancel = rest
    return RunRecord(
        run_id=to_run_id(run_id),
        workflow=to_text(workflow),
        generation=generation,
        status=RunStatus(status),
        input=input,
        created_at=created_at,
        deadline=deadline,
        owner=None if owner is None else to_worker_id(owner),
        ready_at=ready_at,
        reason=reason,
        ended_at=ended_at,
        value=value,
        parent=_optional_run_id(parent),
        deaths=deaths,
        has_cancel=bool(has_cancel),
    )


def to_claimed_run(
    open_run: Row,
    run: Row,
    *,
    epoch: int,
    entries: Iterable[Entry],
    inbox: Iterable[InboxItem],
    waits: Iterable[tuple[str, bytes]],
    watchers: Iterable[EndWatcher],
    step_commits: Iterable[StepCommit],
) -> ClaimedRun:
    run_id, workflow, generation, inbox_read, attempts, event_cursor, compensating, end_if_parked, *crashes = open_run
    input, created_at, deadline, parent, parent_step, depth = run
    return ClaimedRun(
        run_id=to_run_id(run_id),
        workflow=to_text(workflow),
        generation=generation,
        epoch=epoch,
        input=input,
        created_at=created_at,
        deadline=deadline,
        inbox_read=inbox_read,
        attempts=attempts,
        entries=tuple(entries),
        inbox=tuple(inbox),
        waits=tuple(waits),
        event_cursor=event_cursor,
        parent=_optional_run_id(parent),
        parent_step=parent_step,
        depth=depth,
        watchers=tuple(watchers),
        step_commits=tuple(step_commits),
        compensating=bool(compensating),
        end_if_parked=bool(end_if_parked),
        crashes=Crashes(*crashes),
    )


def to_match_paths(rows: Iterable[Row]) -> dict[str, MatchPaths]:
    """By event type, of rows that are sorted by their paths."""
    found: dict[str, MatchPaths] = {}
    for type, version, paths in rows:
        known = found.get(to_text(type), MatchPaths()).known
        found[to_text(type)] = MatchPaths(version, (*known, to_text(paths)))
    return found


def rows_by_run(rows: Iterable[Any]) -> defaultdict[Any, list[Any]]:
    """Rows that begin with the id of a run, by that id."""
    groups: defaultdict[Any, list[Any]] = defaultdict(list)
    for row in rows:
        groups[row[0]].append(row)
    return groups
