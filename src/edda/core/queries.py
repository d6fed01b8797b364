"""The records of the `Queries` and `Admin` ports: what the viewer and the CLI read and do. Runs do not need them."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from .model import RunId, Wait, WorkerInfo
from .states import RunStatus

MAX_COUNT = 10_000
"""Counts stop here: a larger number tells people no more, and a page must not wait for it."""


class RunQuery(Struct, frozen=True):
    """Newest first, by (created_at, id). An empty set of statuses means all of them."""

    statuses: frozenset[RunStatus] = frozenset()
    workflow: str | None = None
    id_prefix: str | None = None
    text: str | None = None
    """A part of the id or of the reason, without regard to case; or the whole id."""
    ids_after: tuple[int, RunId] | None = None
    """The text is searched as a part of the ids of runs newer than this key only: no index contains parts of ids."""
    created_from: int | None = None
    created_to: int | None = None
    parent: RunId | None = None
    after: tuple[int, RunId] | None = None
    """The (created_at, id) of the last record of the page before."""
    limit: int = 50


class Generation(Struct, frozen=True):
    generation: int
    created_at: int
    entries: int


class EventQuery(Struct, frozen=True):
    """Newest first, by number. Messages of channels are events of the types `channel/...`."""

    type: str | None = None
    source: str | None = None
    id: str | None = None
    text: str | None = None
    """A part of the type, the source or the id, without regard to case."""
    received_from: int | None = None
    received_to: int | None = None
    messages: bool = False
    """Messages of channels instead of other events."""
    before: int | None = None
    limit: int = 50


class EventReceiver(Struct, frozen=True):
    """A run that waited for an event and received it."""

    run_id: RunId
    workflow: str
    step: str
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
    """How many it owns now."""


class EventSchema(Struct, frozen=True):
    """The JSON schema of the data of an event that a workflow waits for."""

    workflow: str
    type: str
    schema: bytes


class Definition(Struct, frozen=True):
    """What the code says about a workflow, stored by the process that started last with it."""

    workflow: str
    service: str
    details: bytes
    """JSON: the schema of its input, its structure, its documentation."""
    seen_at: int


class Audit(Struct, frozen=True):
    """An operator's action: who did what, when, and from where."""

    at: int
    who: str
    action: str
    subject: str
    origin: str = ""
    details: str = ""
    seq: int = 0
    """Given by the database."""


class TimeBucket(Struct, frozen=True):
    """The runs that started and ended within one bucket of time, which begins at `since`."""

    since: int
    started: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0


class Latency(Struct, frozen=True):
    """How long the runs that ended last took, from creation to end, in microseconds."""

    runs: int
    median: int
    p95: int


class Backlog(Struct, frozen=True):
    """What is left to do, and since when; times are None if there is nothing."""

    ready: int
    """Runs that are due and have no owner. As all numbers here, at most `MAX_COUNT`."""
    oldest_ready: int | None
    waiting: int
    oldest_wait: int | None
    """When the oldest waiting run was created."""
    parked: int
    outbox_pending: int
    outbox_dead: int
    oldest_outbox: int | None
    staged_events: int


class ReopenOutcome(StrEnum):
    DONE = "done"
    MISSING = "missing"
    """There is no such run."""
    OPEN = "open"
    """It has not ended, or another caller has opened it again."""
