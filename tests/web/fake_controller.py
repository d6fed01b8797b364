"""A controller without a database: a few runs and events in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from edda.control.views import (
    ActionResult,
    AuditView,
    Bar,
    BarState,
    BucketView,
    BulkRequest,
    ChannelView,
    ConsumerView,
    DefinitionView,
    EntryView,
    EventDetail,
    EventRequest,
    EventSearch,
    EventView,
    HistorySearch,
    MessageRequest,
    OutboxRequest,
    OutboxView,
    Page,
    RetryRequest,
    RunDetail,
    RunSearch,
    RunView,
    StartRequest,
    StatsView,
    Timeline,
    WaitView,
    WorkerView,
)
from edda.errors import ActionRefusedError, ArgumentError, InstanceNotFoundError, NotFoundError, UnknownWorkflowError

T = TypeVar("T")

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
ENDED = frozenset({"completed", "failed", "cancelled"})


def a_run(id: str, status: str = "waiting", workflow: str = "order") -> RunView:
    return RunView(id, workflow, status, f"is {status}", 0, NOON, NOON if status in ENDED else None)


def an_event(number: int, type: str = "order.paid") -> EventView:
    return EventView(number, f"event-{number}", "/tests", type, NOON)


@dataclass
class World:
    runs: dict[str, RunView] = field(default_factory=dict)
    events: dict[int, EventView] = field(default_factory=dict)
    audits: list[AuditView] = field(default_factory=list)
    searches: list[Any] = field(default_factory=list)
    """The searches."""
    stats: int = 0
    """Number of calls of `get_stats`."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    mark: int = 0
    watchers: int = 0
    alone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `watch` was closed."""
    error: Exception | None = None
    """Raised by every method."""

    async def touch(self) -> None:
        async with self.changed:
            self.mark += 1
            self.changed.notify_all()


class Showcase:
    def __init__(self, world: World | None = None, who: str = "local", origin: str = "") -> None:
        self.world = world or World(
            {run.id: run for run in (a_run("r-1"), a_run("r-2", "failed"), a_run("a/b?c#d é", "completed"))},
            {number: an_event(number) for number in (1, 2)},
        )
        self.who = who
        self.origin = origin

    def with_caller(self, who: str, origin: str) -> Showcase:
        return Showcase(self.world, who, origin)

    # Runs

    async def list_runs(self, search: RunSearch) -> Page[RunView]:
        self._note_search(search)
        return _page([run for run in self.world.runs.values() if _fits(run, search)], search.cursor, search.limit)

    async def count_runs(self, search: RunSearch) -> dict[str, int]:
        self._note_search(search)
        statuses = [run.status for run in self.world.runs.values()]
        return {status: statuses.count(status) for status in sorted(set(statuses))}

    async def get_run(self, run_id: str) -> RunDetail:
        return RunDetail(self._find(run_id), {"order_id": run_id}, may=("cancel",))

    async def get_history(self, run_id: str, search: HistorySearch) -> Page[EntryView]:
        self._find(run_id)
        if search.generation not in {None, 0}:
            raise NotFoundError(f"there is no generation {search.generation}")
        return Page((EntryView(1, "step", "pay:1", "pay", True, NOON, value={"paid": True}),))

    async def get_timeline(self, run_id: str, generation: int | None = None) -> Timeline:
        self._find(run_id)
        bar = Bar("pay:1", "pay", "step", BarState.DONE, NOON, NOON)
        return Timeline(generation or 0, NOON, NOON, (bar,))

    async def get_run_and_timeline(self, run_id: str, generation: int | None = None) -> tuple[RunDetail, Timeline]:
        return await self.get_run(run_id), await self.get_timeline(run_id, generation)

    async def export_run(self, run_id: str) -> dict[str, Any]:
        return {"detail": msgspec.json.decode(msgspec.json.encode(await self.get_run(run_id))), "generations": []}

    async def start_run(self, request: StartRequest) -> ActionResult:
        if request.workflow != "order":
            raise UnknownWorkflowError(f"this process has no workflow {request.workflow!r}")
        if "order_id" not in request.input:
            raise ArgumentError("order: missing order_id")
        run = a_run(request.id or f"r-{len(self.world.runs) + 1}", "running")
        self.world.runs[run.id] = run
        return await self._note("start", run.id, "started")

    async def cancel_run(self, run_id: str, reason: str = "cancelled") -> ActionResult:
        if self._find(run_id).status in ENDED:
            raise ActionRefusedError("the run has ended already")
        self.world.runs[run_id] = a_run(run_id, "cancelled")
        return await self._note("cancel", run_id, reason)

    async def retry_run(self, run_id: str, request: RetryRequest) -> ActionResult:
        if self._find(run_id).status not in {"failed", "cancelled"}:
            raise ActionRefusedError("only a run that failed or was cancelled can be retried")
        self.world.runs[run_id] = a_run(run_id, "running")
        return await self._note("retry", run_id, f"from_start={request.from_start}")

    async def resume_run(self, run_id: str) -> ActionResult:
        self._find(run_id)
        return await self._note("resume", run_id, "resumed")

    async def delete_run(self, run_id: str) -> ActionResult:
        if self._find(run_id).status not in ENDED:
            raise ActionRefusedError("the run has not ended: cancel it first")
        del self.world.runs[run_id]
        return await self._note("delete", run_id, "deleted")

    async def act_on_runs(self, request: BulkRequest) -> ActionResult:
        if request.action not in {"cancel", "retry", "resume", "delete"}:
            raise ArgumentError("action: expected cancel, retry, resume or delete")
        found = [run for run in self.world.runs.values() if run.id in request.ids or _fits_order(run, request)]
        if request.count_only:
            return ActionResult(False, "counted", len(found))
        return await self._note(f"bulk {request.action}", f"{len(found)} runs", "done")

    # Events, channels, the outbox

    async def list_events(self, search: EventSearch) -> Page[EventView]:
        self._note_search(search)
        wanted = [event for event in self.world.events.values() if search.type in {None, event.type}]
        return _page(wanted, search.cursor, search.limit)

    async def get_event(self, number: int) -> EventDetail:
        consumer = ConsumerView("r-1", "order", "wait:1", NOON)
        return EventDetail(self._event(number), {"specversion": "1.0"}, {"amount": 3}, (consumer,))

    async def send_event(self, request: EventRequest) -> ActionResult:
        if not request.type:
            raise ArgumentError("type: expected some text")
        event = an_event(len(self.world.events) + 1, request.type)
        self.world.events[event.number] = event
        return await self._note("send", event.id, request.type)

    async def resend_event(self, number: int) -> ActionResult:
        return await self.send_event(EventRequest(self._event(number).type))

    async def list_waits(self, type: str | None, cursor: str | None, limit: int) -> Page[WaitView]:
        self._note_search((type, cursor, limit))
        return Page((WaitView("r-1", "order", "wait:1", "event", "order.paid", "waits", {"order_id": "A"}),))

    async def list_channels(self) -> tuple[ChannelView, ...]:
        return (ChannelView("prices", 2, NOON),)

    async def publish_message(self, request: MessageRequest) -> ActionResult:
        if not request.channel:
            raise ArgumentError("channel: expected some text")
        return await self._note("publish", "m-1", request.channel)

    async def list_outbox(self, state: str | None, cursor: str | None, limit: int) -> Page[OutboxView]:
        if state not in {None, "pending", "dead"}:
            raise ArgumentError("state: expected pending or dead")
        self._note_search((state, cursor, limit))
        return Page((OutboxView(1, "o-1", "order.placed", "/shop", "", "dead", 3, NOON, reason="410"),))

    async def retry_outbox(self, request: OutboxRequest) -> ActionResult:
        return await self._note("retry outbox", ",".join(request.ids), "again")

    async def drop_outbox(self, request: OutboxRequest) -> ActionResult:
        return await self._note("drop outbox", ",".join(request.ids), "dropped")

    # Overview

    async def list_workers(self) -> tuple[WorkerView, ...]:
        return (WorkerView("w-1", "shop", "host", 7, NOON, NOON, True, 2),)

    async def list_definitions(self) -> tuple[DefinitionView, ...]:
        return (DefinitionView("order", "shop", NOON, can_start=True),)

    async def get_definition(self, workflow: str) -> DefinitionView:
        if workflow != "order":
            raise NotFoundError(f"no process has told of a workflow {workflow!r}")
        return (await self.list_definitions())[0]

    async def get_stats(self) -> StatsView:
        self.world.stats += 1
        if self.world.error is not None:
            raise self.world.error
        counts = await self.count_runs(RunSearch())
        bucket = BucketView(NOON, 1, 0, 0, 0)
        return StatsView(NOON, counts, (bucket,), 12.5, None, 1, NOON.replace(hour=11), None, 0, 2, 1, None, 0, 1)

    async def list_audits(self, cursor: str | None, limit: int) -> Page[AuditView]:
        return _page(self.world.audits[::-1], cursor, limit)

    async def watch(self) -> AsyncIterator[str]:
        self.world.watchers += 1
        try:
            while True:
                seen = self.world.mark
                yield f"mark-{seen}"
                await self._until_after(seen)
        finally:
            self.world.watchers -= 1
            if not self.world.watchers:
                self.world.alone.set()

    async def _until_after(self, mark: int) -> None:
        async with self.world.changed:
            await self.world.changed.wait_for(lambda: self.world.mark != mark)

    # Within

    def _note_search(self, search: Any) -> None:
        if self.world.error is not None:
            raise self.world.error
        self.world.searches.append(search)

    async def _note(self, action: str, subject: str, details: str) -> ActionResult:
        number = len(self.world.audits) + 1
        self.world.audits.append(AuditView(number, NOON, self.who, action, subject, self.origin, details))
        await self.world.touch()
        return ActionResult(True, details, 1, subject)

    def _find(self, run_id: str) -> RunView:
        if run_id not in self.world.runs:
            raise InstanceNotFoundError(f"no run has the id {run_id!r}")
        return self.world.runs[run_id]

    def _event(self, number: int) -> EventView:
        if number not in self.world.events:
            raise NotFoundError(f"there is no event {number}")
        return self.world.events[number]


def _fits(run: RunView, search: RunSearch) -> bool:
    return (not search.status or run.status in search.status) and search.workflow in {None, run.workflow}


def _fits_order(run: RunView, request: BulkRequest) -> bool:
    return request.search is not None and _fits(run, request.search)


def _page(found: list[T], cursor: str | None, limit: int) -> Page[T]:
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
        raise ArgumentError("cursor: expected what the page before gave as next")
    begin = int(cursor or 0)
    more = len(found) > begin + limit
    return Page(tuple(found[begin : begin + limit]), str(begin + limit) if more else None)
