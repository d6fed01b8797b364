"""What people are shown: plain records that are the same in JSON, on a page and in a terminal.

Payloads are JSON values here, whatever they were in the workflow: what has no JSON form is shown as text, what is
marked as secret is hidden, and what is encrypted under a key that this process lacks is said to be.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct, field

from edda.core.states import ENDED, OPEN, WAITING, RunStatus

T = TypeVar("T")


class Page(Struct, Generic[T], frozen=True):
    items: tuple[T, ...]
    next: str | None = None
    """What to ask for the page behind this one with; None if it is the last."""
    searched_to: datetime | None = None
    """What is older was not searched, for no index knows it: ask again with `until`. None if everything was."""


# Runs


class RunView(Struct, frozen=True):
    id: str
    workflow: str
    status: str
    words: str
    """Its state as one would say it: "waits for payment.completed where order_id = A-17"."""
    generation: int
    created_at: datetime
    ended_at: datetime | None = None
    due: datetime | None = None
    """When it goes on by itself, at the latest."""
    deadline: datetime | None = None
    parent: str | None = None
    owner: str | None = None
    """The worker that has it in memory."""
    deaths: int = 0
    """Processes that died while they ran it, before the steps in flight had ended."""


class ErrorView(Struct, frozen=True):
    type: str
    message: str
    traceback: str | None = None


class GenerationView(Struct, frozen=True):
    number: int
    created_at: datetime
    entries: int


class WaitView(Struct, frozen=True):
    run_id: str
    workflow: str
    step: str
    kind: str
    """event or message."""
    type: str
    """Of the event, or the channel of the message."""
    words: str
    match: dict[str, Any] = field(default_factory=dict)
    due: datetime | None = None
    schema: dict[str, Any] | None = None
    """Of the data, if the workflow gave a model: a form can be made of it."""
    mode: str | None = None
    """Of a message: broadcast, competing or direct."""


class RunDetail(Struct, frozen=True):
    run: RunView
    input: Any
    result: Any = None
    error: ErrorView | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What it said of itself with `ctx.set`."""
    waits: tuple[WaitView, ...] = ()
    generations: tuple[GenerationView, ...] = ()
    children: tuple[RunView, ...] = ()
    """The newest hundred."""
    may: tuple[str, ...] = ()
    """What can be done with it now: cancel, retry, resume, delete."""


class EntryView(Struct, frozen=True):
    """One line of the history, as it is."""

    seq: int
    kind: str
    step: str
    name: str
    ok: bool
    at: datetime
    attempt: int = 1
    input: Any = None
    value: Any = None
    error: ErrorView | None = None
    event: int | None = None


class BarState(StrEnum):
    DONE = "done"
    FAILED = "failed"
    RUNNING = "running"
    WAITING = "waiting"
    OVER = "over"
    """It ended without an outcome: its wait was dropped, its run stopped, or nobody asked any more."""


class AttemptView(Struct, frozen=True):
    number: int
    since: datetime
    until: datetime | None
    ok: bool | None = None
    error: ErrorView | None = None


class Bar(Struct, frozen=True):
    """One step of a run on its timeline."""

    step: str
    name: str
    kind: str
    """step, timer, event, message, child, undo."""
    state: BarState
    since: datetime
    until: datetime | None
    """None if it is not over."""
    attempts: tuple[AttemptView, ...] = ()
    entries: tuple[int, ...] = ()
    """Numbers of the lines of the history that speak of it."""
    child: str | None = None
    event: int | None = None
    rejected: int = 0
    """Events or messages that did not fit the model of the wait; `entries` has the last of them."""


class Timeline(Struct, frozen=True):
    generation: int
    since: datetime
    until: datetime
    bars: tuple[Bar, ...]
    """In the order in which they began."""


# Events and messages


class EventView(Struct, frozen=True):
    number: int
    id: str
    source: str
    type: str
    received_at: datetime
    target: str | None = None


class ConsumerView(Struct, frozen=True):
    run_id: str
    workflow: str
    step: str
    """Empty for one that was started by it."""
    at: datetime


class EventDetail(Struct, frozen=True):
    event: EventView
    attributes: dict[str, Any]
    data: Any
    consumers: tuple[ConsumerView, ...] = ()


class ChannelView(Struct, frozen=True):
    name: str
    waiting: int
    """Runs that wait for its next message, as far as they were counted."""
    newest: datetime | None = None


class OutgoingView(Struct, frozen=True):
    number: int
    id: str
    type: str
    source: str
    key: str
    state: str
    attempts: int
    created_at: datetime
    due: datetime | None = None
    reason: str | None = None
    run_id: str | None = None


