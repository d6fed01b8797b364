"""What the engine needs from a database.

Each storage implements all of these protocols, and one conformance suite tests them all. Every write that matters has
its condition in the statement; the method's answer says whether the condition held, and the caller checks it.

Three errors matter to callers:

- `StorageUnavailableError`: no answer came; the transaction may have been committed.
- `StorageConflictError`: the transaction was rolled back; the caller may try it again.
- `StorageRejectedError`: the database refuses the data itself; trying again does not help.
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
"""Longer than any lease of an outbox event or of a redelivery."""
AT_ONCE = 5 * MICROSECONDS
"""A new run that is due no later than this after its creation was started without a delay."""


class StatementProbe(Protocol):
    """Called around every statement; tests crash or cut the connection there by raising an error."""

    def before(self, statement: str) -> None: ...

    def after(self, statement: str) -> None: ...


class Journal(Protocol):
    """What a worker writes for the runs it owns."""

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        """Write the batch in one commit. Condition: the worker's fence row is still `fence`.

        None if it is not: another process has taken runs of this worker, and nothing was written. The statement that
        checks the fence also raises its `batch_no` and stores `token` in it, so that after a lost answer the worker can
        read whether this very batch was written. The caller acts on `BatchResult.ready` and `refused`.
        """
        ...

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        """None if the worker was taken over. Sees every write that was sent before."""
        ...

    async def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        """The runs that this worker owns, with their epochs. Sees every write that was sent before."""
        ...

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        """Those of the runs whose rows another transaction has locked now; does not wait for the locks."""
        ...


class Workers(Protocol):
    """Registration, leases and deaths of workers, and which runs they own."""

    async def register(self, worker: WorkerInfo, lease: int) -> int:
        """Insert the rows of the worker, its fence and its count of claims in one commit; returns the database's
        time. `StorageDuplicateError` if the id is registered."""
        ...

    async def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        """Delete the worker's rows and make the runs it still owns ready for others at once.

        `died`: its process died. The death is counted in each of those runs (`Crashes`), as in `take_over` and
        `free_orphans`. A run with `SUSPECT_DEATHS` is a suspect from then on, and waits in one of the
        `suspect_groups` for `claim_suspects`.
        """
        ...

    async def registered_workers(self) -> tuple[WorkerStatus, ...]: ...

    async def take_over(self, me: WorkerId) -> Takeover | None:
        """Remove one other worker and free its runs, in one transaction. Condition: its lease has lapsed. None if no
        worker's has."""
        ...

    async def free_orphans(self) -> int:
        """Free the runs whose owner has no fence row: a take-over frees a limited number in its transaction, and the
        process may die before it frees the rest. Returns how many."""
        ...

    async def release_run(self, run_id: RunId) -> bool:
        """Take one run away from its live owner, whose `ownership_version` is raised in the same transaction: its next
        batch is refused. False if the run has no owner."""
        ...

    async def is_ahead(self) -> bool:
        """Whether a run was created later than the database's clock says now: then the clock was set back."""
        ...

    async def mend_times(self, lease: int) -> int:
        """After the database's clock was set back, bring stored times near: leases end after `lease` at the latest,
        runs that were ready at once are so again, and claimed outbox events and redeliveries are due within `RECLAIM`.
        Timers keep their time. Returns how many runs it made ready.

        It may be called at any time and any number of times: correct rows are not changed.
        """
        ...

    async def keep_company(self, worker: WorkerId) -> None:
        """Record that the worker owns more than one run from now on: none of its runs counts as alone any more. Called
        before the worker claims others."""
        ...

    async def clear_deaths(self, run_id: RunId, epoch: int) -> None:
        """Forget the deaths of a run whose steps in flight have ended since. Condition: the run is owned and has this
        epoch."""
        ...

    async def open_heartbeat(self) -> HeartbeatConnection:
        """A connection for heartbeats alone, to be used in the thread and event loop that call this."""
        ...


