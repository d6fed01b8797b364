"""The records that the engine and the storages exchange.

Times are integers: microseconds since 1970 in UTC, on the database's clock. Payloads are bytes that only the codec
reads. Records are `msgspec` structs because thousands are made every second.

The records of this module, in order: what one run writes in a batch (`RunWrite` and its parts), what a worker claims
(`ClaimedRun`), what callers read (`RunRecord`), workers, and events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NewType

from msgspec import Struct

from .states import ENDED, OPEN, RunStatus

RunId = NewType("RunId", str)
WorkerId = NewType("WorkerId", str)

MICROSECONDS = 1_000_000


class EntryKind(StrEnum):
    """What an entry of the history delivers to the run's event loop."""

    STEP = "step"
    """The outcome of an activity."""
    TIMER = "timer"
    RETRY = "retry"
    """An attempt of an activity failed, and the next one is due. The workflow function does not see it."""
    CANCEL = "cancel"
    TIMEOUT = "timeout"
    """The run's deadline has passed."""
    LATE = "late"
    """The outcome of an activity after the workflow stopped waiting for it. The workflow function does not see it."""
    EVENT = "event"
    """An event for a wait, or, if not ok, the time-out of the wait."""
    MESSAGE = "message"
    """A channel's message for a wait, or, if not ok, the time-out of the wait."""
    LATE_EVENT = "late_event"
    """An event or message whose wait was over when it arrived. The workflow function does not see it, and the next wait
    may receive it."""
    REJECTED = "rejected"
    """An event or message whose data does not fit the model of its wait. The workflow function does not see it, and the
    wait continues."""
    START = "start"
    """Another run was started, or is watched from now on: this step will receive its end."""
    CHILD = "child"
    """The end of another run that a step waited for."""
    HEARTBEAT = "heartbeat"
    """The progress that an activity reported. The workflow function does not see it; the next attempt does."""
    SETTLED = "settled"
    """No activity of the run is running any more: compensation can begin."""
    LIMIT = "limit"
    """The history has reached its maximal length."""
    RECUR = "recur"
    """The first entry of a new generation: what it takes over from the one before."""


class Entry(Struct, frozen=True, gc=False):
    """A row of `edda_history`: one input of the run's event loop, numbered in the order of delivery."""

    seq: int
    kind: EntryKind
    step: str
    name: str
    ok: bool
    at: int
    input: bytes = b""
    value: bytes = b""
    attempt: int = 1
    inbox_no: int | None = None
    """Its number in the run's inbox, if it came through the inbox."""
    event: int | None = None
    """The number of the event in the log, if it delivers one."""


class Fence(Struct, frozen=True):
    """What a worker knows of its own rows in `edda_fence` and `edda_claim`. `Journal.write` changes the fence row only
    if it is the same: this is the condition that every batch carries."""

    worker: WorkerId
    batch_no: int
    """Raised by each batch of this worker."""
    ownership_version: int
    """Raised by another process that takes runs away from this worker."""
    token: int = 0
    """A random number that the last batch wrote: it tells that batch from another one with the same number."""
    claims: int = 0
    """How many claims of this worker were committed. The batch is written only if `edda_claim` counts at least as many:
    fewer means that the database lost a claim which it had acknowledged."""


class Start(Struct, frozen=True):
    """A new run. With `ready_at` any worker may claim it from then on; without, the writing worker owns it."""

    run_id: RunId
    workflow: str
    input: bytes
    created_at: int
    ready_at: int | None = None
    deadline: int | None = None
    parent: RunId | None = None
    """The run that started it."""
    parent_step: str | None = None
    """The parent's step that receives its end; None if no step waits for it."""
    depth: int = 0
    """The number of its ancestors."""


class AckInbox(Struct, frozen=True):
    """The worker keeps the run; its inbox is read up to item `inbox_read`."""

    inbox_read: int


class Suspend(Struct, frozen=True):
    """The worker gives up the run until `ready_at` (None: until an inbox item arrives).

    If an item arrived meanwhile (`inbox_count` is not `inbox_read`) the run is ready at once instead, and
    `BatchResult.ready` names it. A parked run is not: it stays parked until `ready_at` (None: until `Admin.resume`),
    and reads its inbox when it continues.
    """

    inbox_read: int
    ready_at: int | None
    status: RunStatus
    reason: str | None = None
    """For people: what it waits for, or why it is parked."""

    def __post_init__(self) -> None:
        if self.status not in OPEN:
            raise ValueError(f"a suspended run cannot be {self.status}")


