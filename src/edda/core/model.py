"""The records that travel between engine and storage.

Times are integers: microseconds since 1970 in UTC, on the database's clock. Payloads are bytes that
only the codec reads. Records are `msgspec` structs because thousands are made every second.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

from msgspec import Struct

from .states import RunStatus

RunId = NewType("RunId", str)
WorkerId = NewType("WorkerId", str)

MICROSECONDS = 1_000_000


class EntryKind(StrEnum):
    """What was delivered to a run's loop."""

    STEP = "step"
    """An activity's outcome."""
    TIMER = "timer"
    RETRY = "retry"
    """An attempt failed and another one is due; moves the driver, not the code."""
    CANCEL = "cancel"
    TIMEOUT = "timeout"
    """The run's own deadline passed."""
    LATE = "late"
    """The outcome of an activity that nobody waited for any more; moves no code."""


class Entry(Struct, frozen=True, gc=False):
    """One line of a run's history: an input delivered to its loop, in the order of delivery."""

    seq: int
    kind: EntryKind
    step: str
    name: str
    ok: bool
    at: int
    input: bytes = b""
    value: bytes = b""
    attempt: int = 1
    n: int | None = None
    """Its number in the run's inbox, if it came from outside."""


class Fence(Struct, frozen=True):
    """What a worker believes of its own fence row; a batch is written only if the row says the same."""

    worker: WorkerId
    batch_no: int
    moves: int


class Start(Struct, frozen=True):
    """A new run. With `ready_at` it is anybody's from then on; without, it is born owned by the writer."""

    run_id: RunId
    workflow: str
    input: bytes
    created_at: int
    ready_at: int | None = None
    deadline: int | None = None


class Absorb(Struct, frozen=True):
    """The run stays; its inbox is read up to `absorbed`."""

    absorbed: int


class Release(Struct, frozen=True):
    """The run leaves memory until `ready_at` (None: until something arrives).

    If mail came in meanwhile (`delivered` is not `absorbed`) it is ready at once instead.
    """

    absorbed: int
    ready_at: int | None
    status: RunStatus
    reason: str | None = None
    """For people: what it waits for, or why it is parked."""


class End(Struct, frozen=True):
    status: RunStatus
    value: bytes
    at: int


Move = Absorb | Release | End


class Bundle(Struct, frozen=True):
    """All that one run puts into one batch. Move None: the history grows, nothing else changes."""

    run_id: RunId
    epoch: int
    gen: int
    entries: tuple[Entry, ...] = ()
    start: Start | None = None
    move: Move | None = None

    @property
    def size(self) -> int:
        size = len(self.start.input) if self.start is not None else 0
        for entry in self.entries:
            size += len(entry.input) + len(entry.value)
        return size


class Delivery(Struct, frozen=True):
    """One numbered letter in a run's inbox, written by somebody who does not own the run."""

    run_id: RunId
    n: int
    kind: EntryKind
    at: int
    step: str = ""
    value: bytes = b""


class ClaimedRun(Struct, frozen=True):
    """A run that is now ours, with all that is needed to replay it."""

    run_id: RunId
    workflow: str
    gen: int
    epoch: int
    input: bytes
    created_at: int
    deadline: int | None
    absorbed: int
    attempts: int
    """How often it was parked in a row; decides how long it rests next time."""
    entries: tuple[Entry, ...]
    mail: tuple[Delivery, ...]


class Claim(Struct, frozen=True):
    now: int
    runs: tuple[ClaimedRun, ...]


class RunRecord(Struct, frozen=True):
    """What is known of one run, for people and for callers who wait for its result."""

    run_id: RunId
    workflow: str
    gen: int
    status: RunStatus
    input: bytes
    created_at: int
    deadline: int | None
    owner: WorkerId | None
    ready_at: int | None
    reason: str | None
    ended_at: int | None
    value: bytes | None
    """The result, or the error of a failed run; None while it is open."""


class RunFilter(Struct, frozen=True):
    """Newest first. `before` is the key of the last row of the page before."""

    status: RunStatus | None = None
    workflow: str | None = None
    created_from: int | None = None
    created_to: int | None = None
    before: tuple[int, RunId] | None = None
    limit: int = 50


class WorkerInfo(Struct, frozen=True):
    id: WorkerId
    service: str
    host: str
    pid: int


class Takeover(Struct, frozen=True):
    worker: WorkerId
    moved: int


class CancelOutcome(StrEnum):
    REQUESTED = "requested"
    ALREADY = "already"
    """Somebody asked before."""
    ENDED = "ended"
    MISSING = "missing"
