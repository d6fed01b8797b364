"""The records of the control API, which the JSON API, the viewer and the command line share.

Payloads are JSON values: a value without a JSON form is shown as text, a secret field is redacted, and a text replaces
a value that is encrypted with a key that this process lacks.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct, field

from edda.core.states import ENDED, OPEN, WAITING, RunStatus

T = TypeVar("T")

MAX_PAGE_SIZE = 200


class Page(Struct, Generic[T], frozen=True):
    items: tuple[T, ...]
    next: str | None = None
    """The `cursor` of the next page; None on the last page."""
    searched_to: datetime | None = None
    """Older runs were not searched, because no index covers the condition: pass it as `until` to search them. None if
    all were searched."""


# Runs


class RunView(Struct, frozen=True):
    id: str
    workflow: str
    status: str
    words: str
    """The state as text: "waits for payment.completed where order_id = A-17"."""
    generation: int
    created_at: datetime
    ended_at: datetime | None = None
    due: datetime | None = None
    """When it continues at the latest: the end of its timer, time-out or retry delay."""
    deadline: datetime | None = None
    parent: str | None = None
    owner: str | None = None
    """The worker that has claimed it."""
    deaths: int = 0
    """Processes that died while they ran it; 0 again when the steps that were in flight have ended."""


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
    """The type of the event, or the channel of the message."""
    words: str
    """The wait as text: "payment.completed where order_id = A-17"."""
    match: dict[str, Any] = field(default_factory=dict)
    due: datetime | None = None
    schema: dict[str, Any] | None = None
    """The JSON schema of the data, if the workflow passed a model."""
    mode: str | None = None
    """The mode of the subscription, for a message: broadcast, competing or direct."""


class RunDetail(Struct, frozen=True):
    run: RunView
    input: Any
    result: Any = None
    error: ErrorView | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """The values that it published with `ctx.set`."""
    waits: tuple[WaitView, ...] = ()
    generations: tuple[GenerationView, ...] = ()
    children: tuple[RunView, ...] = ()
    """The newest 100."""
    may: tuple[str, ...] = ()
    """Actions that its status allows: cancel, retry, resume, delete."""
    from_start_only: bool = False
    """It ran compensations: a retry without `from_start` is refused."""


class EntryView(Struct, frozen=True):
    """One entry of the history."""

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
    """The number of the event or message that it received."""


class BarState(StrEnum):
    DONE = "done"
    FAILED = "failed"
    RUNNING = "running"
    WAITING = "waiting"
    OVER = "over"
    """Ended without an outcome: its wait was cancelled, its run ended, or the workflow no longer awaited it."""


class AttemptView(Struct, frozen=True):
    number: int
    since: datetime
    until: datetime | None
    ok: bool | None = None
    error: ErrorView | None = None


class Bar(Struct, frozen=True):
    """One step, timer, wait or child of a run on its timeline."""

    step: str
    name: str
    kind: str
    """step, timer, event, message, child, undo."""
    state: BarState
    since: datetime
    until: datetime | None
    """null while it is open."""
    attempts: tuple[AttemptView, ...] = ()
    entries: tuple[int, ...] = ()
    """`seq` of the history entries of this step."""
    child: str | None = None
    """The id of the child run."""
    event: int | None = None
    """The number of the event or message that it received."""
    rejected: int = 0
    """How many events or messages did not fit the model of the wait; `entries` has the last 10."""


class Timeline(Struct, frozen=True):
    generation: int
    since: datetime
    until: datetime
    bars: tuple[Bar, ...]
    """In the order in which they started."""


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
    """Empty if the event started the run."""
    at: datetime


class EventDetail(Struct, frozen=True):
    event: EventView
    attributes: dict[str, Any]
    data: Any
    consumers: tuple[ConsumerView, ...] = ()


class ChannelView(Struct, frozen=True):
    name: str
    waiting: int
    """Runs that wait for its next message, among the first 1,000 waits."""
    newest: datetime | None = None
    """When its newest message was stored, if it is among the newest 1,000 messages."""


class OutboxView(Struct, frozen=True):
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


# Workers, workflows, statistics


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
    """The JSON schema of the input."""
    structure: dict[str, Any] | None = None
    """The steps, waits, branches and loops of its code."""
    can_start: bool = False
    """Whether this process has its code loaded, which starting a run needs."""


class BucketView(Struct, frozen=True):
    since: datetime
    started: int
    completed: int
    failed: int
    cancelled: int


class StatsView(Struct, frozen=True):
    at: datetime
    counts: dict[str, int]
    """Runs by status; counting stops at 10000."""
    buckets: tuple[BucketView, ...]
    """The last 60 minutes, one bucket per minute."""
    median_ms: float | None
    p95_ms: float | None
    ready: int
    """Runs that a worker can claim now."""
    oldest_ready: datetime | None
    oldest_wait: datetime | None
    parked: int
    outbox_pending: int
    outbox_dead: int
    oldest_outbox: datetime | None
    staged_events: int
    """Events and messages that were sent in a transaction and are not in the event log yet."""
    workers: int
    """Workers whose lease has not lapsed."""


class AuditView(Struct, frozen=True):
    number: int
    at: datetime
    who: str
    """The name of the token, or the user of the command line."""
    action: str
    subject: str
    origin: str = ""
    """The client's address, or "command line"."""
    details: str = ""