class End(Struct, frozen=True):
    """The run ends. Condition: it has exactly `watchers` watchers, because the same write signals each of them; and its
    `inbox_count` is `expected_inbox_count`, if that is given. Otherwise `BatchResult.refused` names the run."""

    status: RunStatus
    value: bytes
    at: int
    watchers: int = 0
    inbox_read: int | None = None
    """How far the entries of this write read the inbox, if they read any; stored even if the end is refused."""
    expected_inbox_count: int | None = None
    """Given if an unread message would be lost with the run."""

    def __post_init__(self) -> None:
        if self.status not in ENDED:
            raise ValueError(f"an ended run cannot be {self.status}")


class Recur(Struct, frozen=True):
    """The generation ends and the next begins, with the same owner, inbox and id, and without waits.

    Condition: the inbox is read to its end (`inbox_count` is `inbox_read`). Otherwise `BatchResult.refused` names the
    run.
    """

    inbox_read: int
    input: bytes
    at: int
    entry: Entry
    """The first of the new history."""


Transition = AckInbox | Suspend | End | Recur


class RunSignal(Struct, frozen=True):
    """An item for the inbox of another run. Dropped if that run has ended, or if it is a second cancel."""

    run_id: RunId
    kind: EntryKind
    step: str = ""
    value: bytes = b""


class EndWatcher(Struct, frozen=True):
    """A step of another run that receives the end of the watched one."""

    run_id: RunId
    step: str


class Wait(Struct, frozen=True):
    """A step waits for the next event under a key, or under the same key for this run alone."""

    step: str
    key: bytes
    target_key: bytes
    type: str
    match: bytes
    """For people, with the type: what it waits for."""
    due: int | None = None
    """For people: when the wait ends. The run itself keeps the timer."""
    cursor: int | None = None
    """Only events with a higher number; None: those accepted after the run was started."""
    exclusive: bool = False
    """One run only receives the message: the wait takes the lowest number under the key, without regard to a cursor,
    and deletes the row of the key."""


class StagedKind(StrEnum):
    EVENT = "event"
    MESSAGE = "message"
    REDELIVERY = "redelivery"
    """A message that a step took and did not use."""


class StagedEvent(Struct, frozen=True):
    """An event that a commit decided and that is not in the event log yet. `Events.accept` moves it there: that needs
    locks which this commit does not hold."""

    kind: StagedKind
    body: bytes


class StagedEventRow(Struct, frozen=True):
    seq: int
    kind: StagedKind
    body: bytes


class OutboxEvent(Struct, frozen=True):
    """An event for other systems, to be sent by the outbox relayer."""

    id: str
    key: str
    """Events of one key are sent in the order in which they were stored."""
    type: str
    source: str
    """Type and source are for people."""
    body: bytes
    """The whole event: every attempt sends the same."""
    created_at: int
    run_id: RunId | None = None


class OutboxState(StrEnum):
    PENDING = "pending"
    SENT = "sent"
    DEAD = "dead"
    """The receiver rejects it for good; an operator can have it sent again."""


class OutboxRow(Struct, frozen=True):
    seq: int
    event: OutboxEvent
    state: OutboxState
    attempts: int
    due: int
    """When it is sent next; a claim sets it to the end of the lease."""
    reason: str | None
    """Why the last attempt failed."""
    ended_at: int | None


class Sent(Struct, frozen=True):
    seq: int


class Rejected(Struct, frozen=True):
    """The receiver will never take it. Condition: the row's `attempts` are those of the claim, so the claim still
    holds."""

    seq: int
    attempts: int
    reason: str


class SendLater(Struct, frozen=True):
    """To be sent again at `due`, and no event of its key before. Condition as for `Rejected`."""

    seq: int
    attempts: int
    due: int
    reason: str


SendResult = Sent | Rejected | SendLater


class StepCommit(Struct, frozen=True):
    """A row of `edda_step_commit`: the step's effect was committed in the same transaction as this row, and the step's
    entry is not in the history yet."""

    step: str
    attempt: int
    value: bytes
    at: int


class RunValue(Struct, frozen=True):
    """A value that the run publishes under a name; a later one replaces it."""

    name: str
    value: bytes