# The whole


class WorkerView(Struct, frozen=True):
    id: str
    service: str
    host: str
    pid: int
    started_at: datetime
    expires_at: datetime
    is_alive: bool
    runs: int


class DefinitionView(Struct, frozen=True):
    workflow: str
    service: str
    seen_at: datetime
    documentation: str = ""
    schema: dict[str, Any] | None = None
    """Of its input."""
    structure: dict[str, Any] | None = None
    """What its code does in which order; drawn as a graph."""
    can_start: bool = False
    """Whether this process has its code."""


class BucketView(Struct, frozen=True):
    since: datetime
    started: int
    completed: int
    failed: int
    cancelled: int


class StatsView(Struct, frozen=True):
    at: datetime
    counts: dict[str, int]
    """By status; 10000 means that many or more."""
    buckets: tuple[BucketView, ...]
    median_ms: float | None
    p95_ms: float | None
    ready: int
    oldest_ready: datetime | None
    oldest_wait: datetime | None
    parked: int
    outbox_pending: int
    outbox_dead: int
    oldest_outgoing: datetime | None
    dispatches: int
    """Messages and events of runs that are not in the log yet."""
    workers: int
    """That are alive."""


class AuditView(Struct, frozen=True):
    number: int
    at: datetime
    who: str
    action: str
    subject: str
    origin: str = ""
    details: str = ""


# What is asked for

STATUS_GROUPS = {"open": OPEN, "waiting": WAITING, "ended": ENDED}

# Described for programs only: what is none of these is refused with words of our own.
StatusWord = Annotated[str, Meta(extra_json_schema={"enum": [*STATUS_GROUPS, *RunStatus]})]
Action = Annotated[str, Meta(extra_json_schema={"enum": ["cancel", "retry", "resume", "delete"]})]
PathAndValue = Annotated[str, Meta(extra_json_schema={"pattern": "^[^=]+="})]


class RunSearch(Struct, frozen=True, forbid_unknown_fields=True):
    """Which runs; as it stands in the address of a page."""

    status: tuple[StatusWord, ...] = ()
    workflow: str | None = None
    id: str | None = None
    """The beginning of an id."""
    q: str | None = None
    """Somewhere in the id or in what it waits for; or the whole id, however old."""
    input: tuple[PathAndValue, ...] = ()
    """`path=value`, compared by value: `order.id=A-17`."""
    since: datetime | None = None
    until: datetime | None = None
    parent: str | None = None
    cursor: str | None = None
    limit: int = 50


class HistorySearch(Struct, frozen=True, forbid_unknown_fields=True):
    generation: int | None = None
    """Of a run that recurs; without it, the newest."""
    step: str | None = None
    """Only lines that speak of it."""
    cursor: str | None = None
    """The number of a line: those behind it."""
    limit: int = 50


class EventSearch(Struct, frozen=True, forbid_unknown_fields=True):
    type: str | None = None
    source: str | None = None
    id: str | None = None
    q: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    messages: bool = False
    cursor: str | None = None
    limit: int = 50


class StartRequest(Struct, frozen=True, forbid_unknown_fields=True):
    workflow: str
    input: dict[str, Any] = field(default_factory=dict)
    id: str | None = None


class RetryOrder(Struct, frozen=True, forbid_unknown_fields=True):
    from_start: bool = False
    """Run every step again, also those that succeeded."""


class CancelOrder(Struct, frozen=True, forbid_unknown_fields=True):
    reason: str = "cancelled"


class BulkOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """What to do with the runs of these ids, or with all that the search finds."""

    action: Action
    ids: tuple[str, ...] = ()
    search: RunSearch | None = None
    count_only: bool = False
    from_start: bool = False
    reason: str = "cancelled"


class EventOrder(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    source: str = "/edda/control"
    data: Any = None
    id: str | None = None
    subject: str | None = None
    target: str | None = None
    """A run that alone may receive it."""
    extensions: dict[str, Any] = field(default_factory=dict)


class MessageOrder(Struct, frozen=True, forbid_unknown_fields=True):
    channel: str
    data: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    """A run that alone may receive it."""


class OutboxOrder(Struct, frozen=True, forbid_unknown_fields=True):
    ids: tuple[str, ...] = ()
    every: bool = False


class ActionResult(Struct, frozen=True):
    """What came of an action."""

    done: bool
    words: str
    count: int = 0
    subject: str | None = None
    """The id of what was made or acted on."""
