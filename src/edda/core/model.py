"""The records that travel between engine and storage.

Times are integers: microseconds since 1970 in UTC, on the database's clock. Payloads are bytes that
only the codec reads. Records are `msgspec` structs because thousands are made every second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    EVENT = "event"
    """An event that was waited for, or, if not ok, the end of waiting for it."""
    MESSAGE = "message"
    """A message of a channel that was waited for, or, if not ok, the end of waiting for it."""
    STRAY = "stray"
    """An event or a message whose wait was over when it came; moves no code, and it is free for the next wait."""
    REJECTED = "rejected"
    """An event or a message whose data does not fit the model of its wait; moves no code, and the wait goes on."""
    START = "start"
    """Another run was started, or is watched now: its end will be told to this step."""
    CHILD = "child"
    """The end of another run that was waited for."""
    HEARTBEAT = "heartbeat"
    """How far an activity's body has come; moves no code, its next attempt sees it."""
    SETTLED = "settled"
    """No body of the run is under way any more: undoing can begin."""
    LIMIT = "limit"
    """The history is too long to go on."""
    RECUR = "recur"
    """The first of a generation: what it takes over from the one before."""


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
    event: int | None = None
    """The number of the event in the log, if it brought one."""


class Fence(Struct, frozen=True):
    """What a worker believes of its own fence row; a batch is written only if the row says the same."""

    worker: WorkerId
    batch_no: int
    moves: int
    token: int = 0
    """A random number that the last batch wrote: it tells that batch from any other one with the same number."""
    claims: int = 0
    """How many claims of this worker were committed. A batch is written only if the row of `edda_claim` says at least
    so many: less means that the database lost a claim which it had acknowledged."""


class Start(Struct, frozen=True):
    """A new run. With `ready_at` it is anybody's from then on; without, it is born owned by the writer."""

    run_id: RunId
    workflow: str
    input: bytes
    created_at: int
    ready_at: int | None = None
    deadline: int | None = None
    parent: RunId | None = None
    """The run that started it."""
    parent_step: str | None = None
    """The parent's step that its end is told to; None: nobody waits for it."""
    depth: int = 0
    """How many parents it has, one above the other."""


class AckInbox(Struct, frozen=True):
    """The run stays; its inbox is read up to `absorbed`."""

    absorbed: int


class Suspend(Struct, frozen=True):
    """The run leaves memory until `ready_at` (None: until something arrives).

    If mail came in meanwhile (`delivered` is not `absorbed`) it is ready at once instead, unless it is parked: a parked
    run is left alone until `ready_at` (None: until `Steering.resume`), and reads its inbox when it goes on.
    """

    absorbed: int
    ready_at: int | None
    status: RunStatus
    reason: str | None = None
    """For people: what it waits for, or why it is parked."""


class End(Struct, frozen=True):
    """Happens only if exactly so many others watch the run, for the bundle has a letter for each of them."""

    status: RunStatus
    value: bytes
    at: int
    watchers: int = 0
    absorbed: int | None = None
    """How far the inbox is read by the entries of its bundle, if they read any: that holds even if this does not."""
    settled: int | None = None
    """Happens only if nothing was put into the inbox after this number: an unread message would be lost with it."""


class Recur(Struct, frozen=True):
    """The generation ends and the next begins, with the same owner, inbox and id, and without waits.

    Happens only if the inbox is read to its end (`delivered` is `absorbed`).
    """

    absorbed: int
    input: bytes
    at: int
    entry: Entry
    """The first of the new history."""


Transition = AckInbox | Suspend | End | Recur


class RunSignal(Struct, frozen=True):
    """What a run puts into the inbox of another; dropped if that one has ended. A cancel goes in once at most."""

    run_id: RunId
    kind: EntryKind
    step: str = ""
    value: bytes = b""


class EndWatcher(Struct, frozen=True):
    """A step of another run that is told how this one ends."""

    run_id: RunId
    step: str


class Wait(Struct, frozen=True):
    """A run asks for the next event under a key, or under the same key addressed to this run alone."""

    step: str
    key: bytes
    own_key: bytes
    type: str
    match: bytes
    """For people, with the type: what it waits for."""
    due: int | None = None
    """For people: when it stops waiting. The run itself keeps the time."""
    floor: int | None = None
    """Only events with a higher number; None: those since the run was started."""
    once: bool = False
    """What it asks for is given to one run only: it takes the lowest number under the key away, whatever its floor."""


class StagedKind(StrEnum):
    EVENT = "event"
    MESSAGE = "message"
    OFFER = "offer"
    """A message that somebody had taken from the others, and did not use."""


class StagedEvent(Struct, frozen=True):
    """Decided in one commit, and on its way into the log of events: who takes it there needs locks of its own."""

    kind: StagedKind
    body: bytes


class StagedEventRow(Struct, frozen=True):
    seq: int
    kind: StagedKind
    body: bytes


