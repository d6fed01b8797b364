"""What the engine asks of a database.

Each adapter implements all of these; the conformance suite is the same for every one. Three errors
matter to callers: `StorageUnavailableError` (no answer; it may be in), `StorageConflictError` (rolled
back; send it again) and `StorageRejectedError` (the data itself is refused).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from edda.core.model import (
    MICROSECONDS,
    AcceptResult,
    BatchResult,
    CancelOutcome,
    Claim,
    EndWatcher,
    Entry,
    Fence,
    InboxItem,
    MatchPaths,
    NewEvent,
    OutboxEvent,
    OutboxRow,
    OutboxState,
    RunFilter,
    RunId,
    RunRecord,
    RunValue,
    RunWrite,
    SendResult,
    StagedEventRow,
    Start,
    StepCommit,
    StoredEvent,
    Takeover,
    Wait,
    WorkerId,
    WorkerInfo,
    WorkerStatus,
)
from edda.core.queries import (
    Audit,
    Backlog,
    Definition,
    EventQuery,
    EventReceiver,
    EventSchema,
    Generation,
    Latency,
    ReopenOutcome,
    RunQuery,
    TimeBucket,
    WaitRow,
    WorkerRecord,
)
from edda.core.states import RunStatus

if TYPE_CHECKING:
    from edda.storage.shared.session_target import SessionTarget

RECLAIM = 60 * MICROSECONDS
"""Longer than any lease of an outgoing event or of a message on offer."""
AT_ONCE = 5 * MICROSECONDS
"""A new run whose due time is no further than this from its start was to begin at once."""


class StatementProbe(Protocol):
    """Stands beside every statement; tests crash or cut the connection there by raising."""

    def before(self, statement: str) -> None: ...

    def after(self, statement: str) -> None: ...


class Journal(Protocol):
    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        """Write the batch in one commit if the fence row still says `fence`; None if it does not.

        The same statement stores `token` in the fence row, so that the writer can tell after a lost answer whether it
        was this very batch that went in.
        """
        ...

    async def read_fence(self, worker: WorkerId) -> Fence | None: ...

    async def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        """The runs this worker owns, with their epochs."""
        ...

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        """Those of them whose rows another transaction has locked just now; it does not wait for any."""
        ...


class Workers(Protocol):
    async def register(self, worker: WorkerInfo, lease: int) -> int:
        """Insert fence and worker rows in one commit; returns the database's time."""
        ...

    async def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        """A worker leaves for good, or its process died: what it still owns is ready for others at once.

        A death is counted in each of those runs (`Crashes`), here and in the two methods below; a run with
        `SUSPECT_DEATHS` is a suspect from then on, and waits for `claim_suspects` in one of the `suspect_groups`.
        """
        ...

    async def registered_workers(self) -> tuple[WorkerStatus, ...]:
        """Everybody who is registered."""
        ...

    async def take_over(self, me: WorkerId) -> Takeover | None:
        """Free the runs of one worker whose lease has lapsed, in one transaction."""
        ...

    async def free_orphans(self) -> int:
        """Free runs owned by a worker without a fence row (a taker died between two transactions)."""
        ...

    async def release_run(self, run_id: RunId) -> bool:
        """Take one run away from its live owner, behind a bump of the owner's `moves`."""
        ...

    async def is_ahead(self) -> bool:
        """Whether a run was started later than the database's clock says now: then that clock was set back."""
        ...

    async def mend_times(self, lease: int) -> int:
        """After the database's clock was set back, bring near what was stored by the time before: leases end after
        `lease` at the latest, runs that were ready at once are so again, and what is claimed of the outbox and of the
        messages on offer is due within `RECLAIM`. Timers keep their time. Returns how many runs it made ready.

        It may be called at any time and any number of times: what is as it should be stays so.
        """
        ...

    async def keep_company(self, worker: WorkerId) -> None:
        """No run of this worker counts as alone in its process any more: the worker is about to claim others."""
        ...

    async def clear_deaths(self, run_id: RunId, epoch: int) -> None:
        """Forget the deaths of a run whose steps in flight have ended since, if its owner still holds this epoch."""
        ...

    async def open_heartbeat(self) -> HeartbeatConnection:
        """A heartbeat connection of its own, for the thread and loop that calls this."""
        ...


class HeartbeatConnection(Protocol):
    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        """Prolong the lease; the database's time, or None if the worker was taken over."""
        ...

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        """Make all runs of a live worker ready for others, except one, behind a bump of its `moves`; how many."""
        ...

    async def close(self) -> None: ...