class HeartbeatConnection(Protocol):
    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        """Prolong the worker's lease. Returns the database's time, or None if the worker was taken over."""
        ...

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        """Make all runs of a live worker ready for others, except `keep`, and raise its `ownership_version` in the same
        transaction: its next batch is refused. Returns how many runs."""
        ...

    async def close(self) -> None: ...


class ClaimQueue(Protocol):
    """Which runs a worker gets."""

    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, known_claims: int = 0) -> Claim:
        """Make the worker the owner of runs that are due, and count the claim in the same commit.

        Condition: the worker has a fence row, and at least `known_claims` of its claims are counted. Fewer means that
        the database has lost claims, and with them the ownership of the runs they brought. `Claim.number` is None if
        the condition does not hold, and nothing is claimed.
        """
        ...

    async def claim_suspects(
        self, worker: WorkerId, workflows: Sequence[str], limit: int, alone: bool, known_claims: int = 0
    ) -> Claim:
        """Claim runs of one group (`suspect_groups`), the first group of the process that died last. `alone`: if it is
        one run, it counts as the only run of its process until `keep_company`. Condition and count as for `claim`."""
        ...

    async def has_suspects(self, workflows: Sequence[str]) -> bool:
        """Whether suspects wait for `claim_suspects`."""
        ...

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        """Microseconds until the first run without an owner is due; None if there is none. Without suspects."""
        ...

    async def wake_parked(self, workflows: Sequence[str]) -> int:
        """Make the parked runs of these workflows ready, each no sooner than `unpark_pause` after it was parked: a new
        worker may have the code they need. Those parked without a `ready_at` stay. Returns how many it changed."""
        ...

    async def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        """The unread inbox items of all runs that this worker owns."""
        ...


