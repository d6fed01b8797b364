"""Events as the official Python SDK sends them, by its older and its newer interface, reach workflows as JSON."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from cloudevents.core.bindings import http as newer
from cloudevents.core.v1.event import CloudEvent as NewerEvent

from edda import EddaApp, RunStatus, WorkflowContext, wait_event, workflow
from edda.workflow.workflow import registry
from tests.engine.conditions import until, until_status

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the SDK deprecates some of its own functions
    from cloudevents.v1.conversion import to_binary, to_structured
    from cloudevents.v1.http import CloudEvent as OlderEvent
    from cloudevents.v1.pydantic import CloudEvent as ModelEvent

Message = tuple[Mapping[str, str], bytes]
Write = Callable[[dict[str, Any], Any], Message]


def older_binary(attributes: dict[str, Any], data: Any) -> Message:
    headers, body = to_binary(OlderEvent(attributes, data))
    return headers, body or b""


def older_structured(attributes: dict[str, Any], data: Any) -> Message:
    return to_structured(OlderEvent(attributes, data))


def model_binary(attributes: dict[str, Any], data: Any) -> Message:
    headers, body = to_binary(ModelEvent(**attributes, data=data))
    return headers, body or b""


def newer_binary(attributes: dict[str, Any], data: Any) -> Message:
    message = newer.to_binary_event(
        NewerEvent(attributes={"id": str(uuid4()), "specversion": "1.0", **attributes}, data=data)
    )
    return message.headers, message.body


def newer_structured(attributes: dict[str, Any], data: Any) -> Message:
    message = newer.to_structured_event(
        NewerEvent(attributes={"id": str(uuid4()), "specversion": "1.0", **attributes}, data=data)
    )
    return message.headers, message.body


WRITERS: list[Write] = [older_binary, older_structured, model_binary, newer_binary, newer_structured]
TYPES: list[dict[str, Any]] = [{}, {"datacontenttype": "application/json"}]
"""By default the SDK sets none, and in binary mode sends no Content-Type."""


async def post(app: EddaApp, message: Message) -> int:
    transport = httpx2.ASGITransport(app=app, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return (await client.post("/events", headers=dict(message[0]), content=message[1])).status_code


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the handlers defined here would receive events of other test files."""
    monkeypatch.setattr(registry, "_workflows", {})


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("types", TYPES)
async def test_an_event_of_the_sdk_starts_a_workflow(write: Write, types: dict[str, Any]) -> None:
    @workflow(event_handler=True, name="order.created")
    async def order(ctx: WorkflowContext, order_id: str, lines: list[int]) -> str:
        return f"{order_id}: {lines}"

    async with EddaApp("shop", "memory://", workflows=[order]) as app:
        message = write({"type": "order.created", "source": "/sdk", **types}, {"order_id": "A-17", "lines": [1, 2]})
        assert await post(app, message) == 202

        async def found() -> bool:
            return bool((await app.find_instances(workflow_name="order.created"))["instances"])

        await until(found, "the event has started its workflow")
        (run,) = (await app.find_instances(workflow_name="order.created"))["instances"]
        assert await app.handle(run["instance_id"]).result() == "A-17: [1, 2]"


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("types", TYPES)
async def test_an_event_of_the_sdk_resumes_the_matching_wait(write: Write, types: dict[str, Any]) -> None:
    @workflow
    async def payment(ctx: WorkflowContext, order_id: str) -> Any:
        event = await wait_event(ctx, "payment.completed", match={"order.id": order_id})
        return [event.data, event.datacontenttype]

    async with EddaApp("shop", "memory://", workflows=[payment]) as app:
        run = await app.start(payment, "A-17")
        await until_status(app, run, RunStatus.WAITING_FOR_EVENT)
        data = {"order": {"id": "A-17"}, "amount": 9.5}
        assert await post(app, write({"type": "payment.completed", "source": "/sdk", **types}, data)) == 202
        assert await app.handle(run).result(timeout=30) == [data, "application/json"]


@pytest.mark.parametrize("write", [older_binary, newer_binary])
@pytest.mark.parametrize(
    ("data", "received"),
    [(b"\x00\xff", b"\x00\xff"), (None, None), ([1, 2], [1, 2]), (b'{"a": 1}', {"a": 1}), ({}, {})],
)
async def test_data_of_every_kind_arrives_as_the_sdk_would_read_it(write: Write, data: Any, received: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "sample")).data

    async with EddaApp("shop", "memory://", workflows=[listen]) as app:
        run = await app.start(listen)
        assert await post(app, write({"type": "sample", "source": "/sdk"}, data)) == 202
        assert await app.handle(run).result(timeout=30) == received
