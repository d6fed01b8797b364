"""The control API as one table: its routes, its description, its client and its reference page all follow from it.

Each operation is a method of the `Controller`. Its arguments are what stands in the path, then the query, then the
body; a query or a body that is `spread` gives one argument for each of its fields instead of one for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar
from urllib.parse import quote

from msgspec import Meta, Struct, structs

from edda.core.model import OutboxState

from .views import (
    ActionResult,
    AuditView,
    BulkOrder,
    CancelOrder,
    ChannelView,
    DefinitionView,
    EntryView,
    EventDetail,
    EventOrder,
    EventSearch,
    EventView,
    HistorySearch,
    MessageOrder,
    OutboxOrder,
    OutgoingView,
    Page,
    RetryOrder,
    RunDetail,
    RunSearch,
    RunView,
    StartRequest,
    StatsView,
    Timeline,
    WaitView,
    WorkerView,
)

PREFIX = "/_edda/api/v1"
MOST_ROWS = 200
"""Of one page."""

BULK_TIMEOUT = 600.0
"""Seconds that an action on many runs may take."""
_TAKEN = frozenset({"count", "bulk", ".", ".."})

T = TypeVar("T")


class TimelineQuery(Struct, frozen=True, forbid_unknown_fields=True):
    generation: int | None = None


class WaitQuery(Struct, frozen=True, forbid_unknown_fields=True):
    type: str | None = None
    cursor: str | None = None
    limit: int = 50


class OutboxQuery(Struct, frozen=True, forbid_unknown_fields=True):
    state: Annotated[str, Meta(extra_json_schema={"enum": [*OutboxState]})] | None = None
    cursor: str | None = None
    limit: int = 50


class AuditQuery(Struct, frozen=True, forbid_unknown_fields=True):
    cursor: str | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    name: str
    """Of the method."""
    method: Literal["GET", "POST", "DELETE"]
    path: str
    """Below the prefix; what stands in braces is an argument."""
    summary: str
    answer: type[T]
    scope: Literal["view", "control", "events"] = "view"
    query: type[Struct] | None = None
    body: type[Struct] | None = None
    unpack_fields: bool = False
    seconds: float | None = None
    """That it may take, if that is more than usual."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.split("/")[1:])

    def address(self, *values: str | int) -> str:
        """The path with these in the places of its braces."""
        rest = iter(values)
        parts = (_encode(next(rest)) if part.startswith("{") else part for part in self.parts)
        return "/".join(("", *parts))

    def arguments(self, values: tuple[str | int, ...], query: Struct | None, body: Struct | None) -> tuple[Any, ...]:
        given = [part for part in (query, body) if part is not None]
        return (
            *values,
            *(value for part in given for value in (structs.astuple(part) if self.unpack_fields else (part,))),
        )


