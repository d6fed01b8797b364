"""A controller in memory over made-up data that looks like a real shop: for screenshots, and for tests of pages alone.

Its strings are plain words or, for the tests of escaping, what `make_text` returns for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from edda import WorkflowContext, activity, sleep, wait_event
from edda.control.code_graph import read_structure
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
    GenerationView,
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
from edda.core.states import ENDED
from edda.errors import InstanceNotFoundError, NotFoundError


@activity
async def validate(ctx: WorkflowContext) -> None: ...


@activity
async def reserve_stock(ctx: WorkflowContext) -> None: ...


@activity
async def charge(ctx: WorkflowContext) -> None: ...


@activity
async def hold(ctx: WorkflowContext) -> None: ...


@activity
async def ship(ctx: WorkflowContext) -> None: ...


async def order(ctx: WorkflowContext, total: int, express: bool) -> None:
    """Never run: it is there to be drawn."""
    await validate(ctx)
    await reserve_stock(ctx)
    if total > 1000:
        await hold(ctx)
        await charge(ctx)
    else:
        await charge(ctx)
    try:
        await wait_event(ctx, "payment.completed", 300)
    except TimeoutError:
        await hold(ctx)
    while not express:
        await sleep(ctx, 60)
    await ship(ctx)


TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/payments.py", line 41, in charge
    answer = await bank.charge(card, amount)
  File "/srv/shop/bank.py", line 88, in charge
    raise CardDeclined(answer.code)
shop.bank.CardDeclined: 51 (insufficient funds)"""

ORDER = {
    "order_id": "A-17",
    "customer": {"name": "Ada Lovelace", "email": "ada@example.org", "vip": True},
    "items": [{"sku": "TEA-250", "count": 2, "price": 8.4}, {"sku": "CUP-01", "count": 1, "price": 12.0}],
    "note": None,
}

PAYMENT_SCHEMA: dict[str, Any] = {
    "title": "Payment",
    "type": "object",
    "properties": {
        "order_id": {"type": "string", "title": "Order Id"},
        "amount": {"type": "number", "minimum": 0, "title": "Amount"},
        "method": {"enum": ["card", "invoice", "cash"], "type": "string", "title": "Method", "default": "card"},
        "paid_on": {"type": "string", "format": "date", "title": "Paid On"},
        "reference": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Reference"},
    },
    "required": ["order_id", "amount"],
}

DISH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "dish": {"type": "string", "title": "Dish"},
        "portions": {"type": "integer", "minimum": 1, "title": "Portions", "default": 1},
    },
    "required": ["dish"],
}

ORDER_SCHEMA: dict[str, Any] = {
    "$defs": {
        "Item": {
            "type": "object",
            "properties": {
                "sku": {"type": "string"},
                "count": {"type": "integer", "minimum": 1, "default": 1},
                "price": {"type": "number"},
            },
            "required": ["sku", "price"],
        },
        "Customer": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "email": {"type": "string", "format": "email"}},
            "required": ["name"],
        },
    },
    "type": "object",
    "properties": {
        "order_id": {"type": "string"},
        "customer": {"$ref": "#/$defs/Customer"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
        "express": {"type": "boolean", "default": False},
    },
    "required": ["order_id", "customer", "items"],
}

MakeText = Callable[[str], str]


def unchanged(text: str) -> str:
    return text


def _one_bar(line: EntryView) -> Bar:
    begin = line.at - timedelta(seconds=1)
    return Bar(line.step, line.name, "step", BarState.DONE, begin, line.at, entries=(line.seq,))


