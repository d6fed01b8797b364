"""A controller in memory with some runs; it records the requests that it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace

from edda.control.views import (
    ActionResult,
    AttemptView,
    AuditView,
    Bar,
    BarState,
    BucketView,
    BulkRequest,
    ChannelView,
    ConsumerView,
    DefinitionView,
    EntryView,
    ErrorView,
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
from edda.errors import ActionRefusedError, InstanceNotFoundError

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def a_run(id: str, status: str = "completed", words: str = "completed", **more: Any) -> RunView:
    return RunView(id, "ship", status, words, 0, NOON, **more)


WAITING = a_run("order-1", "waiting_for_event", "waits for payment.completed where order_id = A-17")
FAILED = a_run("order-2", "failed", "failed: ValueError: no stock", ended_at=after(10))
COMPLETED = a_run("order-3", ended_at=after(10))

TIMELINE = Timeline(
    0,
    NOON,
    after(10),
    (
        Bar(
            "reserve:1",
            "reserve",
            "step",
            BarState.DONE,
            NOON,
            after(4),
            (AttemptView(1, NOON, after(1), False), AttemptView(2, after(3), after(4), True)),
        ),
        Bar("payment.completed:1", "payment.completed", "event", BarState.DONE, after(4), after(7)),
        Bar("pack:1", "pack", "child", BarState.FAILED, after(7), after(9), child="pack-1"),
        Bar("undo:reserve:1", "release", "undo", BarState.DONE, after(9), after(10)),
    ),
)


class Showcase:
    def __init__(self, *runs: RunView, refuses: bool = False) -> None:
        self.runs = runs or (WAITING, FAILED, COMPLETED)
        self.refuses = refuses
        self.asked: list[Any] = []
        self.states: list[RunView] = []
        """What becomes of the first run, from one change to the next."""
        self.timeline = TIMELINE

    # Runs

    async def list_runs(self, search: RunSearch) -> Page[RunView]:
        self.asked.append(search)
        first = int(search.cursor or 0)
        found = self.runs[first : first + search.limit]
        last = first + search.limit
        return Page(found, str(last) if last < len(self.runs) else None)

    async def count_runs(self, search: RunSearch) -> dict[str, int]:
        return {}

    async def get_run(self, run_id: str) -> RunDetail:
        run = next((run for run in self.runs if run.id == run_id), None)
        if run is None:
            raise InstanceNotFoundError(f"there is no run {run_id!r}")
        error = ErrorView("ValueError", "no stock", "Traceback\n  line 1") if run.status == "failed" else None
        result = {"paid": True} if run.status == "completed" else None
        may = ("cancel",) if error is None else ("retry", "delete")
        return RunDetail(run, {"order_id": "A-17"}, result, error, may=may, from_start_only=error is not None)

    async def get_history(self, run_id: str, search: HistorySearch) -> Page[EntryView]:
        failure = ErrorView("ValueError", "no stock")
        lines = (
            EntryView(1, "step", "reserve:1", "reserve", True, after(4), value={"shelf": 3}),
            EntryView(2, "child", "pack:1", "pack", False, after(9), error=failure),
        )
        return Page(lines[1:]) if search.cursor else Page(lines[:1], "1")

    async def get_timeline(self, run_id: str, generation: int | None = None) -> Timeline:
        return self.timeline

    async def get_run_and_timeline(self, run_id: str, generation: int | None = None) -> tuple[RunDetail, Timeline]:
        return await self.get_run(run_id), await self.get_timeline(run_id, generation)

    async def export_run(self, run_id: str) -> dict[str, Any]:
        return {"detail": await self.get_run(run_id), "generations": []}

    async def start_run(self, request: StartRequest) -> ActionResult:
        return self._do(request, request.id or "new-1")

    async def cancel_run(self, run_id: str, reason: str = "cancelled") -> ActionResult:
        return self._do(("cancel", run_id, reason), run_id)

    async def retry_run(self, run_id: str, request: RetryRequest) -> ActionResult:
        return self._do(("retry", run_id, request), run_id)

    async def resume_run(self, run_id: str) -> ActionResult:
        return self._do(("resume", run_id), run_id)

    async def delete_run(self, run_id: str) -> ActionResult:
        return self._do(("delete", run_id), run_id)

    async def act_on_runs(self, request: BulkRequest) -> ActionResult:
        self.asked.append(request)
        count = len(request.ids) or len(self.runs)
        return ActionResult(True, f"{request.action}: {count} done", count)

    def _do(self, what: Any, subject: str) -> ActionResult:
        self.asked.append(what)
        if self.refuses:
            raise ActionRefusedError(f"run {subject} has ended:\nuse retry")
        return ActionResult(True, f"{subject} is done", 1, subject)

    # Events, channels, the outbox

    async def list_events(self, search: EventSearch) -> Page[EventView]:
        self.asked.append(search)
        return Page((EventView(7, "e-1", "/shop", "payment.completed", NOON),))

    async def get_event(self, number: int) -> EventDetail:
        event = EventView(number, "e-1", "/shop", "payment.completed", NOON)
        return EventDetail(event, {"subject": "A-17"}, {"amount": 3}, (ConsumerView("order-3", "ship", "pay", NOON),))

    async def send_event(self, request: EventRequest) -> ActionResult:
        return self._do(request, "e-2")

    async def resend_event(self, number: int) -> ActionResult:
        return self._do(("resend", number), "e-3")

    async def list_waits(self, type: str | None, cursor: str | None, limit: int) -> Page[WaitView]:
        return Page((WaitView("order-1", "ship", "pay", "event", "payment.completed", "payment.completed"),))

    async def list_channels(self) -> tuple[ChannelView, ...]:
        return (ChannelView("prices", 2, NOON),)

    async def publish_message(self, request: MessageRequest) -> ActionResult:
        return self._do(request, "m-1")

    async def list_outbox(self, state: str | None, cursor: str | None, limit: int) -> Page[OutboxView]:
        return Page((OutboxView(1, "o-1", "order.shipped", "/shop", "A-17", "dead", 3, NOON, reason="410 Gone"),))

    async def retry_outbox(self, request: OutboxRequest) -> ActionResult:
        return self._do(request, "o-1")

    async def drop_outbox(self, request: OutboxRequest) -> ActionResult:
        return self._do(request, "o-1")

    # The whole

    async def list_workers(self) -> tuple[WorkerView, ...]:
        return (
            WorkerView("w-1", "shop", "host", 17, NOON, after(15), True, 3),
            WorkerView("w-0", "shop", "host", 16, NOON, after(1), False, 0),
        )

    async def list_definitions(self) -> tuple[DefinitionView, ...]:
        return (await self.get_definition("ship"),)

    async def get_definition(self, workflow: str) -> DefinitionView:
        return DefinitionView(workflow, "shop", NOON, "Ships an order.")

    async def get_stats(self) -> StatsView:
        buckets = (BucketView(NOON, 5, 4, 0, 0), BucketView(after(60), 9, 8, 1, 0))
        counts = {"completed": 10_000, "failed": 1}
        return StatsView(after(120), counts, buckets, 12.0, 1500.0, 3, after(60), NOON, 1, 0, 2, None, 0, 1)

    async def list_audits(self, cursor: str | None, limit: int) -> Page[AuditView]:
        return Page((AuditView(1, NOON, "ada", "cancel", "order-2", "command line"),))

    async def watch(self) -> AsyncIterator[str]:
        await asyncio.sleep(0)
        yield "now"
        for state in self.states:
            self.runs = (state, *self.runs[1:])
            yield state.status


def with_bars(count: int) -> Timeline:
    """The timeline as it was when only so many had begun."""
    return replace(TIMELINE, bars=TIMELINE.bars[:count])