class OutboxEvent(Struct, frozen=True):
    """An event for others, on its way out through the outbox."""

    id: str
    key: str
    """Those of one key go out in the order in which they were stored."""
    type: str
    source: str
    """Type and source are for people."""
    body: bytes
    """The whole event: every try sends the same."""
    created_at: int
    run_id: RunId | None = None


class OutboxState(StrEnum):
    PENDING = "pending"
    SENT = "sent"
    DEAD = "dead"
    """The receiver will never take it; people can have it tried again."""


class OutboxRow(Struct, frozen=True):
    seq: int
    event: OutboxEvent
    state: OutboxState
    attempts: int
    due: int
    """When it is tried next; a claim moves it to the end of its lease."""
    reason: str | None
    """Why it could not be sent the last time."""
    ended_at: int | None


class Sent(Struct, frozen=True):
    seq: int


class Rejected(Struct, frozen=True):
    """Will never be taken. Counts only for who still holds the claim: `attempts` is what the claim said."""

    seq: int
    attempts: int
    reason: str


class SendLater(Struct, frozen=True):
    """To be tried again at `due`, and nothing of its key before that. Counts only for who still holds the claim."""

    seq: int
    attempts: int
    due: int
    reason: str


SendResult = Sent | Rejected | SendLater


class StepCommit(Struct, frozen=True):
    """A step whose effect was committed together with this row, and whose entry is not in the history yet."""

    step: str
    attempt: int
    value: bytes
    at: int


class RunValue(Struct, frozen=True):
    """What a run says of itself to whoever asks; the newest of a name counts."""

    name: str
    value: bytes


class RunWrite(Struct, frozen=True):
    """All that one run puts into one batch. Move None: the history grows, nothing else changes.

    Waits are registered only if the inbox is read to its end (`delivered` is `absorbed`), and one that finds its
    event in the log gets it as a letter instead. A Release with waits happens only if all of them were registered;
    else the run stays with its worker, who has mail to read. So a bundle with waits, drops or frees has a start or
    a move, frees never come with waits, and the waits of a bundle with a start have no floor.

    An End or a Recur that cannot happen leaves the run with its worker; the entries are written all the same, but no
    letters. Letters go only to runs that have no bundle of their own in the batch.
    """

    run_id: RunId
    epoch: int
    gen: int
    entries: tuple[Entry, ...] = ()
    start: Start | None = None
    move: Transition | None = None
    waits: tuple[Wait, ...] = ()
    drops: tuple[str, ...] = ()
    """Steps that wait no longer."""
    frees: tuple[int, ...] = ()
    """Letters whose event is given back to the log, for the next wait that asks for it."""
    children: tuple[Start, ...] = ()
    """Runs that it starts, for anybody to claim; one whose id exists is left alone."""
    letters: tuple[RunSignal, ...] = ()
    undoing: bool = False
    """From now on it undoes what it did. A bundle with letters or this has a start or a move."""
    dispatches: tuple[StagedEvent, ...] = ()
    outgoing: tuple[OutboxEvent, ...] = ()
    facts: tuple[RunValue, ...] = ()
    """At most one of each name."""
    recorded: tuple[str, ...] = ()
    """Steps whose `Done` rows go, because their entries are here. These four belong to the entries: they are written
    with them even if the move does not happen, and need neither a start nor a move."""

    @property
    def size(self) -> int:
        size = len(self.start.input) if self.start is not None else 0
        for entry in self.entries:
            size += len(entry.input) + len(entry.value)
        for child in self.children:
            size += len(child.input)
        for letter in self.letters:
            size += len(letter.value)
        for dispatch in self.dispatches:
            size += len(dispatch.body)
        for outgoing in self.outgoing:
            size += len(outgoing.body)
        for fact in self.facts:
            size += len(fact.value)
        return size


class BatchResult(Struct, frozen=True):
    """What became of a batch that is in."""

    ready: frozenset[RunId] = frozenset()
    """Released, and ready again at once: mail had come in."""
    unmet: Mapping[RunId, frozenset[str]] = {}
    """Steps whose waits were not registered, because there is mail. Their runs were not released.
    Without steps: an End or a Recur that did not happen."""


class InboxItem(Struct, frozen=True):
    """One numbered letter in a run's inbox, written by somebody who does not own the run."""

    run_id: RunId
    n: int
    kind: EntryKind
    at: int
    step: str = ""
    value: bytes = b""
    event: int | None = None
    """The number of the event it brings; its body is then the value."""


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
"""Entries after which other steps are in flight than before. Timers, events and heartbeats are not among them: beside a
step that kills its process they may be recorded before every death."""

SUSPECT_DEATHS = 2
"""From this many process deaths on, a run is a suspect: only `claim_suspects` gives it out."""


