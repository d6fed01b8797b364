"""Rows of the database as records; ids come as bytes, because their columns are binary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from edda.core.model import (
    ClaimedRun,
    Crashes,
    EndWatcher,
    Entry,
    EntryKind,
    Event,
    InboxItem,
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

from .session import Row

_KINDS = {kind.value: kind for kind in EntryKind}


def run_id(value: bytes) -> RunId:
    return RunId(value.decode())


def maybe_run_id(value: bytes | None) -> RunId | None:
    return None if value is None else run_id(value)


def worker_id(value: bytes) -> WorkerId:
    return WorkerId(value.decode())


def entry(row: Row) -> Entry:
    seq, kind, step, name, ok, at, given, value, attempt, n, event = row
    return Entry(seq, _KINDS[kind], step, name, bool(ok), at, given, value, attempt, n, event)


def delivery(row: Row) -> InboxItem:
    run, n, kind, at, step, value, event = row
    return InboxItem(run_id(run), n, _KINDS[kind], at, step, value, event)


def stored_event(row: Row) -> StoredEvent:
    seq, received_at, source, id, type, target, body = row
    event = Event(source.decode(), id.decode(), type.decode(), maybe_run_id(target), body)
    return StoredEvent(seq, received_at, event)


def wait(row: Row) -> Wait:
    step, key, own_key, type, match, due, once = row
    return Wait(step.decode(), key, own_key, type.decode(), match, due, once=bool(once))


def watcher(row: Row) -> EndWatcher:
    run, step = row
    return EndWatcher(run_id(run), step.decode())


def stored_dispatch(row: Row) -> StagedEventRow:
    seq, kind, body = row
    return StagedEventRow(seq, StagedKind(kind), body)


def outgoing_record(row: Row) -> OutboxRow:
    seq, id, key, type, source, body, created_at, run, state, attempts, due, reason, ended_at = row
    names = (id.decode(), key.decode(), type.decode(), source.decode())
    event = OutboxEvent(*names, body, created_at, maybe_run_id(run))
    return OutboxRow(seq, event, OutboxState(state), attempts, due, reason, ended_at)


def done(row: Row) -> StepCommit:
    step, attempt, value, at = row
    return StepCommit(step.decode(), attempt, value, at)


def fact(row: Row) -> RunValue:
    name, value = row
    return RunValue(name.decode(), value)


def run_record(row: Row) -> RunRecord:
    run, workflow, gen, status, given, created_at, deadline, owner, ready_at, reason, ended_at, value, *rest = row
    parent, deaths, has_cancel = rest
    return RunRecord(
        run_id=run_id(run),
        workflow=workflow.decode(),
        gen=gen,
        status=RunStatus(status),
        input=given,
        created_at=created_at,
        deadline=deadline,
        owner=None if owner is None else worker_id(owner),
        ready_at=ready_at,
        reason=reason,
        ended_at=ended_at,
        value=value,
        parent=maybe_run_id(parent),
        deaths=deaths,
        has_cancel=bool(has_cancel),
    )


def claimed_runs(
    due: Iterable[Row],
    waits: Iterable[Row],
    runs: Iterable[Row],
    hist: Iterable[Row],
    mail: Iterable[Row],
    watching: Iterable[Row],
    recorded: Iterable[Row],
) -> tuple[ClaimedRun, ...]:
    """Put together what was read after the claim; runs that were lost again meanwhile are left out."""
    started = {row[0]: row for row in runs}
    lines: dict[bytes, list[Row]] = defaultdict(list)
    for row in hist:
        lines[row[0]].append(row)
    letters: dict[bytes, list[InboxItem]] = defaultdict(list)
    for row in mail:
        letters[row[0]].append(delivery(row))
    steps: dict[bytes, list[tuple[str, bytes]]] = defaultdict(list)
    for run, step, key in waits:
        steps[run].append((step.decode(), key))
    watchers: dict[bytes, list[EndWatcher]] = defaultdict(list)
    for row in watching:
        watchers[row[0]].append(watcher(row[1:]))
    steps_done: dict[bytes, list[StepCommit]] = defaultdict(list)
    for row in recorded:
        steps_done[row[0]].append(done(row[1:]))
    claimed = []
    for _, run, workflow, gen, epoch, absorbed, attempts, start_seq, undoing, ends, deaths, alone, seq, _ in due:
        if run not in started or _is_void(lines[run], epoch + 1, absorbed):
            continue
        _, given, created_at, deadline, parent, parent_step, depth = started[run]
        entries = sorted((entry(row[2:]) for row in lines[run]), key=_seq)
        claimed.append(
            ClaimedRun(
                run_id=run_id(run),
                workflow=workflow.decode(),
                gen=gen,
                epoch=epoch + 1,
                input=given,
                created_at=created_at,
                deadline=deadline,
                absorbed=absorbed,
                attempts=attempts,
                entries=tuple(entries),
                mail=tuple(letters[run]),
                waits=tuple(steps[run]),
                start_seq=start_seq,
                parent=maybe_run_id(parent),
                parent_step=parent_step,
                depth=depth,
                watchers=tuple(watchers[run]),
                done=tuple(steps_done[run]),
                undoing=bool(undoing),
                end_if_parked=bool(ends),
                crashes=Crashes(deaths, alone, seq),
            )
        )
    return tuple(claimed)


def _seq(line: Entry) -> int:
    return line.seq


def _is_void(lines: Iterable[Row], epoch: int, absorbed: int) -> bool:
    """History newer than the claim: whoever claimed was stopped in between, and the run passed on."""
    return any(wrote > epoch or (n or 0) > absorbed for _, wrote, *_, n, _ in lines)
