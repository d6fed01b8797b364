"""The rows of the database in dictionaries, and the changes that several parts make to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import astuple

from edda.core.model import (
    NO_CRASHES,
    Crashes,
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
from edda.core.states import OPEN, WAITING, RunStatus, may_follow
from edda.errors import StorageRejectedError

_SUSPENDED = WAITING | {RunStatus.PARKED}
_INT64 = range(-(2**63), 2**63)


def wall_clock() -> int:
    return time.time_ns() // 1_000


class OpenRun(Struct):
    """A row of `edda_open_run`."""

    run_id: RunId
    workflow: str
    generation: int
    epoch: int
    owner: WorkerId | None
    ready_at: int | None
    event_cursor: int
    status: RunStatus = RunStatus.RUNNING
    inbox_count: int = 0
    inbox_read: int = 0
    cancelled: bool = False
    attempts: int = 0
    watchers: int = 0
    compensating: bool = False
    reason: str | None = None
    parked_at: int | None = None
    end_if_parked: bool = False
    crashes: Crashes = NO_CRASHES
    is_alone: bool = False
    """Claimed as the only run of its process."""
    suspect_at: int | None = None
    """Replaces `ready_at` while the run waits for `claim_suspects`; the same for all runs of its group."""

    def free(self, ready_at: int) -> None:
        self.owner, self.ready_at, self.status, self.is_alone = None, ready_at, RunStatus.RUNNING, False

    def free_from_dead(self, seq: int, now: int) -> None:
        self.crashes = self.crashes.after_death(seq, self.is_alone)
        self.free(now)

    def wake(self) -> None:
        """Make the run ready for a new inbox item, unless it has an owner, is parked or is a suspect."""
        if self.owner is None and self.status is not RunStatus.PARKED and self.suspect_at is None:
            self.ready_at, self.status, self.reason = 0, RunStatus.RUNNING, None

    def cancel_parked(self) -> bool:
        """Make a parked run due and let it end if it cannot continue; not in the middle of compensation."""
        if self.owner is not None or self.status is not RunStatus.PARKED or self.compensating or self.end_if_parked:
            return False
        self.end_if_parked, self.ready_at = True, 0
        return True

    def resume(self) -> None:
        self.ready_at, self.status, self.reason = 0, RunStatus.RUNNING, None
        self.crashes = NO_CRASHES

    def suspend(self, suspend: Suspend, now: int) -> bool:
        """Whether the inbox has unread items, so that the run is ready again at once."""
        is_parked = suspend.status is RunStatus.PARKED
        has_unread = self.inbox_count != suspend.inbox_read and not is_parked
        self.owner, self.inbox_read, self.is_alone = None, suspend.inbox_read, False
        self.ready_at, self.status, self.reason = suspend.ready_at, suspend.status, suspend.reason
        self.attempts, self.parked_at = (self.attempts + 1, now) if is_parked else (0, None)
        if not is_parked:
            self.end_if_parked, self.crashes = False, NO_CRASHES
        if has_unread:
            self.wake()
        return has_unread

    def check_status(self, status: RunStatus, compensating: bool) -> None:
        """Refuse a change that `TRANSITIONS` does not allow. `compensating`: compensation begins with this change."""
        before = _shown(self.status, self.compensating)
        after = _shown(status, self.compensating or compensating)
        if not may_follow(before, after):
            raise StorageRejectedError(f"run {self.run_id}: {before} cannot change to {after}")

    def status_at(self, now: int) -> RunStatus:
        """As people see it: a suspended run that is due waits for a worker only."""
        is_due = self.owner is None and self.ready_at is not None and self.ready_at <= now
        status = RunStatus.RUNNING if is_due and self.status in _SUSPENDED else self.status
        return _shown(status, self.compensating)


def _shown(status: RunStatus, compensating: bool) -> RunStatus:
    """Compensation covers every open status except `parked`, because a parked run may need an operator."""
    is_covered = compensating and status in OPEN and status is not RunStatus.PARKED
    return RunStatus.COMPENSATING if is_covered else status


class Result(Struct, frozen=True):
    generation: int
    status: RunStatus
    value: bytes
    ended_at: int
    epoch: int


class Tables:
    def __init__(self, now: Callable[[], int] = wall_clock) -> None:
        self.now = now
        self.leases: dict[WorkerId, int] = {}
        """Worker -> end of its lease."""
        self.infos: dict[WorkerId, WorkerInfo] = {}
        self.registered_at: dict[WorkerId, int] = {}
        self.fences: dict[WorkerId, Fence] = {}
        self.runs: dict[RunId, dict[int, Start]] = {}
        """Run -> generation -> its start."""
        self.histories: dict[tuple[RunId, int], dict[int, Entry]] = {}
        self.results: dict[RunId, Result] = {}
        self.open_runs: dict[RunId, OpenRun] = {}
        self.inboxes: dict[RunId, dict[int, InboxItem]] = {}
        self.watcher_rows: dict[RunId, set[EndWatcher]] = {}
        """Open run -> the steps of other runs that receive its end."""
        self.events: dict[int, StoredEvent] = {}
        self.event_numbers: dict[tuple[str, str], int] = {}
        """(source, id) of an event -> its number."""
        self.keys: dict[bytes, set[int]] = {}
        """Key -> the numbers of the events stored under it."""
        self.wait_rows: dict[RunId, dict[str, Wait]] = {}
        self.types: dict[str, MatchPaths] = {}
        self.filled_from: dict[tuple[str, str], int] = {}
        """(event type, match paths) -> events after this number have their keys."""
        self.last_staged_seq = 0
        """No number is given out twice."""
        self.staged: dict[int, tuple[int, StagedEventRow]] = {}
        """Number -> when it is due, and the staged event."""
        self.last_outbox_seq = 0
        self.outbox: dict[int, OutboxRow] = {}
        self.value_rows: dict[RunId, dict[str, RunValue]] = {}
        self.audit_rows: list[Audit] = []
        self.definition_rows: dict[str, Definition] = {}
        self.schema_rows: dict[tuple[str, str], EventSchema] = {}
        """(workflow, event type) -> the schema."""

    @property
    def newest(self) -> int:
        """The number of the newest event. It is never pruned, so no number is given out twice."""
        return next(reversed(self.events), 0)

    def owned_by(self, worker: WorkerId) -> list[OpenRun]:
        return [run for run in self.open_runs.values() if run.owner == worker]

    def insert(
        self,
        start: Start,
        *,
        ready_at: int | None,
        event_cursor: int,
        generation: int = 0,
        epoch: int = 0,
        owner: WorkerId | None = None,
    ) -> None:
        self.runs.setdefault(start.run_id, {})[generation] = start
        self.open_runs[start.run_id] = OpenRun(
            start.run_id, start.workflow, generation, epoch, owner, ready_at, event_cursor
        )

    def insert_unowned(self, starts: Iterable[Start]) -> frozenset[RunId]:
        """Returns the ids that are new."""
        now, new = self.now(), set[RunId]()
        for start in starts:
            if start.run_id not in self.runs:
                new.add(start.run_id)
                ready_at = now if start.ready_at is None else start.ready_at
                self.insert(start, ready_at=ready_at, event_cursor=self.newest)
        return frozenset(new)

    def deliver(
        self, run: OpenRun, kind: EntryKind, *, step: str = "", value: bytes = b"", event: int | None = None
    ) -> None:
        run.inbox_count += 1
        item = InboxItem(run.run_id, run.inbox_count, kind, self.now(), step, value, event)
        self.inboxes.setdefault(run.run_id, {})[item.inbox_no] = item

    def insert_outbox(self, events: Iterable[OutboxEvent]) -> None:
        for event in events:
            self.last_outbox_seq += 1
            row = OutboxRow(self.last_outbox_seq, event, OutboxState.PENDING, 0, 0, reason=None, ended_at=None)
            self.outbox[row.seq] = row


def check_values(record: Struct) -> None:
    """Refuse values that no SQL database takes: text with NUL or half a surrogate pair, a number beyond 64 bits."""
    for value in astuple(record):
        if isinstance(value, str):
            check_text(value)
        elif isinstance(value, int) and value not in _INT64:
            raise StorageRejectedError(f"{value} does not fit into 64 bits")


def check_text(text: str) -> None:
    if "\0" in text:
        raise StorageRejectedError(f"{text!r} has a NUL in it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StorageRejectedError(f"{text!r} is not valid text") from error