class ClaimQueue(Protocol):
    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, seen: int = 0) -> Claim:
        """Take due runs, and count the claim in the same commit. Nothing is claimed if fewer than `seen` claims of
        this worker are counted: the database has lost some of them, and with them the runs they brought."""
        ...

    async def claim_suspects(
        self, worker: WorkerId, workflows: Sequence[str], few: int, alone: bool, seen: int = 0
    ) -> Claim:
        """Up to `few` of one group (`suspect_groups`), the first of those that died last. With `alone`, a run that is
        the only one counts as the only run of its process until `keep_company`. Counted as any claim."""
        ...

    async def has_suspects(self, workflows: Sequence[str]) -> bool:
        """Whether suspects wait for `claim_suspects`."""
        ...

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        """Microseconds (on the database's clock) until the first unowned run is due; None if there is none. Suspects
        are not counted."""
        ...

    async def wake_parked(self, workflows: Sequence[str]) -> int:
        """Make the parked runs of these workflows ready, not sooner than `unpark_pause` after they were parked: a new
        worker may bring the code they need. Those parked without a `ready_at` stay. Returns how many it moved."""
        ...

    async def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        """Letters not absorbed yet, for runs this worker owns."""
        ...


class Runs(Protocol):
    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        """Insert unowned runs, skipping ids that exist; returns the ids that are new."""
        ...

    async def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        """Put a cancel into the inbox, once. A parked run that is not undoing is due at once and marked
        `end_if_parked`, even if it was cancelled before it was parked."""
        ...

    async def get(self, run_id: RunId) -> RunRecord | None: ...

    async def add_watcher(self, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        """Have the end of a run told to a step of another one, once however often it is asked.

        Returns the run as it is now: if it has ended already, nobody is told. None if there is no such run.
        """
        ...

    async def watchers(self, run_id: RunId) -> tuple[EndWatcher, ...]:
        """Who asked to be told; the parent is not among them."""
        ...

    async def history(
        self,
        run_id: RunId,
        gen: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        """All of it, or of one step, or some from behind a number on."""
        ...

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]: ...


class Events(Protocol):
    """The log of events, and who waits for which.

    Whoever stores an event holds the locks of its keys alone, whoever registers a wait shares them, and both take
    them before they look: one of the two sees the other. Numbers are given out under these locks, so the events of
    one key appear in the order of their numbers.
    """

    async def accept(
        self, post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int] = ()
    ) -> AcceptResult | None:
        """Store the events that are new by (source, id), give each to the waits under its keys (at most one of a
        run, and of a key that is `once` one of all), and start their runs, in one commit; numbered in the order of
        the post. The dispatches it was made of go in the same commit.

        None, and nothing stored, if the shapes of a type no longer have this version (0 if the type is unknown).
        `StorageConflictError`, and nothing stored, if a dispatch is gone: somebody else has forwarded it.
        """
        ...

    async def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        """What is due to be forwarded, the lowest numbers first."""
        ...

    async def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        """Of the types that have any."""
        ...

    async def register_match_paths(self, type: str, shape: str) -> int:
        """Make a shape known, alone with its type; events after the returned number have their keys."""
        ...

    async def backfill_keys(self, type: str, shape: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        """Add the keys of older events; all after this number have theirs now."""
        ...

    async def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        """Events of a type by number, `after` < number <= `upto`."""
        ...

    async def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        """Events under a key by number, those above `after`; who reads on from there misses none."""
        ...

    async def last_event(self, before: int | None = None) -> int:
        """The number of the newest event, or of the newest one received before a moment; 0 if there is none."""
        ...

    async def find_event(self, source: str, id: str) -> StoredEvent | None: ...

    async def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        """What a run is registered for."""
        ...


class Outbox(Protocol):
    """Events for others. Whoever sends them claims them for a while; who dies lets go of them by that."""

    async def enqueue(self, events: Sequence[OutboxEvent]) -> None:
        """Store events that no run's commit brings; due at once."""
        ...

    async def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        """Those that are due, lowest numbers first, and none whose key has an earlier one that is not due yet.

        Each is then due again after the lease (microseconds), with one attempt more. Claimers go one after another, so
        that nobody gets an event while somebody else is getting one before it.
        """
        ...

    async def record_send_results(self, receipts: Sequence[SendResult]) -> None:
        """What became of claimed events, in one commit; one that is no longer pending is left alone."""
        ...

    async def next_outbox_due(self) -> int | None:
        """Microseconds until the first pending one is due; None if there is none."""
        ...

    async def find_outbox(
        self, state: OutboxState | None = None, after: int = 0, limit: int = 50
    ) -> tuple[OutboxRow, ...]:
        """By number, those above `after`."""
        ...

    async def retry_outbox(self, ids: Sequence[str] | None) -> int:
        """Make dead ones pending and due, those with these ids or all; how many there were."""
        ...


class RunValues(Protocol):
    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        """What a run has said of itself, all of it or under one name; by name."""
        ...


Dialect = Literal["sqlite", "postgresql", "mysql"]


class SharedTransaction(Protocol):
    """An open transaction that the user's code and Edda share. Parameters are written `:name` for every database.

    Errors of the driver are passed on as they are, for the user's statements go the same way; only `commit` raises
    `StorageUnavailableError` if nobody can say what became of it.
    """

    dialect: Dialect
    connection: Any
    """What the user's code works with."""
    is_certified: bool
    """Whether the database is a cluster with several writable nodes: only what is written in a transaction, not what is
    locked, keeps transactions of other nodes from committing."""

    @property
    def is_lost(self) -> bool:
        """Whether its connection is gone though the transaction has not ended."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether the database was reached: a session takes its connection at its first statement."""
        ...

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        """How many rows it touched."""
        ...

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]: ...

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...