class RunWrite(Struct, frozen=True):
    """All that one run writes in one batch. Without a transition only the history grows.

    Waits are registered only if the inbox is read to its end (`inbox_count` is `inbox_read`). A wait that finds its
    event in the log is not registered; the event goes into the inbox. A Suspend with waits happens only if all of them
    are registered; otherwise `BatchResult.refused` names the steps, and the worker keeps the run and reads the inbox.
    So a write with waits, `cancelled_waits` or `released_items` has a start or a transition; `released_items` never
    come with waits; and the waits of a write with a start have no cursor.

    A refused End or Recur leaves the run with its worker: the entries are written, the signals are not. Signals go only
    to runs that have no write of their own in the batch.
    """

    run_id: RunId
    epoch: int
    generation: int
    entries: tuple[Entry, ...] = ()
    start: Start | None = None
    transition: Transition | None = None
    waits: tuple[Wait, ...] = ()
    cancelled_waits: tuple[str, ...] = ()
    """Steps that wait no longer."""
    released_items: tuple[int, ...] = ()
    """Inbox items whose event the next wait may receive again."""
    children: tuple[Start, ...] = ()
    """Runs that it starts, for any worker to claim; one whose id exists is not changed."""
    signals: tuple[RunSignal, ...] = ()
    compensating: bool = False
    """Compensation begins. A write with signals or with this has a start or a transition."""
    staged_events: tuple[StagedEvent, ...] = ()
    outbox_events: tuple[OutboxEvent, ...] = ()
    values: tuple[RunValue, ...] = ()
    """At most one of each name."""
    recorded_steps: tuple[str, ...] = ()
    """Steps whose rows in `edda_step_commit` are deleted, because their entries are in this write. These four are
    written with the entries even if the transition is refused, and need neither a start nor a transition."""

    @property
    def size(self) -> int:
        """Bytes of its payloads."""
        size = len(self.start.input) if self.start is not None else 0
        for entry in self.entries:
            size += len(entry.input) + len(entry.value)
        for child in self.children:
            size += len(child.input)
        for signal in self.signals:
            size += len(signal.value)
        for staged in self.staged_events:
            size += len(staged.body)
        for event in self.outbox_events:
            size += len(event.body)
        for value in self.values:
            size += len(value.value)
        return size


class BatchResult(Struct, frozen=True):
    """The answer to a batch that was written; the worker acts on both fields."""

    ready: frozenset[RunId] = frozenset()
    """Suspended, and ready again at once: their inboxes had unread items."""
    refused: Mapping[RunId, frozenset[str]] = {}
    """Runs that the worker still owns, with the steps whose waits were not registered because there are inbox items to
    read. Without steps: a refused End or Recur."""


class InboxItem(Struct, frozen=True):
    """A numbered item in a run's inbox, written by another process or run than the one that owns the run."""

    run_id: RunId
    inbox_no: int
    kind: EntryKind
    at: int
    step: str = ""
    value: bytes = b""
    event: int | None = None
    """The number of the event it delivers, whose body is then the value."""


PROGRESS = frozenset(
    {
        EntryKind.STEP,
        EntryKind.RETRY,
        EntryKind.LATE,
        EntryKind.CANCEL,
        EntryKind.TIMEOUT,
        EntryKind.LIMIT,
        EntryKind.SETTLED,
        EntryKind.RECUR,
    }
)
"""Entries after which other steps are in flight than before. Timers, events and heartbeats are not among them: they may
be recorded before every death of a process that one step kills."""

SUSPECT_DEATHS = 2
"""From this many process deaths on, a run is a suspect: only `ClaimQueue.claim_suspects` claims it."""


class Crashes(Struct, frozen=True):
    """How often a worker died, or lost its lease, while it owned a run.

    The owner of the run clears them (`Workers.clear_deaths`) once every step has ended that was in flight at the first
    of them: only the owner knows those steps, from the replay."""

    deaths: int = 0
    alone: int = 0
    """Deaths while the run was the only one of its process."""
    seq: int | None = None
    """The number of the last entry before the first death. A step that is pending now, and was issued before this entry
    or right after it, may have been in flight at each of the deaths."""

    def after_death(self, seq: int, is_alone: bool) -> Crashes:
        """With one death more, of a run whose last entry has the number `seq`."""
        return Crashes(self.deaths + 1, self.alone + is_alone, self.seq if self.deaths else seq)

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS


NO_CRASHES = Crashes()

SUSPECT_GROUPS = 4
"""Suspects that died together are next run in so many groups, one after the other. More groups need fewer deaths until
one suspect is alone, but the last groups wait longer."""


def suspect_groups(crashes: Sequence[Crashes]) -> list[int]:
    """The group of each run that one dead process owned, in the order of their ids; group 0 is run first.

    Runs that died equally often are in groups together. Runs that died alone come first, then those with fewer deaths,
    because a run with a long step also collects deaths that other runs caused. The order rotates from death to death:
    a group that follows one which outlives its time is run in company, and would never be alone if it was never the
    first."""
    levels: dict[tuple[int, int], list[int]] = {}
    for position, one in enumerate(crashes):
        levels.setdefault((-one.alone, one.deaths), []).append(position)
    groups, first = [0] * len(crashes), 0
    for (_, deaths), positions in sorted(levels.items()):
        for number, position in enumerate(positions):
            groups[position] = first + (number + deaths) % len(positions) * SUSPECT_GROUPS // len(positions)
        first += SUSPECT_GROUPS
    return groups


