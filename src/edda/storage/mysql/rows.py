"""Rows of the database as records; ids come as bytes, because their columns are binary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from edda.core.model import ClaimedRun, Delivery, Entry, EntryKind, RunId, RunRecord, WorkerId
from edda.core.states import RunStatus

from .session import Reply, Row

_KINDS = {kind.value: kind for kind in EntryKind}


def run_id(value: bytes) -> RunId:
    return RunId(value.decode())


def worker_id(value: bytes) -> WorkerId:
    return WorkerId(value.decode())


def entry(row: Row) -> Entry:
    seq, kind, step, name, ok, at, given, value, attempt, n = row
    return Entry(seq, _KINDS[kind], step, name, bool(ok), at, given, value, attempt, n)


def delivery(row: Row) -> Delivery:
    run, n, kind, at, step, value = row
    return Delivery(run_id(run), n, _KINDS[kind], at, step, value)


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


def claimed_runs(due: Iterable[Row], runs: Reply, hist: Reply, mail: Reply) -> tuple[ClaimedRun, ...]:
    """Put together what was read after the claim; runs that were lost again meanwhile are left out."""
    started = {row[0]: row for row in runs.rows}
    lines: dict[bytes, list[Row]] = defaultdict(list)
    for row in hist.rows:
        lines[row[0]].append(row)
    letters: dict[bytes, list[Delivery]] = defaultdict(list)
    for row in mail.rows:
        letters[row[0]].append(delivery(row))
    claimed = []
    for _, run, workflow, gen, epoch, absorbed, attempts in due:
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
            )
        )
    return tuple(claimed)


def _seq(line: Entry) -> int:
    return line.seq


def _is_void(lines: Iterable[Row], epoch: int, absorbed: int) -> bool:
    """History newer than the claim: whoever claimed was stopped in between, and the run passed on."""
    return any(row[1] > epoch or (row[-1] or 0) > absorbed for row in lines)