LIST_RUNS = Operation("list_runs", "GET", "/runs", "Runs, the newest first.", Page[RunView], query=RunSearch)
START_RUN = Operation("start_run", "POST", "/runs", "Start a workflow.", ActionResult, "control", body=StartRequest)
COUNT_RUNS = Operation(
    "count_runs", "GET", "/runs/count", "How many runs there are, by status.", dict[str, int], query=RunSearch
)
ACT_ON_RUNS = Operation(
    "act_on_runs",
    "POST",
    "/runs/bulk",
    "Do something with many runs, or count them.",
    ActionResult,
    "control",
    body=BulkOrder,
    seconds=BULK_TIMEOUT,
)
GET_RUN = Operation("get_run", "GET", "/runs/{id}", "One run.", RunDetail)
DELETE_RUN = Operation("delete_run", "DELETE", "/runs/{id}", "Delete a run that has ended.", ActionResult, "control")
GET_HISTORY = Operation(
    "get_history",
    "GET",
    "/runs/{id}/history",
    "What is recorded of a run, line by line.",
    Page[EntryView],
    query=HistorySearch,
)
GET_TIMELINE = Operation(
    "get_timeline",
    "GET",
    "/runs/{id}/timeline",
    "Its steps in time.",
    Timeline,
    query=TimelineQuery,
    unpack_fields=True,
)
EXPORT_RUN = Operation("export_run", "GET", "/runs/{id}/export", "All of a run, as a file.", dict[str, Any])
CANCEL_RUN = Operation(
    "cancel_run",
    "POST",
    "/runs/{id}/cancel",
    "Ask a run to stop.",
    ActionResult,
    "control",
    body=CancelOrder,
    unpack_fields=True,
)
RETRY_RUN = Operation(
    "retry_run", "POST", "/runs/{id}/retry", "Go on with a run that failed.", ActionResult, "control", body=RetryOrder
)
RESUME_RUN = Operation(
    "resume_run",
    "POST",
    "/runs/{id}/resume",
    "Replay a run that waits or is parked, with its current code.",
    ActionResult,
    "control",
)
LIST_EVENTS = Operation(
    "list_events", "GET", "/events", "Events, the newest first.", Page[EventView], query=EventSearch
)
SEND_EVENT = Operation("send_event", "POST", "/events", "Send an event.", ActionResult, "events", body=EventOrder)
GET_EVENT = Operation("get_event", "GET", "/events/{number}", "One event, and who got it.", EventDetail)
RESEND_EVENT = Operation(
    "resend_event", "POST", "/events/{number}/resend", "Send an event again, under a new id.", ActionResult, "events"
)
LIST_WAITS = Operation(
    "list_waits", "GET", "/waits", "What runs wait for.", Page[WaitView], query=WaitQuery, unpack_fields=True
)
LIST_CHANNELS = Operation("list_channels", "GET", "/channels", "Channels.", tuple[ChannelView, ...])
PUBLISH_MESSAGE = Operation(
    "publish_message",
    "POST",
    "/channels/publish",
    "Put a message on a channel.",
    ActionResult,
    "events",
    body=MessageOrder,
)
LIST_OUTBOX = Operation(
    "list_outbox",
    "GET",
    "/outbox",
    "Events on their way to others.",
    Page[OutgoingView],
    query=OutboxQuery,
    unpack_fields=True,
)
RETRY_OUTBOX = Operation(
    "retry_outbox", "POST", "/outbox/retry", "Send dead events again.", ActionResult, "control", body=OutboxOrder
)
DROP_OUTBOX = Operation(
    "drop_outbox", "POST", "/outbox/drop", "Forget dead events.", ActionResult, "control", body=OutboxOrder
)
LIST_WORKERS = Operation("list_workers", "GET", "/workers", "Workers, the newest first.", tuple[WorkerView, ...])
LIST_DEFINITIONS = Operation(
    "list_definitions", "GET", "/definitions", "Workflows as their code says.", tuple[DefinitionView, ...]
)
GET_DEFINITION = Operation("get_definition", "GET", "/definitions/{workflow}", "One workflow.", DefinitionView)
GET_STATS = Operation("get_stats", "GET", "/stats", "Throughput, latency, backlog.", StatsView)
LIST_AUDITS = Operation(
    "list_audits",
    "GET",
    "/audits",
    "Who did what, the newest first.",
    Page[AuditView],
    query=AuditQuery,
    unpack_fields=True,
)

OPERATIONS: tuple[Operation[Any], ...] = (
    LIST_RUNS,
    START_RUN,
    COUNT_RUNS,
    ACT_ON_RUNS,
    GET_RUN,
    DELETE_RUN,
    GET_HISTORY,
    GET_TIMELINE,
    EXPORT_RUN,
    CANCEL_RUN,
    RETRY_RUN,
    RESUME_RUN,
    LIST_EVENTS,
    SEND_EVENT,
    GET_EVENT,
    RESEND_EVENT,
    LIST_WAITS,
    LIST_CHANNELS,
    PUBLISH_MESSAGE,
    LIST_OUTBOX,
    RETRY_OUTBOX,
    DROP_OUTBOX,
    LIST_WORKERS,
    LIST_DEFINITIONS,
    GET_DEFINITION,
    GET_STATS,
    LIST_AUDITS,
)


def _encode(value: str | int) -> str:
    text = quote(str(value), safe="")
    # What means another place in a path is an id nevertheless: it is told from it by how it is written.
    return f"%{ord(text[0]):02X}{text[1:]}" if text in _TAKEN else text