def unpark_pause(attempts: int) -> int:
    """Microseconds after a run was parked in which new workers do not try it: processes that restart in a loop would
    replay every parked run at each start. None after the first two times, 25.6 s from the eighth on."""
    return 0 if attempts < 3 else 100_000 << min(attempts, 8)


def last_progress(entries: Iterable[Entry]) -> int:
    return max((entry.seq for entry in entries if entry.kind in PROGRESS), default=0)


class ClaimedRun(Struct, frozen=True):
    """A run that the claiming worker owns now, with all that it needs to replay the run."""

    run_id: RunId
    workflow: str
    generation: int
    epoch: int
    input: bytes
    created_at: int
    deadline: int | None
    inbox_read: int
    attempts: int
    """How often it was parked in a row; decides how long it is parked next time."""
    entries: tuple[Entry, ...]
    inbox: tuple[InboxItem, ...]
    """The unread items."""
    waits: tuple[tuple[str, bytes], ...] = ()
    """The registered steps, each with the key it waits under."""
    event_cursor: int = 0
    """The newest event when the run was started; it receives events after that one."""
    parent: RunId | None = None
    parent_step: str | None = None
    depth: int = 0
    watchers: tuple[EndWatcher, ...] = ()
    """The steps of other runs, besides the parent's, that receive its end."""
    step_commits: tuple[StepCommit, ...] = ()
    """Steps of this generation that are committed and not in the history."""
    compensating: bool = False
    """Its compensation has begun."""
    end_if_parked: bool = False
    """It was cancelled while it was parked: if it cannot continue now either, it ends as cancelled."""
    crashes: Crashes = NO_CRASHES


class Claim(Struct, frozen=True):
    now: int
    """The database's time."""
    runs: tuple[ClaimedRun, ...]
    number: int | None = None
    """The number of this claim, counted per worker. None if the worker may claim nothing: it was taken over, or the
    database has lost one of its earlier claims."""


class RunRecord(Struct, frozen=True):
    """The newest generation of a run, for people and for callers that wait for its result."""

    run_id: RunId
    workflow: str
    generation: int
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
    parent: RunId | None = None
    deaths: int = 0
    """`Crashes.deaths`."""
    has_cancel: bool = False
    """A cancel is stored that has not taken effect: the run neither compensates, nor will it end if it cannot continue
    after being parked."""


class RunFilter(Struct, frozen=True):
    """Newest first. `before` is the (created_at, run_id) of the last record of the page before."""

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


class WorkerStatus(Struct, frozen=True):
    info: WorkerInfo
    is_lapsed: bool
    """Its lease is over, or its process has certainly ended."""


class Takeover(Struct, frozen=True):
    worker: WorkerId
    moved: int
    """How many of its runs were made ready for other workers."""


class CancelOutcome(StrEnum):
    REQUESTED = "requested"
    ALREADY = "already"
    """The run was cancelled before."""
    ENDED = "ended"
    MISSING = "missing"


class Event(Struct, frozen=True):
    """An event as it is stored. `body` holds all of it; the other fields are indexed."""

    source: str
    id: str
    type: str
    target: RunId | None
    """The only run that may receive it."""
    body: bytes


class EventKey(Struct, frozen=True):
    """The key under which registered waits are searched, and the key under which the event is stored for later waits.

    The two differ only for an event with a target.
    """

    wait_key: bytes
    stored_key: bytes
    exclusive: bool = False
    """One wait only receives it. The event is stored under the key only if there is no such wait; a later wait takes it
    by deleting the row of the key."""


class NewEvent(Struct, frozen=True):
    event: Event
    keys: tuple[EventKey, ...] = ()
    starts: tuple[Start, ...] = ()
    """Runs to start if the event is new."""


class AcceptResult(Struct, frozen=True):
    new: frozenset[int]
    """The positions, in the accepted sequence, of the events that were not stored before."""
    woke: bool
    """Whether a run received one of the events or was started by one."""


class StoredEvent(Struct, frozen=True):
    seq: int
    received_at: int
    event: Event


class MatchPaths(Struct, frozen=True):
    """The sets of paths that waits for an event type match on; each new set raises the version."""

    version: int = 0
    known: tuple[str, ...] = ()