class Runs(Protocol):
    """What clients do with runs."""

    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        """Insert runs without an owner. Condition, for each: its id is new. Returns the ids that were inserted."""
        ...

    async def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        """Put a cancel into the inbox. Condition: the run is open, and this is its first cancel. A parked run that does
        not compensate is due at once and marked `end_if_parked`, even if it was cancelled before it was parked."""
        ...

    async def get(self, run_id: RunId) -> RunRecord | None: ...

    async def add_watcher(self, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        """Let a step of another run receive the end of this one. Condition: the run is open; the same watcher counts
        once. Returns the run as it is now: if it has ended, no signal will follow. None if there is no such run."""
        ...

    async def watchers(self, run_id: RunId) -> tuple[EndWatcher, ...]:
        """Without the parent's step."""
        ...

    async def history(
        self,
        run_id: RunId,
        generation: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        """By number: of the newest generation or the given one, of all steps or one, those above `after`."""
        ...

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]: ...


class Events(Protocol):
    """The event log, and the waits for its events.

    `accept` holds the locks of the events' keys exclusively, `Journal.write` shares the locks of its waits' keys, and
    both take them before they read: one of the two sees the other's rows. Event numbers are given out under these
    locks, so the events of one key are committed in the order of their numbers.
    """

    async def accept(
        self, events: Sequence[NewEvent], versions: Mapping[str, int], staged: Sequence[int] = ()
    ) -> AcceptResult | None:
        """Store the events whose (source, id) is new, numbered in the order given; put each into the inboxes of runs
        that wait under its keys (once per run; one run for an exclusive key); start their runs; and delete the staged
        events they came from. All in one commit.

        Condition: the match paths of each event's type still have the given version (0 for an unknown type). None if
        they do not, and nothing is stored: the caller computes the keys again.

        `StorageConflictError`, and nothing is stored, if a staged event is gone: another process has moved it.
        """
        ...

    async def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        """Those that are due, the lowest numbers first."""
        ...

    async def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        """Without the types that have none."""
        ...

    async def register_match_paths(self, type: str, paths: str) -> int:
        """Store a set of paths, with the lock of its type held exclusively. Events after the returned number have their
        keys of these paths; `backfill_keys` adds those of older events."""
        ...

    async def backfill_keys(self, type: str, paths: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        """Store (key, event number) pairs of older events; all events after the number `after` have their keys now."""
        ...

    async def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        """By number: `after` < number <= `upto`."""
        ...

    async def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        """By number, those above `after`. A caller that continues after the last one it read misses none."""
        ...

    async def last_event(self, before: int | None = None) -> int:
        """The number of the newest event, or of the newest one received before a time; 0 if there is none."""
        ...

    async def find_event(self, source: str, id: str) -> StoredEvent | None: ...

    async def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        """The registered waits of a run, by step."""
        ...


class Outbox(Protocol):
    """Events for other systems. A relayer claims events for the time of a lease; if it dies, they are due again."""

    async def enqueue(self, events: Sequence[OutboxEvent]) -> None:
        """Store events that belong to no run's write; due at once."""
        ...

    async def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        """Claim events that are due, the lowest numbers first. Condition, for each: no earlier event of its key is
        pending and not due. A claimed event is due again after the lease (microseconds), and its attempts are raised.

        Claims of several processes exclude each other: none gets an event while another gets an earlier one.
        """
        ...

    async def record_send_results(self, results: Sequence[SendResult]) -> None:
        """In one commit. Condition, for each: the event is pending, and for `Rejected` and `SendLater` the claim still
        holds; a result whose condition does not hold changes nothing."""
        ...

    async def next_outbox_due(self) -> int | None:
        """Microseconds until the first pending event is due; None if there is none."""
        ...

    async def find_outbox(
        self, state: OutboxState | None = None, after: int = 0, limit: int = 50
    ) -> tuple[OutboxRow, ...]:
        """By number, those above `after`."""
        ...

    async def retry_outbox(self, ids: Sequence[str] | None) -> int:
        """Make dead events pending and due, those with these ids or all; returns how many."""
        ...


class RunValues(Protocol):
    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        """The values that a run has published, all or one, by name."""
        ...


Dialect = Literal["sqlite", "postgresql", "mysql"]


class SharedTransaction(Protocol):
    """An open transaction that the user's code and Edda share. Parameters are written `:name` for every database.

    Errors of the driver are not translated, because the user's statements go the same way. Only `commit` raises
    `StorageUnavailableError`, if it is unknown whether the transaction was committed.
    """

    dialect: Dialect
    connection: Any
    """The connection or session that the user's code works with."""
    is_certified: bool
    """Whether the database is a cluster with several writable nodes. There a row lock does not keep a transaction of
    another node from committing; only a write to the row does."""

    @property
    def is_lost(self) -> bool:
        """Whether its connection is gone though the transaction has not ended."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether the database was reached: a session takes its connection at its first statement."""
        ...

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        """Returns how many rows the statement changed."""
        ...

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]: ...

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...


class Transactions(Protocol):
    @property
    def is_certified(self) -> bool:
        """As in `SharedTransaction`."""
        ...

    async def begin(self, holder: str = "") -> SharedTransaction:
        """A transaction on a connection of its own. On SQLite it holds the file's write lock until it ends; `holder` is
        its name in the log line of a writer that waits for it."""
        ...

    async def acquire_write_lock(self, holder: str = "") -> WriteLock:
        """The file's write lock on SQLite, for a connection that is not Edda's; on a server it does nothing."""
        ...

    async def find_step_commit(self, run_id: RunId, generation: int, step: str) -> StepCommit | None: ...

    async def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        """Take the first message under an exclusive key; None if there is none.

        In the same commit it becomes a staged event that is due after the lease (microseconds): unless the step's
        commit deletes that row before, the message is delivered again.
        """
        ...


class WriteLock(Protocol):
    async def end(self) -> None: ...


class Pruning(Protocol):
    """Deleting old rows, at most `limit` per call. Each method returns how many it deleted; 0: there are no more."""

    async def prune_events(self, before: int, limit: int) -> int:
        """Delete the keys of events received before the time, so that waits no longer find them. An event that is an
        hour older is deleted itself, unless it is in an unread inbox item. The newest event stays: its number must not
        be given out again."""
        ...

    async def prune_inbox(self, before: int, limit: int) -> int:
        """Inbox items from before the time that were read, or whose runs have ended."""
        ...

    async def prune_runs(self, before: int, limit: int) -> int:
        """Runs that ended before the time, with all their rows, and generations of open runs that the next generation
        followed before it."""
        ...

    async def prune_outbox(self, before: int, limit: int) -> int:
        """Events that were sent before the time."""
        ...


class Notifications(Protocol):
    async def notify(self) -> None:
        """Wake the tasks of other processes that wait in `wait_for_notification`: there are runs to claim or inbox
        items to read."""
        ...

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when another process called `notify`, or after `timeout` seconds. It may return without a reason."""
        ...


class Queries(Protocol):
    """Read-only queries of the viewer and the CLI. None takes a lock that a run would wait for. Pages are by keyset."""

    async def search(self, query: RunQuery) -> tuple[RunRecord, ...]:
        """The newest generation of each run that fits."""
        ...

    async def count(self, query: RunQuery) -> dict[RunStatus, int]:
        """How many fit, by status, each counted up to `MAX_COUNT`; statuses without any are left out. The query's
        `after` and `limit` have no effect."""
        ...

    async def scan_boundary(self, query: RunQuery, scan_limit: int) -> tuple[int, RunId] | None:
        """The key of the first run behind the newest `scan_limit` of the query's workflow and time; None if there is
        none. Each generation of a run counts."""
        ...

    async def generations(self, run_id: RunId) -> tuple[Generation, ...]:
        """Those that were not pruned, the first one first."""
        ...

    async def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]: ...

    async def event(self, seq: int) -> StoredEvent | None: ...

    async def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        """The runs that received the event, in the order in which they did."""
        ...

    async def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        """The registered waits of all runs, by (run, step)."""
        ...

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """The registered workers, the newest first."""
        ...

    async def backlog(self) -> Backlog: ...

    async def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        """`count` buckets of `width` microseconds from `since` on, empty ones too."""
        ...

    async def latency(self, since: int, limit: int) -> Latency:
        """Of the runs that ended last, after the time, and of at most `limit` of them."""
        ...

    async def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]: ...

    async def definitions(self) -> tuple[Definition, ...]:
        """By workflow name."""
        ...

    async def change_token(self) -> str:
        """A text that differs as soon as anything has changed that a page shows; cheap enough for one call a second."""
        ...


class Admin(Protocol):
    """What operators do."""

    async def reopen(self, run_id: RunId, generation: int, keep: int) -> ReopenOutcome:
        """Begin the next generation of an ended run, with the same input and the first `keep` entries of the old one.
        Condition: this generation has a result; the statement that deletes it decides between several callers.

        Its inbox counts as read. Runs that received its end keep it.
        """
        ...

    async def resume(self, run_id: RunId) -> bool:
        """Make a run ready at once and forget its deaths; its waits stay. Condition: it waits or is parked, and has no
        owner. False if the condition does not hold."""
        ...

    async def delete(self, run_id: RunId) -> bool:
        """Delete a run with all its rows. Condition: it has ended. False if it is open or unknown."""
        ...

    async def delete_outbox(self, ids: Sequence[str]) -> int:
        """Delete those of the events that are dead; returns how many."""
        ...

    async def add_audit(self, audit: Audit) -> None: ...

    async def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        """The newest first, with numbers below `before`."""
        ...

    async def save_definitions(self, definitions: Sequence[Definition], schemas: Sequence[EventSchema]) -> None:
        """Store what the code says about its workflows; a later call replaces the rows of the same workflow."""
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
    """All of these, and the connections to one database."""

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
        """Close every connection at once, as the death of the process would."""
        ...

    async def migrate(self) -> tuple[str, ...]:
        """Apply the missing migrations, with a lock that a second migrating process waits for; returns their names."""
        ...

    async def pending_migrations(self) -> tuple[str, ...]: ...

    async def now(self) -> int:
        """The database's time."""
        ...
