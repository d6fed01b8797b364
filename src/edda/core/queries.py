"""What people ask of a database when they look at it and steer it: never needed by a run itself."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from .model import RunId, Wait, WorkerInfo
from .states import RunStatus

MAX_COUNT = 10_000
"""Counting goes no further: nobody reads more, and a page must not wait for it."""


class RunQuery(Struct, frozen=True):
    """Newest first, by (created_at, id). An empty set of statuses means all of them."""

    statuses: frozenset[RunStatus] = frozenset()
    workflow: str | None = None
    id_prefix: str | None = None
    text: str | None = None
    """Somewhere in the id or in the reason, without regard to case; or the whole id."""
    ids_after: tuple[int, RunId] | None = None
    """The text is looked for within the ids of runs behind this key alone: no index knows what is in an id."""
    created_from: int | None = None
    created_to: int | None = None
    parent: RunId | None = None
    after: tuple[int, RunId] | None = None
    """The key of the last row of the page before."""
    limit: int = 50


class Generation(Struct, frozen=True):
    gen: int
    created_at: int
    entries: int


class EventQuery(Struct, frozen=True):
    """Newest first, by number. Messages of channels are events of the types `channel/...`."""

    type: str | None = None
    source: str | None = None
    id: str | None = None
    text: str | None = None
    """Somewhere in the type, the source or the id, without regard to case."""
    received_from: int | None = None
    received_to: int | None = None
    messages: bool = False
    """Messages of channels instead of events of the outside world."""
    before: int | None = None
    limit: int = 50


class EventReceiver(Struct, frozen=True):
    """Who got an event: a run that waited for it, or one that was started by it."""

    run_id: RunId
    workflow: str
    step: str
    """Empty for one that was started by it."""
    at: int


class WaitRow(Struct, frozen=True):
    run_id: RunId
    workflow: str
    wait: Wait


class WorkerRecord(Struct, frozen=True):
    info: WorkerInfo
    started_at: int
    expires_at: int
    is_lapsed: bool
    runs: int
    """That it owns now."""


class EventSchema(Struct, frozen=True):
    """The JSON schema of an event's data, as a workflow's wait for it says."""

    workflow: str
    type: str
    schema: bytes


class Definition(Struct, frozen=True):
    """A workflow as its code says, told by the last process that knew it."""

    workflow: str
    service: str
    details: bytes
    """JSON: the schema of its input, its structure, its documentation."""
    seen_at: int


class Audit(Struct, frozen=True):
    """Who did what, when, and from where."""

    at: int
    who: str
    action: str
    subject: str
    origin: str = ""
    details: str = ""
    seq: int = 0
    """Given by the database."""


class TimeBucket(Struct, frozen=True):
    """What happened within one stretch of time."""

    since: int
    started: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0


class Latency(Struct, frozen=True):
    """Of the runs that ended last: from their creation to their end, in microseconds."""

    runs: int
    median: int
    p95: int


class Backlog(Struct, frozen=True):
    """What has to be done, and for how long it has been waiting; moments, or None if there is nothing."""

    ready: int
    """Runs that nobody has though they are due; at most `MOST_COUNTED`."""
    oldest_ready: int | None
    waiting: int
    oldest_wait: int | None
    """When the run that has been open longest of those that wait was created."""
    parked: int
    outbox_pending: int
    outbox_dead: int
    oldest_outgoing: int | None
    dispatches: int


class ReopenOutcome(StrEnum):
    DONE = "done"
    MISSING = "missing"
    """There is no such run."""
    OPEN = "open"
    """It has not ended, or somebody else opened it again meanwhile."""
