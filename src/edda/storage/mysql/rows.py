"""Rows of the database as records; ids come as bytes, because their columns are binary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from edda.core.model import ClaimedRun, Delivery, Entry, EntryKind, Event, RunId, RunRecord, StoredEvent, Wait, WorkerId
from edda.core.states import RunStatus

from .session import Reply, Row

_KINDS = {kind.value: kind for kind in EntryKind}


def run_id(value: bytes) -> RunId:
    return RunId(value.decode())


def worker_id(value: bytes) -> WorkerId:
    return WorkerId(value.decode())


def entry(row: Row) -> Entry:
    seq, kind, step, name, ok, at, given, value, attempt, n, event = row
    return Entry(seq, _KINDS[kind], step, name, bool(ok), at, given, value, attempt, n, event)


def delivery(row: Row) -> Delivery:
    run, n, kind, at, step, value, event = row
    return Delivery(run_id(run), n, _KINDS[kind], at, step, value, event)


def stored_event(row: Row) -> StoredEvent:
    seq, received_at, source, id, type, target, body = row
    to = None if target is None else run_id(target)
    return StoredEvent(seq, received_at, Event(source.decode(), id.decode(), type.decode(), to, body))


def wait(row: Row) -> Wait:
    step, key, own_key, type, match, due = row
    return Wait(step.decode(), key, own_key, type.decode(), match, due)


def run_record(row: Row) -> RunRecord:
    run, workflow, gen, status, given, created_at, deadline, owner, ready_at, reason, ended_at, value = row
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
    )


def claimed_runs(
    due: Iterable[Row], waits: Reply, runs: Reply, hist: Reply, mail: Iterable[Reply]
) -> tuple[ClaimedRun, ...]:
    """Put together what was read after the claim; runs that were lost again meanwhile are left out."""
    started = {row[0]: row for row in runs.rows}
    lines: dict[bytes, list[Row]] = defaultdict(list)
    for row in hist.rows:
        lines[row[0]].append(row)
    letters: dict[bytes, list[Delivery]] = defaultdict(list)
    for reply in mail:
        for row in reply.rows:
            letters[row[0]].append(delivery(row))
    steps: dict[bytes, list[str]] = defaultdict(list)
    for run, step in waits.rows:
        steps[run].append(step.decode())
    claimed = []
    for _, run, workflow, gen, epoch, absorbed, attempts, start_seq in due:
        if run not in started or _is_void(lines[run], epoch + 1, absorbed):
            continue
        _, given, created_at, deadline = started[run]
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
            )
        )
    return tuple(claimed)


def _seq(line: Entry) -> int:
    return line.seq


def _is_void(lines: Iterable[Row], epoch: int, absorbed: int) -> bool:
    """History newer than the claim: whoever claimed was stopped in between, and the run passed on."""
    return any(wrote > epoch or (n or 0) > absorbed for _, wrote, *_, n, _ in lines)