class Crashes(Struct, frozen=True):
    """How often a worker died, or lost its lease, while it owned a run.

    The owner of the run clears them once every step has ended that was in flight at the first of them: only the owner
    knows those steps, from the replay."""

    deaths: int = 0
    alone: int = 0
    """Deaths while the run was the only one of its process."""
    seq: int | None = None
    """The number of the last entry before the first death: a step that is pending now, and was issued before this
    entry or right behind it, may have been in flight at each of the deaths."""

    def after_death(self, seq: int, is_alone: bool) -> Crashes:
        """One more, of a run whose last entry has this number."""
        return Crashes(self.deaths + 1, self.alone + is_alone, self.seq if self.deaths else seq)

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS


NO_CRASHES = Crashes()

SUSPECT_GROUPS = 4
"""Suspects that died together are next run in so many groups. With more there are fewer deaths until one is alone, but
more turns in which the others wait."""


def suspect_groups(crashes: Sequence[Crashes]) -> list[int]:
    """Into which groups to divide the runs that one dead process had, in the order of their ids; group 0 is run first.

    Those are together that died equally often. First come those that died alone, then those with fewer deaths: a run
    with a long step gathers deaths of others. The order rotates from death to death, because a group after one that
    outlives its window is run in company, and would never be alone if it was never the first."""
    levels: dict[tuple[int, int], list[int]] = {}
    for place, one in enumerate(crashes):
        levels.setdefault((-one.alone, one.deaths), []).append(place)
    groups, first = [0] * len(crashes), 0
    for (_, deaths), places in sorted(levels.items()):
        for number, place in enumerate(places):
            groups[place] = first + (number + deaths) % len(places) * SUSPECT_GROUPS // len(places)
        first += SUSPECT_GROUPS
    return groups


def unpark_pause(attempts: int) -> int:
    """Microseconds after a run was parked in which new workers do not try it: processes that are restarted in a loop
    would else replay every parked run at each start. None after the first two times, 25.6 s from the eighth on."""
    return 0 if attempts < 3 else 100_000 << min(attempts, 8)


def last_progress(entries: Iterable[Entry]) -> int:
    return max((entry.seq for entry in entries if entry.kind in PROGRESS), default=0)


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
    mail: tuple[InboxItem, ...]
    waits: tuple[tuple[str, bytes], ...] = ()
    """The steps that are registered, with the keys they wait under."""
    start_seq: int = 0
    """The newest event when it was started; it sees those after it."""
    parent: RunId | None = None
    parent_step: str | None = None
    depth: int = 0
    watchers: tuple[EndWatcher, ...] = ()
    """Who else is told its end."""
    done: tuple[StepCommit, ...] = ()
    """Steps of this generation that are done and not in the history."""
    undoing: bool = False
    """It had begun to undo what it did."""
    end_if_parked: bool = False
    """It was cancelled while it was parked: if it cannot go on now either, it ends as cancelled."""
    crashes: Crashes = NO_CRASHES


class Claim(Struct, frozen=True):
    now: int
    runs: tuple[ClaimedRun, ...]
    number: int | None = None
    """Of this claim, counted per worker; None if the worker may claim nothing: it was taken over, or the database has
    lost one of its earlier claims."""


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
    parent: RunId | None = None
    deaths: int = 0
    """Workers that died while they owned it, before the steps that were in flight had ended."""
    has_cancel: bool = False
    """A cancel is stored, nothing is being undone, and the run does not end yet if its code still does not fit."""


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


class WorkerStatus(Struct, frozen=True):
    info: WorkerInfo
    is_lapsed: bool
    """Its lease is over, or it is known to be dead."""


class Takeover(Struct, frozen=True):
    worker: WorkerId
    moved: int


class CancelOutcome(StrEnum):
    REQUESTED = "requested"
    ALREADY = "already"
    """Somebody asked before."""
    ENDED = "ended"
    MISSING = "missing"


class Event(Struct, frozen=True):
    """An event as it is stored. `body` holds all of it; the rest is what it is found by."""

    source: str
    id: str
    type: str
    target: RunId | None
    """The only run that may get it."""
    body: bytes


class EventKey(Struct, frozen=True):
    """Under which key waits are looked for, and under which one the event is kept for waits to come.

    The two differ only for an event with a target.
    """

    plain: bytes
    kept: bytes
    once: bool = False
    """Only one wait gets it, and it is kept only if there is none: whoever takes it later takes the row of the key."""


class NewEvent(Struct, frozen=True):
    event: Event
    keys: tuple[EventKey, ...] = ()
    starts: tuple[Start, ...] = ()
    """Runs that it starts if it is new."""


class AcceptResult(Struct, frozen=True):
    fresh: frozenset[int]
    """Positions in the post of those that were not known before."""
    woke: bool
    """Somebody has something to do because of it."""


class StoredEvent(Struct, frozen=True):
    seq: int
    received_at: int
    event: Event


class MatchPaths(Struct, frozen=True):
    """The sets of paths that waits for a type match on; a new one raises the version."""

    version: int = 0
    known: tuple[str, ...] = ()