class Transactions(Protocol):
    @property
    def is_certified(self) -> bool:
        """As for a joint."""
        ...

    async def begin(self, holder: str = "") -> SharedTransaction:
        """A transaction on a connection of its own; on SQLite it holds the file's turn until it ends, and `holder` is
        what the log calls it if others wait for it."""
        ...

    async def acquire_write_lock(self, holder: str = "") -> WriteLock:
        """The right to write on SQLite, for somebody else's connection; elsewhere nothing."""
        ...

    async def find_step_commit(self, run_id: RunId, gen: int, step: str) -> StepCommit | None: ...

    async def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        """Take the first message under a `once` key away from the others; None if there is none.

        In the same commit it becomes a dispatch that is due after the lease (microseconds): unless somebody deletes it
        until then, the message is offered again.
        """
        ...


class WriteLock(Protocol):
    async def end(self) -> None: ...


class Pruning(Protocol):
    """Removing what is old, a little at a time; each returns how many it removed, 0 when there is no more."""

    async def prune_events(self, before: int, limit: int) -> int:
        """Events received before the moment stop being found; an hour older ones go, unless a letter with one is
        unread. The newest event stays: numbers must not be given out twice."""
        ...

    async def prune_inbox(self, before: int, limit: int) -> int:
        """Letters from before the moment that were read, or whose runs have ended."""
        ...

    async def prune_runs(self, before: int, limit: int) -> int:
        """Runs that ended before the moment, with everything of theirs, and the generations of open runs that the next
        one followed before it."""
        ...

    async def prune_outbox(self, before: int, limit: int) -> int:
        """Events that were sent before the moment."""
        ...


class Notifications(Protocol):
    async def notify(self) -> None:
        """Tell the other processes that there is something to claim or to read."""
        ...

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when another process announced something, or after `timeout` seconds."""
        ...


class Queries(Protocol):
    """For people who look: nothing here takes a lock that a run would wait for, and each page is one of a keyset."""

    async def search(self, query: RunQuery) -> tuple[RunRecord, ...]:
        """The newest generation of each run that fits."""
        ...

    async def count(self, query: RunQuery) -> dict[RunStatus, int]:
        """How many fit, by status, each counted up to `MOST_COUNTED`; statuses without any are left out. The query's
        `after` and `limit` do not matter."""
        ...

    async def scan_boundary(self, query: RunQuery, reach: int) -> tuple[int, RunId] | None:
        """The key of the first one behind the newest so many of the query's workflow and time; None if there is none.
        Each generation of a run counts."""
        ...

    async def generations(self, run_id: RunId) -> tuple[Generation, ...]:
        """Those that were not pruned, the first first."""
        ...

    async def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]: ...

    async def event(self, seq: int) -> StoredEvent | None: ...

    async def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        """Runs to which the event was given, in the order they got it."""
        ...

    async def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        """All that is waited for, by (run, step)."""
        ...

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """Everybody who is registered, the newest first."""
        ...

    async def backlog(self) -> Backlog: ...

    async def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        """One for each stretch of `width` microseconds from `since` on, also where nothing happened."""
        ...

    async def latency(self, since: int, most: int) -> Latency:
        """Of at most so many runs that ended last, after the moment."""
        ...

    async def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]: ...

    async def definitions(self) -> tuple[Definition, ...]:
        """By name."""
        ...

    async def change_token(self) -> str:
        """Another text as soon as anything has changed that a page shows; cheap enough to be asked every second."""
        ...


class Admin(Protocol):
    """For people who act."""

    async def reopen(self, run_id: RunId, gen: int, keep: int) -> ReopenOutcome:
        """Begin the next generation of a run that ended, with the input and the first `keep` entries of that one.

        Its inbox is taken to be read; what ended it is forgotten; whoever waited for its end was told and stays so.
        """
        ...

    async def resume(self, run_id: RunId) -> bool:
        """Make a run ready now that waits or is parked, and forget its deaths; its waits stay. False if it is owned,
        ready or delayed, or not open."""
        ...

    async def delete(self, run_id: RunId) -> bool:
        """A run that has ended, with everything of its; False if it is open or unknown."""
        ...

    async def delete_outbox(self, ids: Sequence[str]) -> int:
        """Forget dead events; how many there were."""
        ...

    async def add_audit(self, audit: Audit) -> None: ...

    async def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        """Newest first, those with lower numbers."""
        ...

    async def save_definitions(self, definitions: Sequence[Definition], forms: Sequence[EventSchema]) -> None:
        """Keep what the code says of its workflows; the newest word counts."""
        ...


@runtime_checkable
class Storage(
    Journal,
    Workers,
    ClaimQueue,
    Runs,
    Events,
    Outbox,
    RunValues,
    Transactions,
    Pruning,
    Notifications,
    Queries,
    Admin,
    Protocol,
):
    """All of it, plus a life of its own."""

    @property
    def url(self) -> str:
        """Of its database, with the password."""
        ...

    def session_target(self) -> SessionTarget:
        """How SQLAlchemy connects to the same database; `AppError` where it cannot."""
        ...

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