# Requests

STATUS_GROUPS = {"open": OPEN, "waiting": WAITING, "ended": ENDED}

# The enum and the pattern are for OpenAPI only: the controller checks the values and raises errors with more detail.
StatusWord = Annotated[str, Meta(extra_json_schema={"enum": [*STATUS_GROUPS, *RunStatus]})]
Action = Annotated[str, Meta(extra_json_schema={"enum": ["cancel", "retry", "resume", "delete"]})]
PathAndValue = Annotated[str, Meta(extra_json_schema={"pattern": "^[^=]+="})]


class RunSearch(Struct, frozen=True, forbid_unknown_fields=True):
    """Selects runs: all conditions must match."""

    status: tuple[StatusWord, ...] = ()
    workflow: str | None = None
    id: str | None = None
    """The first characters of the id."""
    q: str | None = None
    """A part of the id, of what the run waits for, or the whole id of a run of any age."""
    input: tuple[PathAndValue, ...] = ()
    """`path=value`: an argument has this value, such as `order.id=A-17`."""
    since: datetime | None = None
    """Created at this time or later."""
    until: datetime | None = None
    """Created before this time."""
    parent: str | None = None
    """The id of the parent run."""
    cursor: str | None = None
    """`next` of the previous page."""
    limit: int = 50


class HistorySearch(Struct, frozen=True, forbid_unknown_fields=True):
    generation: int | None = None
    """The number of a generation, the first is 0; without it, the newest."""
    step: str | None = None
    """Only entries of this step."""
    cursor: str | None = None
    """`next` of the previous page, or the `seq` of an entry: the entries after it."""
    limit: int = 50


class EventSearch(Struct, frozen=True, forbid_unknown_fields=True):
    type: str | None = None
    source: str | None = None
    id: str | None = None
    q: str | None = None
    """A part of the type, the source or the id."""
    since: datetime | None = None
    """Received at this time or later."""
    until: datetime | None = None
    """Received before this time."""
    messages: bool = False
    """Messages of channels instead of events."""
    cursor: str | None = None
    """`next` of the previous page."""
    limit: int = 50


class StartRequest(Struct, frozen=True, forbid_unknown_fields=True):
    workflow: str
    input: dict[str, Any] = field(default_factory=dict)
    id: str | None = None
    """The id of the run; if a run has it, the request starts nothing. Without it, a new id."""


class RetryRequest(Struct, frozen=True, forbid_unknown_fields=True):
    from_start: bool = False
    """Run every step again, including those that succeeded."""


class CancelRequest(Struct, frozen=True, forbid_unknown_fields=True):
    reason: str = "cancelled"


class BulkRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """An action on the runs with these ids, or on all runs that the search finds."""

    action: Action
    ids: tuple[str, ...] = ()
    search: RunSearch | None = None
    count_only: bool = False
    """Count the runs and change nothing."""
    from_start: bool = False
    """As in `RetryRequest`."""
    reason: str = "cancelled"


class EventRequest(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    source: str = "/edda/control"
    data: Any = None
    id: str | None = None
    """A second event with the same id and source is ignored. Without it, a new id."""
    subject: str | None = None
    target: str | None = None
    """The id of the only run that may receive it."""
    extensions: dict[str, Any] = field(default_factory=dict)


class MessageRequest(Struct, frozen=True, forbid_unknown_fields=True):
    channel: str
    data: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    """The id of the only run that may receive it."""


class OutboxRequest(Struct, frozen=True, forbid_unknown_fields=True):
    ids: tuple[str, ...] = ()
    every: bool = False
    """All dead events, instead of those with the ids."""


class ActionResult(Struct, frozen=True):
    """The result of an action."""

    done: bool
    """Whether it changed anything."""
    words: str
    """The result as text."""
    count: int = 0
    """How many runs or events it changed, or would change."""
    subject: str | None = None
    """The id of the run, event or message."""
