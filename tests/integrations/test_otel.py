"""Traces: one span for each attempt of a step, in one trace for each run, carried on by events."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from edda import (
    EddaApp,
    ReceivedEvent,
    RetryPolicy,
    TerminalError,
    WorkflowContext,
    activity,
    send_event,
    send_event_transactional,
    sleep,
    wait_event,
    workflow,
)
from edda.cloudevents import json_format
from edda.integrations.otel import TracingHooks, trace_of
from tests.conftest import Database, MakeDatabase
from tests.engine.conditions import until
from tests.engine.conftest import MakeApp


@pytest.fixture(params=("memory", "sqlite"))
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    """Which database it is makes no difference to traces."""
    return make_database(request.param)


class Tracing:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def only(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def tracing() -> Tracing:
    return Tracing()


def facts(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("edda."): value for name, value in (span.attributes or {}).items()}


def context_of(span: ReadableSpan) -> trace.SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def traceparent(span: ReadableSpan) -> str:
    context = context_of(span)
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-01"


@activity
async def charge(ctx: WorkflowContext, amount: int) -> int:
    return amount


async def run(app: EddaApp, workflow: Any, *args: Any) -> Any:
    result = await app.run(workflow.options(id="order-1"), *args)
    await app.shutdown()
    return result


async def test_each_step_is_a_span_in_the_trace_of_its_run(make_app: MakeApp, tracing: Tracing) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await charge(ctx, 1) + await charge(ctx, 2)

    await run(await make_app(hooks=TracingHooks(tracing.provider)), order)
    assert tracing.names == ["order started", "charge", "charge", "order completed"]
    assert [facts(span) for span in tracing.named("charge")] == [
        {"run_id": "order-1", "workflow": "order", "step": "charge:1", "attempt": 1},
        {"run_id": "order-1", "workflow": "order", "step": "charge:2", "attempt": 1},
    ]
    assert facts(tracing.only("order completed")) == {"run_id": "order-1", "workflow": "order"}
    assert {context_of(span).trace_id for span in tracing.spans} == {trace_of("order-1").trace_id}


async def test_a_replay_makes_no_spans(make_app: MakeApp, tracing: Tracing) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx, 1)
        await sleep(ctx, 0.02)
        await charge(ctx, 2)
        await sleep(ctx, 0.02)

    await run(await make_app(hooks=TracingHooks(tracing.provider)), order)
    assert tracing.names == ["order started", "charge", "charge", "order completed"]


async def test_each_attempt_has_its_own_span_and_its_error(make_app: MakeApp, tracing: Tracing) -> None:
    @activity(retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=3))
    async def fail(ctx: WorkflowContext) -> None:
        raise ValueError(f"attempt {ctx.attempt}")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await fail(ctx)

    app = await make_app(hooks=TracingHooks(tracing.provider))
    with pytest.raises(Exception, match="failed 3 times"):
        await run(app, order)
    await app.shutdown()
    spans = tracing.named("fail")
    assert [facts(span)["attempt"] for span in spans] == [1, 2, 3]
    assert [span.status.description for span in spans] == ["attempt 1", "attempt 2", "attempt 3"]
    assert {span.status.status_code for span in spans} == {StatusCode.ERROR}
    assert [(event.attributes or {})["exception.type"] for span in spans for event in span.events] == ["ValueError"] * 3
    assert len({(span.parent.span_id if span.parent else 0) for span in spans}) == 1
    assert tracing.only("order failed").status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("is_async", [True, False], ids=["on the loop", "in a thread"])
async def test_what_a_body_traces_itself_is_below_its_step(make_app: MakeApp, tracing: Tracing, is_async: bool) -> None:
    @activity
    async def on_loop(ctx: WorkflowContext) -> None:
        tracing.tracer.start_span("inside").end()

    @activity
    def in_thread(ctx: WorkflowContext) -> None:
        tracing.tracer.start_span("inside").end()

    step = on_loop if is_async else in_thread

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await step(ctx)

    await run(await make_app(hooks=TracingHooks(tracing.provider)), order)
    inside = tracing.only("inside")
    assert inside.parent is not None
    assert inside.parent.span_id == context_of(tracing.only(step.name)).span_id


async def test_an_event_carries_the_trace_of_the_step_that_sends_it(make_app: MakeApp, tracing: Tracing) -> None:
    @activity
    async def tell(ctx: WorkflowContext) -> None:
        await send_event("told", "/test", {}, target_instance_id="order-1")

    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        await send_event("told", "/test", {})
        await tell(ctx)
        await send_event("told", "/test", {}, extensions={"traceparent": "mine"})
        received = [await wait_event(ctx, "told") for _ in range(3)]
        return [event.extensions["traceparent"] for event in received]

    got = await run(await make_app(hooks=TracingHooks(tracing.provider)), order)
    assert got == [traceparent(tracing.named("send_event")[0]), traceparent(tracing.only("tell")), "mine"]


async def test_an_event_in_the_outbox_carries_it_too(make_app: MakeApp, tracing: Tracing) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await send_event_transactional(ctx, "told", "/test", {})

    app = await make_app(hooks=TracingHooks(tracing.provider))
    await app.run(order)
    (record,) = await app.engine.storage.find_outbox()
    event = json_format.parse_stored(app.engine.codec.decrypt(record.event.body))
    await app.shutdown()
    assert event.extensions["traceparent"] == traceparent(tracing.only("send_event_transactional"))


@pytest.mark.parametrize("taken", ["whole", "data alone"])
async def test_a_run_that_is_started_by_an_event_is_linked_to_its_sender(
    make_app: MakeApp, tracing: Tracing, taken: str
) -> None:
    async def take_event(ctx: WorkflowContext, event: ReceivedEvent[Any]) -> None: ...

    async def take_data(ctx: WorkflowContext, amount: int) -> None: ...

    workflow(event_handler=True, name="placed")(take_event if taken == "whole" else take_data)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await send_event("placed", "/test", {"amount": 3})

    app = await make_app(hooks=TracingHooks(tracing.provider))
    await app.run(order)
    await until(lambda: "placed completed" in tracing.names, "the run that was started is over")
    await app.shutdown()
    received = tracing.only("placed received")
    (started_id,) = {facts(span)["run_id"] for span in tracing.named("placed started")}
    assert facts(received) == {"run_id": started_id, "workflow": "placed"}
    assert context_of(received).trace_id == trace_of(started_id).trace_id
    (link,) = received.links
    assert link.context.span_id == context_of(tracing.only("send_event")).span_id


async def test_a_run_that_receives_an_event_is_linked_to_its_sender(make_app: MakeApp, tracing: Tracing) -> None:
    @workflow
    async def waiting(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid", model=dict)
        await sleep(ctx, 0.02)

    app = await make_app(hooks=TracingHooks(tracing.provider))
    run_id = await app.start(waiting)
    sender = tracing.tracer.start_span("checkout")
    sender.end()
    (checkout,) = tracing.named("checkout")
    await app.send_event("paid", "/shop", {}, extensions={"traceparent": traceparent(checkout)})
    await until(lambda: "waiting completed" in tracing.names, "it goes on")
    await app.shutdown()
    received = tracing.only("paid received")
    assert facts(received) == {"run_id": run_id, "workflow": "waiting"}
    assert [link.context.span_id for link in received.links] == [context_of(checkout).span_id]


async def test_an_event_without_a_trace_makes_no_span(make_app: MakeApp, tracing: Tracing) -> None:
    @workflow
    async def waiting(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")

    app = await make_app(hooks=TracingHooks(tracing.provider))
    await app.start(waiting)
    await app.send_event("paid", "/shop", {}, extensions={"traceparent": "nonsense"})
    await until(lambda: "waiting completed" in tracing.names, "it goes on")
    await app.shutdown()
    assert tracing.names == ["waiting started", "waiting completed"]


async def test_a_share_of_the_runs_is_traced_each_as_a_whole(make_app: MakeApp, tracing: Tracing) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx, 1)

    app = await make_app(hooks=TracingHooks(tracing.provider, share=0.5))
    ids = [f"run-{number}" for number in range(20)]
    for id in ids:
        await app.run(order.options(id=id))
    await app.shutdown()
    expected = {id for id in ids if trace_of(id, 0.5).trace_flags.sampled}
    assert 0 < len(expected) < len(ids)
    assert {facts(span)["run_id"] for span in tracing.spans} == expected
    assert len(tracing.spans) == 3 * len(expected)


async def test_a_run_that_is_cancelled_says_so(make_app: MakeApp, tracing: Tracing) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        await sleep(ctx, 3600)

    app = await make_app(hooks=TracingHooks(tracing.provider))
    run_id = await app.start(nap)
    await app.cancel(run_id)
    await until(lambda: "nap cancelled" in tracing.names, "the run is cancelled")


async def test_a_tracer_that_raises_stops_nothing(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TracingHooks):
        def watch_attempt(self, attempt: Any) -> Any:
            raise TerminalError("no tracer")

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await charge(ctx, 1)

    assert await run(await make_app(hooks=Broken()), order) == 1
    assert "a hook raised, starting the attempt all the same" in caplog.text


PROGRAM = """
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from edda import EddaApp, WorkflowContext, activity, workflow
from edda.integrations.otel import TracingHooks

hooks = TracingHooks()  # before there is a provider, as a module may be imported before tracing is set up
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

@activity
async def charge(ctx: WorkflowContext) -> bool:
    return trace.get_current_span().is_recording()

@workflow
async def order(ctx: WorkflowContext) -> bool:
    return await charge(ctx)

async def main() -> None:
    async with EddaApp("shop", "memory://", hooks=hooks) as app:
        assert await app.run(order)
    print(sorted(span.name for span in exporter.get_finished_spans()))

asyncio.run(main())
"""


def test_spans_are_recorded_by_the_provider_of_the_application() -> None:
    """W21: hooks that never find a provider record nothing. A process of its own: there is one provider in each."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['charge', 'order completed', 'order started']"