class ShowcaseController:
    """Records the actions."""

    def __init__(self, now: datetime | None = None, make_text: MakeText = unchanged, *, empty: bool = False) -> None:
        self.now = now or datetime.now(UTC)
        self.make_text = make_text
        self.empty = empty
        self.done: list[tuple[str, Any]] = []
        self.searched: list[EventSearch] = []
        self.lines = 0
        """Number of entries of every history, if it is to be long."""
        self.has_schemas = True
        self.mode = "competing"
        """Mode of the subscription."""
        self._changed = asyncio.Event()
        self.runs = [] if empty else self._make_runs()

    def change(self, **values: Any) -> None:
        """Replaces the first run, and notifies watchers."""
        self.runs[0] = msgspec.structs.replace(self.runs[0], **values)
        self._changed.set()

    def add(self, id: str) -> None:
        self.runs.insert(0, msgspec.structs.replace(self.runs[0], id=id, created_at=self.now))
        self._changed.set()

    def _ago(self, **length: float) -> datetime:
        return self.now - timedelta(**length)

    def _make_runs(self) -> list[RunView]:
        text = self.make_text
        rows: list[tuple[str, str, str, str, float, float | None]] = [
            (
                "order-A-17",
                "order",
                "waiting_for_event",
                "waits for payment.completed where order_id = A-17, 3 min of 5 min",
                180,
                None,
            ),
            ("order-A-16", "order", "running", "runs on worker shop-7c1e", 9, None),
            ("refund-2231", "refund", "compensating", "undoes what it did, on worker shop-7c1e", 41, None),
            ("order-A-15", "order", "failed", "failed: CardDeclined: 51 (insufficient funds)", 640, 12.4),
            (
                "import-2026-11",
                "import_catalogue",
                "parked",
                "is parked (tried again in 4 min): the code wants read_page, the history has parse_page",
                5400,
                None,
            ),
            ("order-A-14", "order", "completed", "completed", 900, 74.2),
            (
                "digest-daily",
                "digest",
                "waiting_for_timer",
                "sleeps until 2026-11-16 06:00:00 UTC, 7 h 3 min more",
                61000,
                None,
            ),
            ("kitchen-4", "kitchen", "waiting_for_message", "waits for a message on kitchen", 7200, None),
            ("trip-99", "trip", "waiting_for_child", "waits for its child flight-99", 333, None),
            ("flight-99", "flight", "running", "runs on worker shop-7c1e", 331, None),
            ("order-A-13", "order", "cancelled", "was cancelled: the customer changed her mind", 8000, 31),
            (
                "onboard-7f3a",
                "onboarding",
                "waiting_for_event",
                "waits for contract.signed where person = 7f3a",
                400000,
                None,
            ),
            (
                "onboard-11bc",
                "onboarding",
                "waiting_for_event",
                "waits for contract.signed where person = 11bc",
                910000,
                None,
            ),
        ]
        rows += [
            (f"order-A-{number:02}", "order", "completed", "completed", 10000 + 700 * (13 - number), 20 + 3.7 * number)
            for number in range(12, 0, -1)
        ]
        return [
            RunView(
                id=text(id),
                workflow=text(workflow),
                status=status,
                words=text(words),
                generation=3 if workflow == "digest" else 1,
                created_at=self._ago(seconds=age),
                ended_at=None if took is None else self._ago(seconds=age - took),
                due=self.now + timedelta(seconds=120) if status.startswith("waiting_for_event") else None,
                parent=text("trip-99") if workflow == "flight" else None,
                owner=text("shop-7c1e") if status == "running" else None,
            )
            for id, workflow, status, words, age, took in rows
        ]

    # Runs

    async def list_runs(self, search: RunSearch) -> Page[RunView]:
        found = [run for run in self.runs if _fits(run, search)]
        return Page(tuple(found[: search.limit]), "next" if len(found) > 20 and search.cursor is None else None)

    async def count_runs(self, search: RunSearch) -> dict[str, int]:
        counts: dict[str, int] = {}
        for run in self.runs:
            counts[run.status] = counts.get(run.status, 0) + 1
        return counts | ({"completed": 10_000} if self.runs else {})

    def _run(self, run_id: str) -> RunView:
        for run in self.runs:
            if run.id == run_id:
                return run
        raise InstanceNotFoundError(f"no run has the id {run_id!r}")

    async def get_run(self, run_id: str) -> RunDetail:
        run = self._run(run_id)
        text = self.make_text
        failed = run.status in {"failed", "parked"}
        return RunDetail(
            run,
            input={text("order"): _transform_all(ORDER, text)},
            result={text("shipped"): True, text("parcel"): text("DHL-1177")} if run.status == "completed" else None,
            error=ErrorView(text("CardDeclined"), text("51 (insufficient funds)"), text(TRACEBACK)) if failed else None,
            values={text("progress"): text("3 of 7"), text("eta"): 12} if run.status == "running" else {},
            waits=self._waits_of(run),
            generations=tuple(GenerationView(n, self._ago(days=4 - n), 12) for n in (1, 2, 3))
            if run.generation == 3
            else (GenerationView(run.generation, run.created_at, self.lines or 5),),
            children=tuple(one for one in self.runs if one.parent == run.id),
            may=("retry", "delete") if run.status in ENDED else ("cancel", "resume"),
        )

    def _waits_of(self, run: RunView) -> tuple[WaitView, ...]:
        text = self.make_text
        if run.status == "waiting_for_event":
            words = text("payment.completed where order_id = A-17")
            match = {"order_id": text("A-17")}
            return (
                WaitView(
                    run.id,
                    run.workflow,
                    text("wait_event:1"),
                    "event",
                    text("payment.completed"),
                    words,
                    match,
                    run.due,
                    PAYMENT_SCHEMA if self.has_schemas else None,
                ),
            )
        if run.status == "waiting_for_message":
            words = text("a message on kitchen")
            wait = WaitView(run.id, run.workflow, text("receive:1"), "message", text("kitchen"), words, mode=self.mode)
            return (msgspec.structs.replace(wait, schema=DISH_SCHEMA if self.has_schemas else None),)
        return ()

    async def get_history(self, run_id: str, search: HistorySearch) -> Page[EntryView]:
        behind = int(search.cursor or 0)
        lines = [line for line in self._history(self._run(run_id)) if search.step in (None, line.step)]
        rest = [line for line in lines if line.seq > behind]
        return Page(tuple(rest[: search.limit]), str(rest[search.limit - 1].seq) if rest[search.limit :] else None)

    def _history(self, run: RunView) -> tuple[EntryView, ...]:
        if self.lines:
            numbers = range(1, self.lines + 1)
            ends = {n: run.created_at + timedelta(seconds=n) for n in numbers}
            return tuple(EntryView(n, "step", f"tick:{n}", "tick", True, ends[n], value=n) for n in numbers)
        text, at = self.make_text, run.created_at
        error = ErrorView(text("ConnectionError"), text("the warehouse does not answer"), text(TRACEBACK))
        return (
            EntryView(
                1,
                "step",
                text("validate:1"),
                text("validate"),
                True,
                at + timedelta(milliseconds=40),
                input={text("order"): text("A-17")},
                value=True,
            ),
            EntryView(
                2,
                "retry",
                text("reserve_stock:1"),
                text("reserve_stock"),
                False,
                at + timedelta(seconds=1),
                1,
                error=error,
            ),
            EntryView(
                3,
                "step",
                text("reserve_stock:1"),
                text("reserve_stock"),
                True,
                at + timedelta(seconds=4),
                2,
                input=_transform_all(ORDER, text),
                value={text("shelf"): text("B-12")},
            ),
            EntryView(
                4,
                "step",
                text("charge:1"),
                text("charge"),
                run.status != "failed",
                at + timedelta(seconds=8),
                1,
                input={text("amount"): 28.8},
                value=None if run.status == "failed" else {text("receipt"): 771},
                error=ErrorView(text("CardDeclined"), text("51"), text(TRACEBACK)) if run.status == "failed" else None,
            ),
            EntryView(
                5,
                "event",
                text("wait_event:1"),
                text("payment.completed"),
                True,
                at + timedelta(seconds=30),
                event=1041,
                value=_transform_all({"order_id": "A-17", "amount": 28.8}, text),
            ),
        )

    async def get_timeline(self, run_id: str, generation: int | None = None) -> Timeline:
        run = self._run(run_id)
        if self.lines:
            return Timeline(0, run.created_at, self.now, tuple(map(_one_bar, self._history(run))))
        text, at = self.make_text, run.created_at
        end = run.ended_at or self.now
        whole = (end - at).total_seconds()

        def time_at(part: float) -> datetime:
            return at + timedelta(seconds=whole * part)

        def bar(name: str, kind: str, state: BarState, since: float, until: float | None, **more: Any) -> Bar:
            return Bar(
                text(f"{name}:1"),
                text(name),
                kind,
                state,
                time_at(since),
                None if until is None else time_at(until),
                **more,
            )

        attempts = (
            AttemptView(
                1,
                time_at(0.05),
                time_at(0.09),
                False,
                ErrorView(text("ConnectionError"), text("the warehouse does not answer"), text(TRACEBACK)),
            ),
            AttemptView(2, time_at(0.16), time_at(0.22), True),
        )
        bars = [
            bar("validate", "step", BarState.DONE, 0, 0.03, entries=(1,)),
            bar("reserve_stock", "step", BarState.DONE, 0.05, 0.22, attempts=attempts, entries=(2, 3)),
            bar(
                "charge", "step", BarState.FAILED if run.status == "failed" else BarState.DONE, 0.22, 0.35, entries=(4,)
            ),
            bar("fraud_check", "child", BarState.DONE, 0.22, 0.3, child=text("flight-99")),
        ]
        match run.status:
            case "failed":
                bars.append(bar("undo reserve_stock", "undo", BarState.DONE, 0.36, 0.5))
            case "completed":
                bars += [
                    bar("payment.completed", "event", BarState.DONE, 0.35, 0.8, entries=(5,), event=1041),
                    bar("cooling_off", "timer", BarState.OVER, 0.35, 0.6),
                    bar("ship", "step", BarState.DONE, 0.8, 1),
                ]
            case "running":
                bars.append(bar("ship", "step", BarState.RUNNING, 0.5, None))
            case _:
                bars += [
                    bar("wait_event", "event", BarState.WAITING, 0.35, None),
                    bar("reminder", "timer", BarState.WAITING, 0.4, None),
                ]
        return Timeline(generation or run.generation, at, end, tuple(bars))

    async def get_run_and_timeline(self, run_id: str, generation: int | None = None) -> tuple[RunDetail, Timeline]:
        return await self.get_run(run_id), await self.get_timeline(run_id, generation)

    async def export_run(self, run_id: str) -> dict[str, Any]:
        return {"run": self._run(run_id).id}

    async def start_run(self, request: StartRequest) -> ActionResult:
        return self._note("start", request, f"{request.workflow} was started", self.runs[0].id)

    async def cancel_run(self, run_id: str, reason: str = "cancelled") -> ActionResult:
        return self._note("cancel", (run_id, reason), "It will end as soon as its code lets it.")

    async def retry_run(self, run_id: str, request: RetryRequest) -> ActionResult:
        return self._note("retry", (run_id, request), "It goes on.")

    async def resume_run(self, run_id: str) -> ActionResult:
        return self._note("resume", run_id, "It is ready now.")

    async def delete_run(self, run_id: str) -> ActionResult:
        return self._note("delete", run_id, "It is gone.")

    async def act_on_runs(self, request: BulkRequest) -> ActionResult:
        count = len(request.ids) or len(self.runs)
        if request.count_only:
            return ActionResult(False, f"{count} runs", count)
        return self._note("bulk", request, f"{count} runs were told.")

    def _note(self, action: str, what: Any, words: str, subject: str | None = None) -> ActionResult:
        self.done.append((action, what))
        return ActionResult(True, self.make_text(words), 1, subject)

    # Events, channels, the outbox

    def _events(self) -> list[EventView]:
        text = self.make_text
        kinds = [
            ("payment.completed", "/bank"),
            ("order.placed", "/shop"),
            ("parcel.delivered", "/dhl"),
            ("contract.signed", "/people"),
        ]
        return [
            EventView(
                1041 - n,
                text(f"6f1c{n:04x}-9d"),
                text(kinds[n % 4][1]),
                text(kinds[n % 4][0]),
                self._ago(seconds=40 + n * n * 31),
                text("order-A-17") if n == 2 else None,
            )
            for n in range(0 if self.empty else 24)
        ]

    async def list_events(self, search: EventSearch) -> Page[EventView]:
        self.searched.append(search)
        return Page(tuple(self._events()), "next" if not self.empty else None)

    async def get_event(self, number: int) -> EventDetail:
        for event in self._events():
            if event.number == number:
                text = self.make_text
                consumers = (
                    ConsumerView(text("order-A-14"), text("order"), text("wait_event:1"), self._ago(minutes=2)),
                )
                attributes = {
                    text("specversion"): "1.0",
                    text("traceparent"): text("00-4bf92f3577b34da6a3ce929d0e0e4736-01"),
                }
                return EventDetail(event, attributes, _transform_all(ORDER, text), consumers if number % 2 else ())
        raise NotFoundError(f"no event has the number {number}")

    async def send_event(self, request: EventRequest) -> ActionResult:
        return self._note("send", request, f"{request.type} was sent.")

    async def resend_event(self, number: int) -> ActionResult:
        return self._note("resend", number, "It was sent again.")

    async def list_waits(self, type: str | None, cursor: str | None, limit: int) -> Page[WaitView]:
        return Page(tuple(wait for run in self.runs for wait in self._waits_of(run)))

    async def list_channels(self) -> tuple[ChannelView, ...]:
        if self.empty:
            return ()
        text = self.make_text
        return ChannelView(text("kitchen"), 3, self._ago(minutes=4)), ChannelView(text("prices"), 41, None)

    async def publish_message(self, request: MessageRequest) -> ActionResult:
        return self._note("publish", request, f"A message is on {request.channel}.")

    async def list_outbox(self, state: str | None, cursor: str | None, limit: int) -> Page[OutboxView]:
        if self.empty:
            return Page(())
        text = self.make_text
        rows = [
            ("dead", 12, "410 Gone: this receiver has moved"),
            ("pending", 3, "503 Service Unavailable"),
            ("pending", 0, None),
        ]
        return Page(
            tuple(
                OutboxView(
                    n,
                    text(f"out-{n}"),
                    text("order.shipped"),
                    text("/shop"),
                    text("A-17"),
                    state_,
                    attempts,
                    self._ago(minutes=30 - n),
                    self.now + timedelta(seconds=40) if state_ == "pending" else None,
                    text(reason) if reason else None,
                    text("order-A-14"),
                )
                for n, (state_, attempts, reason) in enumerate(rows)
                if state in {None, state_}
            )
        )

    async def retry_outbox(self, request: OutboxRequest) -> ActionResult:
        return self._note("retry_outbox", request, "They are sent again.")

    async def drop_outbox(self, request: OutboxRequest) -> ActionResult:
        return self._note("drop_outbox", request, "They are gone.")

    # Overview

    async def list_workers(self) -> tuple[WorkerView, ...]:
        if self.empty:
            return ()
        text = self.make_text
        return tuple(
            WorkerView(
                text(f"shop-7c1{n}"),
                text("shop"),
                text(f"web-{n}.internal"),
                4000 + n,
                self._ago(hours=3 + n),
                self.now + timedelta(seconds=20 if n < 2 else -300),
                n < 2,
                7 * n,
            )
            for n in range(3)
        )

    async def list_definitions(self) -> tuple[DefinitionView, ...]:
        if self.empty:
            return ()
        text = self.make_text
        return tuple(
            DefinitionView(
                text(name),
                text("shop"),
                self._ago(minutes=3),
                text(words),
                ORDER_SCHEMA,
                structure_as(text),
                name != "import_catalogue",
            )
            for name, words in [
                ("order", "Takes an order from the basket to the door.\nCharges once."),
                ("digest", "One letter a day."),
                ("import_catalogue", "Reads what suppliers send."),
            ]
        )

    async def get_definition(self, workflow: str) -> DefinitionView:
        for one in await self.list_definitions():
            if one.workflow == workflow:
                return one
        raise NotFoundError(f"no workflow is called {workflow!r}")

    async def get_stats(self) -> StatsView:
        buckets = tuple(
            BucketView(
                self._ago(minutes=60 - n),
                20 + (n * 7) % 23,
                18 + (n * 5) % 19,
                3 if n in {17, 41, 42} else 0,
                1 if n % 13 == 0 else 0,
            )
            if not self.empty
            else BucketView(self._ago(minutes=60 - n), 0, 0, 0, 0)
            for n in range(60)
        )
        counts = await self.count_runs(RunSearch())
        if self.empty:
            return StatsView(self.now, counts, buckets, None, None, 0, None, None, 0, 0, 0, None, 0, 0)
        return StatsView(
            self.now,
            counts,
            buckets,
            842.0,
            31_500.0,
            14,
            self._ago(seconds=3),
            self._ago(days=11),
            1,
            2,
            1,
            self._ago(minutes=30),
            5,
            2,
        )

    async def list_audits(self, cursor: str | None, limit: int) -> Page[AuditView]:
        if self.empty:
            return Page(())
        text = self.make_text
        return Page(
            tuple(
                AuditView(
                    n,
                    self._ago(minutes=n * 17),
                    text(who),
                    text(action),
                    text(subject),
                    text("10.0.0.7"),
                    text(details),
                )
                for n, (who, action, subject, details) in enumerate(
                    [
                        ("ops", "cancel", "order-A-13", "the customer changed her mind"),
                        ("ada", "retry", "order-A-12", ""),
                        ("ops", "send", "payment.completed", "for order-A-11"),
                    ]
                )
            )
        )

    async def watch(self) -> AsyncIterator[str]:
        number = 0
        while True:
            yield str(number)
            number += 1
            await self._changed.wait()
            self._changed.clear()


def _fits(run: RunView, search: RunSearch) -> bool:
    return (
        (not search.status or run.status in search.status)
        and (search.workflow is None or run.workflow == search.workflow)
        and (search.id is None or run.id.startswith(search.id))
        and (search.q is None or search.q.lower() in (run.id + run.words).lower())
        and (search.until is None or run.created_at < search.until)
        and (search.parent is None or run.parent == search.parent)
    )


def _transform_all(value: Any, text: MakeText) -> Any:
    match value:
        case str():
            return text(value)
        case dict():
            return {text(key): _transform_all(one, text) for key, one in value.items()}
        case list():
            return [_transform_all(one, text) for one in value]
        case _:
            return value


def structure_as(text: MakeText) -> dict[str, Any]:
    structure = read_structure(order)
    assert structure is not None
    named: dict[str, Any] = _transform_names(msgspec.to_builtins(structure), text)
    return named


def _transform_names(value: Any, text: MakeText) -> Any:
    """Kinds and ids are unchanged."""
    match value:
        case dict():
            return {
                key: text(one) if key in {"name", "label"} and one else _transform_names(one, text)
                for key, one in value.items()
            }
        case list() | tuple():
            return [_transform_names(one, text) for one in value]
        case _:
            return value
