"""The rows of the database in dictionaries, and what changes more than one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import astuple

from edda.core.model import (
    NO_CRASHES,
    Crashes,
    End,
    EndWatcher,
    Entry,
    EntryKind,
    Fence,
    InboxItem,
    MatchPaths,
    OutboxEvent,
    OutboxRow,
    OutboxState,
    RunId,
    RunValue,
    StagedEventRow,
    Start,
    StoredEvent,
    Suspend,
    Wait,
    WorkerId,
    WorkerInfo,
)
from edda.core.queries import Audit, Definition, EventSchema
from edda.core.states import ENDED, WAITING, RunStatus
from edda.errors import StorageRejectedError

_RESTING = WAITING | {RunStatus.PARKED}
_INT64 = range(-(2**63), 2**63)


def wall_clock() -> int:
    return time.time_ns() // 1_000


class OpenRun(Struct):
    """The row of an open run, as `edda_sched` has it."""

    run_id: RunId
    workflow: str
    gen: int
    epoch: int
    owner: WorkerId | None
    ready_at: int | None
    start_seq: int
    status: RunStatus = RunStatus.RUNNING
    delivered: int = 0
    absorbed: int = 0
    cancelled: bool = False
    attempts: int = 0
    watchers: int = 0
    undoing: bool = False
    reason: str | None = None
    parked_at: int | None = None
    end_if_parked: bool = False
    crashes: Crashes = NO_CRASHES
    is_alone: bool = False
    """Claimed as the only run of its process."""
    suspect_at: int | None = None
    """Stands for `ready_at` while it waits for its turn as a suspect; that of its group."""

    def free(self, ready_at: int) -> None:
        self.owner, self.ready_at, self.status, self.is_alone = None, ready_at, RunStatus.RUNNING, False

    def die_with_owner(self, seq: int, now: int) -> None:
        self.crashes = self.crashes.after_death(seq, self.is_alone)
        self.free(now)

    def wake(self) -> None:
        """Something came for it. An owner sees by itself; a parked run and a suspect have to wait for their time."""
        if self.owner is None and self.status is not RunStatus.PARKED and self.suspect_at is None:
            self.ready_at, self.status, self.reason = 0, RunStatus.RUNNING, None

    def cancel_parked(self) -> bool:
        """A cancel has a parked run tried at once, and ended if it cannot go on, except in the middle of undoing."""
        if self.owner is not None or self.status is not RunStatus.PARKED or self.undoing or self.end_if_parked:
            return False
        self.end_if_parked, self.ready_at = True, 0
        return True

    def resume(self) -> None:
        self.ready_at, self.status, self.reason = 0, RunStatus.RUNNING, None
        self.crashes = NO_CRASHES

    def release(self, move: Suspend, now: int) -> bool:
        """Whether mail had come, so that the run is ready again at once."""
        is_parked = move.status is RunStatus.PARKED
        mail = self.delivered != move.absorbed and not is_parked
        self.owner, self.absorbed, self.is_alone = None, move.absorbed, False
        self.ready_at, self.status, self.reason = move.ready_at, move.status, move.reason
        self.attempts, self.parked_at = (self.attempts + 1, now) if is_parked else (0, None)
        if not is_parked:
            self.end_if_parked, self.crashes = False, NO_CRASHES
        if mail:
            self.wake()
        return mail

    def status_at(self, now: int) -> RunStatus:
        due = self.owner is None and self.ready_at is not None and self.ready_at <= now
        status = RunStatus.RUNNING if due and self.status in _RESTING else self.status
        return RunStatus.COMPENSATING if self.undoing and status is not RunStatus.PARKED else status


class Result(Struct, frozen=True):
    gen: int
    status: RunStatus
    value: bytes
    ended_at: int
    epoch: int


class Tables:
    def __init__(self, now: Callable[[], int] = wall_clock) -> None:
        self.now = now
        self.workers: dict[WorkerId, int] = {}
        """Worker -> end of its lease."""
        self.infos: dict[WorkerId, WorkerInfo] = {}
        self.registered: dict[WorkerId, int] = {}
        self.fences: dict[WorkerId, Fence] = {}
        self.runs: dict[RunId, dict[int, Start]] = {}
        """Run -> generation -> how it was started."""
        self.histories: dict[tuple[RunId, int], dict[int, Entry]] = {}
        self.results: dict[RunId, Result] = {}
        self.scheds: dict[RunId, OpenRun] = {}
        self.inboxes: dict[RunId, dict[int, InboxItem]] = {}
        self.watching: dict[RunId, set[EndWatcher]] = {}
        """Open run -> who is told its end."""
        self.events: dict[int, StoredEvent] = {}
        self.numbers: dict[tuple[str, str], int] = {}
        """(source, id) of an event -> its number."""
        self.keys: dict[bytes, set[int]] = {}
        """Key -> the numbers of the events kept under it."""
        self.waiting: dict[RunId, dict[str, Wait]] = {}
        self.types: dict[str, MatchPaths] = {}
        self.filled: dict[tuple[str, str], int] = {}
        """(type, shape) -> events after this number have their keys."""
        self.dispatched = 0
        """The number of the last dispatch; none is given out twice."""
        self.waiting_dispatches: dict[int, tuple[int, StagedEventRow]] = {}
        """Its number -> when it is due, and what it is."""
        self.last_outbox_seq = 0
        """The number of the last event for others."""
        self.outbox: dict[int, OutboxRow] = {}
        self.value_rows: dict[RunId, dict[str, RunValue]] = {}
        self.audit_rows: list[Audit] = []
        self.known_workflows: dict[str, Definition] = {}
        self.known_forms: dict[tuple[str, str], EventSchema] = {}
        """(workflow, type of event) -> the form."""

    @property
    def newest(self) -> int:
        """The last one that came in: it is never pruned, so no number is given out twice."""
        return next(reversed(self.events), 0)

    def insert(
        self,
        start: Start,
        *,
        ready_at: int | None,
        start_seq: int,
        gen: int = 0,
        epoch: int = 0,
        owner: WorkerId | None = None,
    ) -> None:
        self.runs.setdefault(start.run_id, {})[gen] = start
        self.scheds[start.run_id] = OpenRun(start.run_id, start.workflow, gen, epoch, owner, ready_at, start_seq)

    def insert_unowned(self, starts: Iterable[Start]) -> frozenset[RunId]:
        """Returns the ids that are new."""
        now, new = self.now(), set[RunId]()
        for start in starts:
            if start.run_id not in self.runs:
                new.add(start.run_id)
                ready_at = now if start.ready_at is None else start.ready_at
                self.insert(start, ready_at=ready_at, start_seq=self.newest)
        return frozenset(new)

    def deliver(
        self, sched: OpenRun, kind: EntryKind, *, step: str = "", value: bytes = b"", event: int | None = None
    ) -> None:
        sched.delivered += 1
        letter = InboxItem(sched.run_id, sched.delivered, kind, self.now(), step, value, event)
        self.inboxes.setdefault(sched.run_id, {})[letter.n] = letter

    def enqueue_outbox(self, events: Iterable[OutboxEvent]) -> None:
        for event in events:
            self.last_outbox_seq += 1
            record = OutboxRow(self.last_outbox_seq, event, OutboxState.PENDING, 0, 0, reason=None, ended_at=None)
            self.outbox[record.seq] = record


def check_values(record: Struct) -> None:
    """Refuse what no real database takes: NUL or half a surrogate pair in text, a number beyond 64 bits."""
    for value in astuple(record):
        if isinstance(value, str):
            check_text(value)
        elif isinstance(value, int) and value not in _INT64:
            raise StorageRejectedError(f"{value} does not fit into 64 bits")
    if isinstance(record, End | Suspend) and (record.status in ENDED) is not isinstance(record, End):
        raise StorageRejectedError(f"{record.status} is no status for {type(record).__name__}")


def check_text(text: str) -> None:
    if "\0" in text:
        raise StorageRejectedError(f"{text!r} has a NUL in it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StorageRejectedError(f"{text!r} is not valid text") from error
