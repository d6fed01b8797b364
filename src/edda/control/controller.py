"""`Controller`: the interface of the viewer, the JSON API and the command line, and the table of its operations.

`LocalController` implements it on the engine of this process, `RemoteController` on the JSON API of a server. Methods
raise `NotFoundError` (`InstanceNotFoundError` for a run) if the id or number does not exist, `ArgumentError` for an
invalid request, and `ActionRefusedError` if the status of the run does not allow the action.

Each method with `@operation` is an operation of the JSON API: its routes, `RemoteController`, OpenAPI and the reference
page are derived from `OPERATIONS`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, get_type_hints
from urllib.parse import quote

from msgspec import Meta, Struct, structs

from edda.core.model import OutboxState

from . import views

PREFIX = "/_edda/api/v1"
BULK_TIMEOUT = 600.0
"""Seconds."""
_RESERVED_SEGMENTS = frozenset({"count", "bulk", ".", ".."})

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class TimelineQuery(Struct, frozen=True, forbid_unknown_fields=True):
    generation: int | None = None
    """The number of a generation, the first is 0; without it, the newest."""


class WaitQuery(Struct, frozen=True, forbid_unknown_fields=True):
    type: str | None = None
    """Only waits for events of this type."""
    cursor: str | None = None
    """`next` of the previous page."""
    limit: int = 50


class OutboxQuery(Struct, frozen=True, forbid_unknown_fields=True):
    state: Annotated[str, Meta(extra_json_schema={"enum": [*OutboxState]})] | None = None
    cursor: str | None = None
    """`next` of the previous page."""
    limit: int = 50


class AuditQuery(Struct, frozen=True, forbid_unknown_fields=True):
    cursor: str | None = None
    """`next` of the previous page."""
    limit: int = 50


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """A method of `Controller` as a request. Its arguments are the path parameters, then the query or the body."""

    name: str
    method: Literal["GET", "POST", "DELETE"]
    path: str
    """Without `PREFIX`; a segment in braces is a path parameter."""
    summary: str
    response: type[T]
    scope: Literal["view", "control", "events"]
    query: type[Struct] | None
    body: type[Struct] | None
    unpack_fields: bool
    """Each field of the query or body is an argument of its own."""
    seconds: float | None
    """Its time-out; None for the usual one of the server and of `RemoteController`."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.split("/")[1:])

    def address(self, *values: str | int) -> str:
        """The path with these values for its parameters."""
        rest = iter(values)
        parts = (_encode(next(rest)) if part.startswith("{") else part for part in self.parts)
        return "/".join(("", *parts))

    def arguments(self, values: tuple[str | int, ...], query: Struct | None, body: Struct | None) -> tuple[Any, ...]:
        given = [part for part in (query, body) if part is not None]
        return (
            *values,
            *(value for part in given for value in (structs.astuple(part) if self.unpack_fields else (part,))),
        )


def _encode(value: str | int) -> str:
    """The router compares raw segments with `/runs/count` and `/runs/bulk`, and HTTP clients resolve dot segments: the
    first character of an id that equals one of them is percent-encoded."""
    text = quote(str(value), safe="")
    return f"%{ord(text[0]):02X}{text[1:]}" if text in _RESERVED_SEGMENTS else text


OPERATIONS: list[Operation[Any]] = []


def operation(
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    summary: str,
    scope: Literal["view", "control", "events"] = "view",
    *,
    unpack: type[Struct] | None = None,
    seconds: float | None = None,
) -> Callable[[F], F]:
    """Adds a method of `Controller` to `OPERATIONS`. The record that it takes is the query of a GET, else the body;
    `unpack` is that record if its fields are the arguments."""

    def add(function: F) -> F:
        hints = get_type_hints(function)
        response = hints.pop("return")
        record = unpack or next((kind for kind in hints.values() if issubclass(kind, Struct)), None)
        query, body = (record, None) if method == "GET" else (None, record)
        is_unpacked = unpack is not None
        OPERATIONS.append(
            Operation(function.__name__, method, path, summary, response, scope, query, body, is_unpacked, seconds)
        )
        return function

    return add


