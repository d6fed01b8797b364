"""`LocalController` on every database."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from edda import (
    EddaApp,
    RetryPolicy,
    RunStatus,
    WorkflowContext,
    activity,
    publish,
    receive,
    sleep,
    subscribe,
    wait_event,
    workflow,
)
from edda.control.controller import Controller
from edda.control.local import STORAGE_CHANGES, LocalController
from edda.control.views import (
    BulkRequest,
    EventRequest,
    EventSearch,
    HistorySearch,
    MessageRequest,
    OutboxRequest,
    RetryRequest,
    RunSearch,
    StartRequest,
)
from edda.core.codec import Codec
from edda.errors import ActionRefusedError, ArgumentError, InstanceNotFoundError, NotFoundError
from edda.storage.ports import Storage
from tests.engine.conditions import until, until_status
from tests.engine.conftest import MakeApp

from .test_payloads import Mask

ONCE = RetryPolicy(max_attempts=1)


class Payment(BaseModel):
    order_id: str
    amount: int


@activity(retry_policy=ONCE)
async def refuse(ctx: WorkflowContext) -> None:
    raise ValueError("not today")


def a_shop() -> Any:
    @workflow
    async def order(ctx: WorkflowContext, order_id: str, password: str = "p", due: date | None = None) -> str:
        """Sell one thing.

        And say so.
        """
        ctx.set("stage", {"at": "payment", "token": "t"})
        paid = await wait_event(ctx, "payment.completed", 300, model=Payment, match={"order_id": order_id})
        return f"{paid.data.amount} for {order_id}"

    return order


def a_failure() -> Any:
    @workflow
    async def fail(ctx: WorkflowContext, number: int = 0) -> None:
        await refuse(ctx)

    return fail


def control_of(app: EddaApp) -> LocalController:
    controller: Controller = app.control  # all of it is there
    assert controller is app.control
    return app.control


async def waiting_order(app: EddaApp, order_id: str = "A-17") -> str:
    run_id = await app.start(a_shop(), order_id)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    return run_id


async def test_a_waiting_run_shows_its_wait_and_receives_an_event(app: EddaApp) -> None:
    control = control_of(app)
    run_id = await waiting_order(app)

    async def has_form() -> bool:
        return (await control.get_run(run_id)).waits[0].schema is not None

    await until(has_form, "the form of the event is known")
    detail = await control.get_run(run_id)
    assert detail.run.words.startswith("waits for payment.completed where order_id = A-17, ")
    assert detail.run.words.endswith(" of 5 min")
    assert detail.input == {"order_id": "A-17", "password": "•••", "due": None}
    assert detail.values == {"stage": {"at": "payment", "token": "•••"}}
    assert detail.may == ("cancel", "resume")
    (wait,) = detail.waits
    assert (wait.kind, wait.type, wait.match) == ("event", "payment.completed", {"order_id": "A-17"})
    assert wait.schema is not None
    assert wait.schema["properties"]["amount"]["type"] == "integer"
    (listed,) = (await control.list_waits(None, None, 10)).items
    assert listed.schema == wait.schema

    timeline = await control.get_timeline(run_id)
    assert [(bar.kind, bar.state) for bar in timeline.bars] == [("event", "waiting")]
    done = await control.send_event(
        EventRequest("payment.completed", data={"order_id": "A-17", "amount": 5}, target=run_id)
    )
    assert done.done
    assert await app.handle(run_id).result(timeout=20) == "5 for A-17"
    detail = await control.get_run(run_id)
    assert (detail.result, detail.run.status, detail.waits, detail.may) == ("5 for A-17", "completed", (), ("delete",))
    assert detail.run.words.startswith("completed in ")
    (entry,) = (await control.get_history(run_id, HistorySearch())).items
    assert entry.value["data"] == {"order_id": "A-17", "amount": 5}
    assert entry.event is not None
    event = await control.get_event(entry.event)
    assert (event.data, [consumer.run_id for consumer in event.consumers]) == (entry.value["data"], [run_id])
    exported = await control.export_run(run_id)
    assert msgspec.json.decode(msgspec.json.encode(exported))["histories"]["0"][0]["kind"] == "event"


async def test_the_run_and_its_timeline_are_read_together_without_reading_anything_twice(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, run_id = control_of(app), await waiting_order(app)
    reads: list[str] = []

    def recorded(name: str) -> Any:
        method, task = getattr(app.engine.storage, name), asyncio.current_task()

        async def read(*args: Any, **options: Any) -> Any:
            if asyncio.current_task() is task:  # not those of the worker
                reads.append(name)
            return await method(*args, **options)

        return read

    for name in ("get", "now", "generations", "history", "waits", "event_schemas", "run_values", "search"):
        monkeypatch.setattr(app.engine.storage, name, recorded(name))
    detail, timeline = await control.get_run_and_timeline(run_id)
    assert sorted(reads) == sorted({*reads})
    assert len(reads) == 8
    assert (detail.run.id, [bar.state for bar in timeline.bars]) == (run_id, ["waiting"])
    assert "waits for payment.completed" in detail.run.words


async def test_a_run_that_an_event_started_is_one_of_its_consumers(app: EddaApp) -> None:
    @workflow(event_handler=True, name="order.placed")
    async def place(ctx: WorkflowContext, amount: int) -> None: ...

    @workflow
    async def wait(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "order.placed")

    waiting = await app.start(wait)
    await until_status(app, waiting, RunStatus.WAITING_FOR_EVENT)
    await app.send_event("order.placed", "/shop", {"amount": 3})
    await app.handle(waiting).result(timeout=20)
    (event,) = (await app.control.list_events(EventSearch())).items
    consumers = (await app.control.get_event(event.number)).consumers
    assert [(one.workflow, one.step) for one in consumers] == [("order.placed", ""), ("wait", "order.placed:1")]
    assert (await app.control.get_run(consumers[0].run_id)).input == {"amount": 3}


async def test_a_history_comes_in_pages_and_by_step(app: EddaApp) -> None:
    control = control_of(app)

    @activity
    async def count(ctx: WorkflowContext, number: int) -> int:
        return number

    @workflow
    async def counting(ctx: WorkflowContext) -> None:
        for number in range(60):
            await count(ctx, number)
        await wait_event(ctx, "enough", 300)

    run_id = await app.start(counting)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    assert (await control.get_run(run_id)).run.words.endswith("of 5 min")
    page = await control.get_history(run_id, HistorySearch(limit=40))
    rest = await control.get_history(run_id, HistorySearch(cursor=page.next, limit=40))
    assert [entry.value for entry in (*page.items, *rest.items)] == list(range(60))
    assert rest.next is None
    (chosen,) = (await control.get_history(run_id, HistorySearch(step="count:7"))).items
    assert (chosen.step, chosen.value) == ("count:7", 6)
    assert len((await control.export_run(run_id))["histories"]["0"]) == 60
    with pytest.raises(InstanceNotFoundError):
        await control.get_history("nobody", HistorySearch())
    with pytest.raises(NotFoundError, match="no generation 7"):
        await control.get_history(run_id, HistorySearch(7))
    with pytest.raises(ArgumentError, match="cursor"):
        await control.get_history(run_id, HistorySearch(cursor="x"))


async def test_a_run_that_retries_a_step_shows_the_error(app: EddaApp) -> None:
    @activity(retry_policy=RetryPolicy(initial_interval=3600))
    async def call(ctx: WorkflowContext, password: str) -> None:
        raise ConnectionError(f"no answer to {password}")

    @workflow
    async def fetch(ctx: WorkflowContext, password: str) -> None:
        await call(ctx, password)

    run_id = await app.start(fetch, "hunter2")
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    words = (await control_of(app).get_run(run_id)).run.words
    assert words.startswith("tries call:1 again in ")
    assert words.endswith(": ConnectionError: no answer to •••")


async def test_a_failed_run_shows_its_error_and_is_tried_again(app: EddaApp) -> None:
    control = control_of(app)
    run_id = await app.start(a_failure())
    await until_status(app, run_id, RunStatus.FAILED)
    detail = await control.get_run(run_id)
    assert detail.error is not None
    assert "not today" in detail.error.message
    assert "not today" in detail.run.words
    assert detail.may == ("retry", "delete")
    assert not detail.from_start_only
    assert (await control.retry_run(run_id, RetryRequest())).done
    await until_status(app, run_id, RunStatus.FAILED)
    detail = await control.get_run(run_id)
    assert [one.number for one in detail.generations] == [0, 1]
    assert detail.run.generation == 1
    assert len((await control.get_history(run_id, HistorySearch(0))).items) == 1
    assert (await control.get_timeline(run_id, 0)).bars[0].state == "failed"
    with pytest.raises(NotFoundError):
        await control.get_timeline(run_id, 7)
    await control.delete_run(run_id)
    with pytest.raises(InstanceNotFoundError):
        await control.get_run(run_id)


async def test_runs_are_listed_counted_and_found_by_input(app: EddaApp) -> None:
    control, fail = control_of(app), a_failure()
    runs = [await app.start(fail, number) for number in range(5)]
    for run_id in runs:
        await until_status(app, run_id, RunStatus.FAILED)
    waiting = await waiting_order(app)

    first = await control.list_runs(RunSearch(limit=4))
    rest = await control.list_runs(RunSearch(limit=4, cursor=first.next))
    assert rest.next is None
    assert {run.id for run in (*first.items, *rest.items)} == {*runs, waiting}
    assert len(first.items) + len(rest.items) == 6
    assert await control.count_runs(RunSearch(status=("failed",))) == {"failed": 5, "waiting_for_event": 1}

    async def ids(**wanted: Any) -> list[str]:
        return [run.id for run in (await control.list_runs(RunSearch(**wanted))).items]

    assert await ids(status=("waiting",)) == [waiting]
    assert await ids(workflow="order") == [waiting]
    assert await ids(id=waiting[:12], status=("open",)) == [waiting]
    assert await ids(q="a-17") == [waiting]
    assert await ids(input=("number=3",)) == [runs[3]]
    assert await ids(input=("order_id=A-17",)) == [waiting]
    assert await ids(input=("order_id=A-17", "number=3")) == []
    assert await ids(until=datetime.now(UTC) - timedelta(hours=1)) == []
    assert await control.count_runs(RunSearch(input=("number=3",))) == {"failed": 1}
    page = await control.list_runs(RunSearch(input=("order_id=A-17",), limit=1))
    assert [run.id for run in page.items] == [waiting]
    for search in (RunSearch(input=("password=p",)), RunSearch(input=("password=wrong",))):
        with pytest.raises(ArgumentError, match="input password: its value is redacted"):
            await control.list_runs(search)


@pytest.mark.parametrize(
    "search",
    [
        {"status": ("asleep",)},
        {"limit": 0},
        {"limit": 201},
        {"cursor": "x"},
        {"cursor": "٣:x"},
        {"input": ("x",)},
        {"since": datetime(2026, 1, 1)},
    ],
)
async def test_a_search_that_makes_no_sense_is_refused(app: EddaApp, search: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        await control_of(app).list_runs(RunSearch(**search))
    with pytest.raises(ArgumentError):
        await control_of(app).count_runs(RunSearch(**search))


async def test_a_run_is_started_from_json_by_the_signature_of_its_workflow(app: EddaApp) -> None:
    control = control_of(app)
    a_shop()
    done = await control.start_run(StartRequest("order", {"order_id": "B", "due": "2026-11-15"}, id="my-run"))
    assert (done.subject, (await control.get_run("my-run")).input["due"]) == ("my-run", "2026-11-15")
    with pytest.raises(ArgumentError) as refused:
        await control.start_run(StartRequest("order", {"due": "soon", "colour": "red"}))
    for field in ("order_id: is required", "due: ", "colour: "):
        assert field in str(refused.value)
    with pytest.raises(NotFoundError, match="known here: order"):
        await control.start_run(StartRequest("nothing"))
    with pytest.raises(ArgumentError):
        await control.start_run(StartRequest("order", {"order_id": "B"}, id="x" * 300))


async def test_without_the_code_runs_cannot_start_but_can_be_cancelled(make_app: MakeApp) -> None:
    a_shop()
    app = await make_app()
    run_id = await waiting_order(app)
    control = control_of(await make_app(service_name="looker", worker=False, workflows=()))

    async def is_described() -> bool:
        return bool(await control.list_definitions())

    await until(is_described, "the workflow is described")
    described = await control.get_definition("order")
    assert (described.documentation, described.can_start) == ("Sell one thing.", False)
    assert described.schema is not None
    assert described.schema["required"] == ["order_id"]
    assert described.structure is not None
    with pytest.raises(ActionRefusedError, match="does not have the code"):
        await control.start_run(StartRequest("order", {"order_id": "B"}))
    await control.cancel_run(run_id, "no more")
    await until_status(app, run_id, RunStatus.CANCELLED)
    assert (await control.get_run(run_id)).run.words == "was cancelled: no more"
    with pytest.raises(NotFoundError):
        await control.get_definition("nothing")


async def test_many_runs_are_acted_on_at_once_after_they_were_counted(app: EddaApp) -> None:
    control, shop = control_of(app), a_shop()
    runs = [await app.start(shop, f"A-{number}") for number in range(5)]
    for run_id in runs:
        await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    search = RunSearch(workflow="order", status=("waiting_for_event",))
    counted = await control.act_on_runs(BulkRequest("cancel", search=search, count_only=True))
    assert (counted.done, counted.count) == (False, 5)
    done = await control.act_on_runs(BulkRequest("cancel", ids=(runs[0], runs[0], "nobody"), reason="enough"))
    assert (done.count, "1 run refused" in done.words) == (1, True)
    await until_status(app, runs[0], RunStatus.CANCELLED)
    done = await control.act_on_runs(BulkRequest("cancel", search=search))
    assert done.count == 4
    for run_id in runs:
        await until_status(app, run_id, RunStatus.CANCELLED)
    retried = await control.act_on_runs(BulkRequest("retry", search=RunSearch(status=("cancelled",))))
    assert retried.count == 5
    for run_id in runs:
        await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    for order in (
        BulkRequest("explode", ids=("a",)),
        BulkRequest("cancel"),
        BulkRequest("cancel", ids=("a",), search=search),
        BulkRequest("cancel", ids=("a",) * 1001),
    ):
        with pytest.raises(ArgumentError):
            await control.act_on_runs(order)


async def test_every_action_has_an_audit_row_with_author_and_origin(app: EddaApp) -> None:
    control = control_of(app).with_caller("ann", "10.0.0.1")
    a_shop()
    started = await control.start_run(StartRequest("order", {"order_id": "A", "password": "s3cr3t"}))
    run_id = started.subject or ""
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await control.cancel_run(run_id, "enough")
    await until_status(app, run_id, RunStatus.CANCELLED)
    with pytest.raises(ActionRefusedError):
        await control.resume_run(run_id)
    await control.retry_run(run_id, RetryRequest())
    with pytest.raises(ActionRefusedError):
        await control.delete_run(run_id)
    await control.send_event(EventRequest("news", data={"token": "s3cr3t"}))
    await control.retry_outbox(OutboxRequest(every=True))
    await control.drop_outbox(OutboxRequest(every=True))
    page = await control.list_audits(None, 100)
    assert [audit.action for audit in reversed(page.items)] == [
        "start",
        "cancel",
        "retry",
        "send event",
        "retry outbox",
        "drop outbox",
    ]
    assert {(audit.who, audit.origin) for audit in page.items} == {("ann", "10.0.0.1")}
    assert not any("s3cr3t" in audit.details for audit in page.items)
    assert sum("•••" in audit.details for audit in page.items) == 2
    assert '"reason":"enough"' in page.items[-2].details
    first = await control.list_audits(None, 2)
    second = await control.list_audits(first.next, 100)
    assert (*first.items, *second.items) == page.items


async def test_events_are_listed_sent_and_sent_again(app: EddaApp) -> None:
    control = control_of(app)
    for number in range(3):
        await control.send_event(EventRequest("news", data={"number": number}, id=f"n{number}", subject="s"))
    first = await control.list_events(EventSearch(type="news", limit=2))
    rest = await control.list_events(EventSearch(type="news", limit=2, cursor=first.next))
    assert [event.id for event in (*first.items, *rest.items)] == ["n2", "n1", "n0"]
    again = await control.resend_event(first.items[0].number)
    newest = (await control.list_events(EventSearch(limit=1))).items[0]
    assert newest.id == again.subject != "n2"
    detail = await control.get_event(newest.number)
    assert (detail.data, detail.attributes["subject"]) == ({"number": 2}, "s")
    with pytest.raises(ArgumentError):
        await control.send_event(EventRequest(""))
    with pytest.raises(NotFoundError):
        await control.get_event(999_999)


async def test_channels_and_their_messages_are_shown(app: EddaApp) -> None:
    control = control_of(app)

    @workflow
    async def reader(ctx: WorkflowContext) -> Any:
        await subscribe(ctx, "news")
        first = await receive(ctx, "news")
        return [first.data, (await receive(ctx, "news")).data]

    run_id = await app.start(reader)
    await until_status(app, run_id, RunStatus.WAITING_FOR_MESSAGE)
    assert [(one.name, one.waiting) for one in await control.list_channels()] == [("news", 1)]
    await publish(app, "news", "hello")
    (message,) = (await control.list_events(EventSearch(messages=True))).items
    assert (await control.get_event(message.number)).data == "hello"
    await control.resend_event(message.number)
    assert await app.handle(run_id).result(timeout=20) == ["hello", "hello"]
    assert [one.newest is not None for one in await control.list_channels()] == [True]


async def test_a_message_is_published_to_everybody_or_to_one_run(app: EddaApp) -> None:
    control = control_of(app)

    @workflow
    async def reader(ctx: WorkflowContext) -> Any:
        await subscribe(ctx, "news")
        await subscribe(ctx, "whispers", "direct")
        return [(await receive(ctx, channel, model=Payment)).data.amount for channel in ("news", "whispers")]

    run_id = await app.start(reader)
    await until_status(app, run_id, RunStatus.WAITING_FOR_MESSAGE)

    async def has_form() -> bool:
        return (await control.get_run(run_id)).waits[0].schema is not None

    await until(has_form, "the form is known")
    (wait,) = (await control.get_run(run_id)).waits
    assert wait.schema is not None
    assert (wait.type, wait.mode, list(wait.schema["properties"])) == ("news", "broadcast", ["order_id", "amount"])
    await control.publish_message(MessageRequest("news", {"order_id": "A", "amount": 1}))

    async def is_addressed() -> bool:
        return [wait.mode for wait in (await control.get_run(run_id)).waits] == ["direct"]

    await until(is_addressed, "it waits for what is sent to it alone")
    done = await control.publish_message(MessageRequest("whispers", {"order_id": "A", "amount": 2}, target=run_id))
    assert await app.handle(run_id).result(timeout=20) == [1, 2]
    (audit, _) = (await control.list_audits(None, 2)).items
    assert (audit.action, audit.subject) == ("publish message", done.subject)
    with pytest.raises(ActionRefusedError, match="receives nothing any more"):
        await control.publish_message(MessageRequest("whispers", target=run_id))
    with pytest.raises(ActionRefusedError, match="has ended"):
        await control.send_event(EventRequest("payment.completed", target=run_id))
    with pytest.raises(InstanceNotFoundError, match="nobody"):
        await control.send_event(EventRequest("payment.completed", target="nobody"))
    with pytest.raises(InstanceNotFoundError):
        await control.publish_message(MessageRequest("whispers", target="nobody"))
    with pytest.raises(ArgumentError, match="channel"):
        await control.publish_message(MessageRequest(""))


async def test_stats_are_counted(app: EddaApp) -> None:
    control = control_of(app)
    empty = await control.get_stats()
    assert (empty.counts, empty.median_ms, empty.workers) == ({}, None, 1)
    await waiting_order(app)
    failed = await app.start(a_failure())
    await until_status(app, failed, RunStatus.FAILED)
    stats = await control.get_stats()
    assert stats.counts == {"waiting_for_event": 1, "failed": 1}
    assert (sum(bucket.started for bucket in stats.buckets), len(stats.buckets)) == (2, 60)
    assert stats.oldest_wait is not None
    assert stats.median_ms is not None
    (worker,) = await control.list_workers()
    assert (worker.service, worker.is_alive) == ("test", True)


async def test_a_parent_shows_its_children(app: EddaApp) -> None:
    @workflow
    async def child(ctx: WorkflowContext) -> None:
        await sleep(ctx, 3600)

    @workflow
    async def parent(ctx: WorkflowContext) -> None:
        await child.run()

    run_id = await app.start(parent)
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    detail = await control_of(app).get_run(run_id)
    assert [(one.workflow, one.parent) for one in detail.children] == [("child", run_id)]
    assert detail.run.words == "waits for its child child:1"
    (bar,) = (await control_of(app).get_timeline(run_id)).bars
    assert (bar.kind, bar.child) == ("child", detail.children[0].id)


async def test_without_the_key_payloads_are_shown_as_encrypted(app: EddaApp, make_app: MakeApp) -> None:
    await app.shutdown(grace=0.0)
    owner = await make_app(codec=Codec(transform=Mask()))
    run_id = await waiting_order(owner)
    looker = await make_app(worker=False, workflows=())
    detail = await control_of(looker).get_run(run_id)
    assert "encrypted" in str(detail.input)
    assert "A-17" not in msgspec.json.encode(await control_of(looker).export_run(run_id)).decode()
    assert (await control_of(owner).get_run(run_id)).input["order_id"] == "A-17"


async def test_watchers_get_changes_and_without_them_there_is_no_query(app: EddaApp) -> None:
    control = control_of(app)

    def is_polling() -> bool:
        return control._changes._polling is not None

    assert not is_polling()

    async def read_two(tokens: list[str]) -> None:
        async with aclosing(control.watch()) as feed:
            async for token in feed:
                tokens.append(token)
                if len(tokens) == 2:
                    break

    read: list[list[str]] = [[], []]
    watchers = [asyncio.create_task(read_two(tokens)) for tokens in read]
    await until(lambda: all(read), "each watcher has the first token")
    assert is_polling()
    await control.send_event(EventRequest("news"))
    await asyncio.wait_for(asyncio.gather(*watchers), 20)
    for first, second in read:
        assert first != second
    assert not is_polling()


def test_the_calls_whose_outcome_may_be_unknown_are_methods_of_the_storage() -> None:
    assert [name for name in STORAGE_CHANGES if not hasattr(Storage, name)] == []


async def test_one_run_is_shown_with_its_whole_reason(app: EddaApp) -> None:
    """Lists cut it; what the reader should do stands at its end."""

    @workflow
    async def long_reason(ctx: WorkflowContext) -> None:
        raise ValueError("x" * 1_000 + " and then call the bank")

    run_id, control = await long_reason.start(), control_of(app)
    await until_status(app, run_id, RunStatus.FAILED)
    (listed,) = [run for run in (await control.list_runs(RunSearch())).items if run.id == run_id]
    assert len(listed.words) <= 300
    assert (await control.get_run(run_id)).run.words.endswith("and then call the bank")
