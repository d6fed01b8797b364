"""What the engine asks of a database.

Each adapter implements all of these; the conformance suite is the same for every one. Three errors
matter to callers: `StorageUnavailableError` (no answer; it may be in), `StorageConflictError` (rolled
back; send it again) and `StorageRejectedError` (the data itself is refused).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from edda.core.model import (
    Bundle,
    CancelOutcome,
    Claim,
    Delivery,
    Entry,
    Fence,
    RunFilter,
    RunId,
    RunRecord,
    Start,
    Takeover,
    WorkerId,
    WorkerInfo,
)


class Probe(Protocol):
    """Stands beside every statement; tests crash or cut the connection there by raising."""

    def before(self, statement: str) -> None: ...

    def after(self, statement: str) -> None: ...


class Journal(Protocol):
    async def write(self, fence: Fence, batch: Sequence[Bundle]) -> frozenset[RunId] | None:
        """Write the batch in one commit if the fence row still says `fence`; None if it does not.

        Returns the released runs that are ready again at once because mail had come in.
        """
        ...

    async def read_fence(self, worker: WorkerId) -> Fence | None: ...

    async def owned(self, worker: WorkerId) -> dict[RunId, int]:
        """The runs this worker owns, with their epochs."""
        ...


class Workers(Protocol):
    async def register(self, worker: WorkerInfo, lease: int) -> int:
        """Insert fence and worker rows in one commit; returns the database's time."""
        ...

    async def retire(self, worker: WorkerId) -> None:
        """A worker leaves for good, or is known to be dead: what it still owns is ready for others at once."""
        ...

    async def neighbours(self, host: str) -> tuple[WorkerInfo, ...]:
        """The workers registered from this host: it can tell which of their processes are dead."""
        ...

    async def take_over(self, me: WorkerId) -> Takeover | None:
        """Free the runs of one worker whose lease has lapsed, in one transaction."""
        ...

    async def free_orphans(self) -> int:
        """Free runs owned by a worker without a fence row (a taker died between two transactions)."""
        ...

    async def disown(self, run_id: RunId) -> bool:
        """Take one run away from its live owner, behind a bump of the owner's `moves`."""
        ...

    async def pulse(self) -> Pulse:
        """A heartbeat connection of its own, for the thread and loop that calls this."""
        ...


class Pulse(Protocol):
    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        """Prolong the lease; the database's time, or None if the worker was taken over."""
        ...

    async def close(self) -> None: ...


class Queue(Protocol):
    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int) -> Claim: ...

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        """Microseconds (on the database's clock) until the first unowned run is due; None if there is none."""
        ...

    async def unpark(self, workflows: Sequence[str]) -> int:
        """Make the parked runs of these workflows ready: a new worker may bring the code they need."""
        ...

    async def mail(self, worker: WorkerId) -> tuple[Delivery, ...]:
        """Letters not absorbed yet, for runs this worker owns."""
        ...


class Runs(Protocol):
    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        """Insert unowned runs, skipping ids that exist; returns the ids that are new."""
        ...

    async def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome: ...

    async def get(self, run_id: RunId) -> RunRecord | None: ...

    async def history(self, run_id: RunId, gen: int | None = None) -> tuple[Entry, ...]: ...

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]: ...


class News(Protocol):
    async def announce(self) -> None:
        """Tell the other processes that there is something to claim or to read."""
        ...

    async def news(self, timeout: float) -> None:
        """Return when another process announced something, or after `timeout` seconds."""
        ...


@runtime_checkable
class Storage(Journal, Workers, Queue, Runs, News, Protocol):
    """All of it, plus a life of its own."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def kill(self) -> None:
        """Drop every connection at once, as a dying process would."""
        ...

    async def migrate(self) -> tuple[str, ...]:
        """Apply what is missing, under a lock that a second migrator waits for; returns what was applied."""
        ...

    async def pending_migrations(self) -> tuple[str, ...]: ...

    async def now(self) -> int: ...