class Controller(Protocol):
    # Runs

    @operation("GET", "/runs", "List runs, newest first.")
    async def list_runs(self, search: views.RunSearch) -> views.Page[views.RunView]: ...

    @operation("POST", "/runs", "Start a workflow.", "control")
    async def start_run(self, request: views.StartRequest) -> views.ActionResult: ...

    @operation("GET", "/runs/count", "Count runs by status.")
    async def count_runs(self, search: views.RunSearch) -> dict[str, int]:
        """Each status up to 10000. `search.status` is ignored: a filter shows the counts of all."""
        ...

    @operation(
        "POST",
        "/runs/bulk",
        "Cancel, retry, resume or delete many runs, or count them.",
        "control",
        seconds=BULK_TIMEOUT,
    )
    async def act_on_runs(self, request: views.BulkRequest) -> views.ActionResult: ...

    @operation("GET", "/runs/{id}", "Read one run.")
    async def get_run(self, run_id: str) -> views.RunDetail: ...

    @operation("DELETE", "/runs/{id}", "Delete a run that has ended.", "control")
    async def delete_run(self, run_id: str) -> views.ActionResult: ...

    @operation("GET", "/runs/{id}/history", "List the history entries of a run.")
    async def get_history(self, run_id: str, search: views.HistorySearch) -> views.Page[views.EntryView]: ...

    @operation("GET", "/runs/{id}/timeline", "Read the start and end of each step of a run.", unpack=TimelineQuery)
    async def get_timeline(self, run_id: str, generation: int | None = None) -> views.Timeline: ...

    async def get_run_and_timeline(
        self, run_id: str, generation: int | None = None
    ) -> tuple[views.RunDetail, views.Timeline]:
        """`get_run` and `get_timeline` for one page: what both show is read once. No operation of its own."""
        ...

    @operation("GET", "/runs/{id}/export", "Download a run with the history of every generation.")
    async def export_run(self, run_id: str) -> dict[str, Any]: ...

    @operation("POST", "/runs/{id}/cancel", "Cancel a run.", "control", unpack=views.CancelRequest)
    async def cancel_run(self, run_id: str, reason: str = "cancelled") -> views.ActionResult: ...

    @operation("POST", "/runs/{id}/retry", "Continue a run that failed or was cancelled.", "control")
    async def retry_run(self, run_id: str, request: views.RetryRequest) -> views.ActionResult: ...

    @operation("POST", "/runs/{id}/resume", "Replay a waiting or parked run with its current code.", "control")
    async def resume_run(self, run_id: str) -> views.ActionResult: ...

    # Events, channels, the outbox

    @operation("GET", "/events", "List events, newest first.")
    async def list_events(self, search: views.EventSearch) -> views.Page[views.EventView]: ...

    @operation("POST", "/events", "Send an event.", "events")
    async def send_event(self, request: views.EventRequest) -> views.ActionResult: ...

    @operation("GET", "/events/{number}", "Read one event and the runs that received it.")
    async def get_event(self, number: int) -> views.EventDetail: ...

    @operation("POST", "/events/{number}/resend", "Send an event again, under a new id.", "events")
    async def resend_event(self, number: int) -> views.ActionResult: ...

    @operation("GET", "/waits", "List the events and messages that runs wait for.", unpack=WaitQuery)
    async def list_waits(self, type: str | None, cursor: str | None, limit: int) -> views.Page[views.WaitView]: ...

    @operation("GET", "/channels", "List channels.")
    async def list_channels(self) -> tuple[views.ChannelView, ...]: ...

    @operation("POST", "/channels/publish", "Publish a message on a channel.", "events")
    async def publish_message(self, request: views.MessageRequest) -> views.ActionResult: ...

    @operation("GET", "/outbox", "List the events of the outbox, oldest first.", unpack=OutboxQuery)
    async def list_outbox(self, state: str | None, cursor: str | None, limit: int) -> views.Page[views.OutboxView]: ...

    @operation("POST", "/outbox/retry", "Send dead events again.", "control")
    async def retry_outbox(self, request: views.OutboxRequest) -> views.ActionResult: ...

    @operation("POST", "/outbox/drop", "Delete dead events.", "control")
    async def drop_outbox(self, request: views.OutboxRequest) -> views.ActionResult: ...

    # Workers, workflows, statistics, audit log

    @operation("GET", "/workers", "List workers, newest first.")
    async def list_workers(self) -> tuple[views.WorkerView, ...]: ...

    @operation("GET", "/definitions", "List workflows.")
    async def list_definitions(self) -> tuple[views.DefinitionView, ...]: ...

    @operation("GET", "/definitions/{workflow}", "Read one workflow.")
    async def get_definition(self, workflow: str) -> views.DefinitionView: ...

    @operation("GET", "/stats", "Read throughput, latency and backlog.")
    async def get_stats(self) -> views.StatsView: ...

    @operation("GET", "/audits", "List the audit log, newest first.", unpack=AuditQuery)
    async def list_audits(self, cursor: str | None, limit: int) -> views.Page[views.AuditView]: ...

    def watch(self) -> AsyncIterator[str]:
        """Yields a change token at once, then after each change, at most one per second."""
        ...
