"""Records with the boring fields filled in, so that a test names only what it is about."""

from __future__ import annotations

from edda.core.model import MICROSECONDS, Bundle, End, Entry, EntryKind, Move, RunId, Start
from edda.core.states import RunStatus

HOUR = 3600 * MICROSECONDS
LAPSED = -HOUR
"""A lease that was over before it began: no test has to wait for one."""
LATER = 4_000_000_000 * MICROSECONDS
"""A due time that no test lives to see (the year 2096)."""
WORKFLOW = "checkout"


def start(run_id: str, *, ready_at: int | None = None, workflow: str = WORKFLOW, created_at: int = 1_000) -> Start:
    return Start(RunId(run_id), workflow, b"input of " + run_id.encode(), created_at, ready_at)


def entry(seq: int, value: bytes = b"", n: int | None = None) -> Entry:
    return Entry(
        seq, EntryKind.STEP, f"step{seq}", "pay", ok=True, at=2_000 + seq, input=b"in", value=value, attempt=1, n=n
    )


def bundle(
    run_id: str, *entries: Entry, move: Move | None = None, start: Start | None = None, epoch: int = 1
) -> Bundle:
    return Bundle(RunId(run_id), epoch, 0, entries, start, move)


def born(run_id: str, *entries: Entry, move: Move | None = None, workflow: str = WORKFLOW) -> Bundle:
    """A run started by the worker that writes it."""
    return bundle(run_id, *entries, move=move, start=start(run_id, workflow=workflow))


def done(value: bytes = b"result") -> End:
    return End(RunStatus.COMPLETED, value, 9_000)
