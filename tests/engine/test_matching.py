"""Which run an event is for: by its data, by its attributes, by its address."""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Any

import pytest

from edda import EddaApp, WorkflowContext, wait_event, workflow
from edda.core.codec import Codec
from edda.core.model import RunId

from .conditions import reason_of
from .conftest import MakeApp
from .events import result_of, send, start_waiting


async def test_each_order_gets_its_own_payment(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, order_id: str) -> Any:
        return (await wait_event(ctx, "paid", match={"order_id": order_id})).data["amount"]

    first, second = [await start_waiting(app, order, order_id) for order_id in ("A", "B")]
    await send(app, "paid", {"order_id": "B", "amount": 2})
    await send(app, "paid", {"order_id": "A", "amount": 1})
    assert [await result_of(app, first), await result_of(app, second)] == [1, 2]


async def test_each_order_gets_its_own_payment_that_came_before_anybody_ever_matched(app: EddaApp) -> None:
    """Nobody knew then by which paths the events would be asked for."""

    @workflow
    async def order(ctx: WorkflowContext, order_id: str) -> Any:
        await wait_event(ctx, "go")
        return (await wait_event(ctx, "paid", match={"order_id": order_id})).data["amount"]

    run_ids = [await start_waiting(app, order, order_id) for order_id in ("A", "B")]
    for order_id, amount in (("C", 3), ("B", 2), ("A", 1)):
        await send(app, "paid", {"order_id": order_id, "amount": amount})
    await send(app, "go")
    assert [await result_of(app, run_id) for run_id in run_ids] == [1, 2]


@pytest.mark.parametrize(
    ("match", "data", "attributes"),
    [
        ({"address.city": "Bonn"}, {"address": {"city": "Bonn", "zip": 1}}, {}),
        ({"items.0.sku": "x"}, {"items": [{"sku": "x"}, {"sku": "y"}]}, {}),
        ({"a\\.b": 1}, {"a.b": 1}, {}),
        ({"amount": 1.0, "paid": True, "note": None}, {"amount": 1, "paid": True, "note": None, "x": 0}, {}),
        ({"@subject": "S"}, None, {"subject": "S"}),
        ({"@priority": 5, "id": 7}, {"id": 7}, {"extensions": {"priority": 5}}),
    ],
    ids=["nested", "index", "dot", "kinds", "subject", "extension"],
)
async def test_an_event_is_found_by_its_data_and_its_attributes(
    app: EddaApp, match: dict[str, Any], data: Any, attributes: dict[str, Any]
) -> None:
    """By a run that waits, and by one that asks later."""

    @workflow
    async def order(ctx: WorkflowContext, go_first: bool) -> str:
        if go_first:
            await wait_event(ctx, "go")
        return (await wait_event(ctx, "paid", match=match)).id

    run_ids = [await start_waiting(app, order, go_first) for go_first in (False, True)]
    await send(app, "paid", {"amount": True}, id="wrong")
    await send(app, "paid", data, id="right", **attributes)
    await send(app, "go")
    assert [await result_of(app, run_id) for run_id in run_ids] == ["right", "right"]


async def test_waits_with_and_without_a_match_in_one_run_share_no_event(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        events = await asyncio.gather(wait_event(ctx, "part", match={"color": "red"}), wait_event(ctx, "part"))
        return [event.id for event in events]

    run_id = await start_waiting(app, order)
    await send(app, "part", {"color": "blue"}, id="blue")
    await send(app, "part", {"color": "red"}, id="red")
    assert await result_of(app, run_id) == ["red", "blue"]


async def test_many_kinds_of_matches_on_one_type_each_find_their_events_in_order(app: EddaApp) -> None:
    matches: list[dict[str, Any]] = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}]

    @workflow
    async def order(ctx: WorkflowContext, number: int) -> list[str]:
        await wait_event(ctx, "go")
        return [(await wait_event(ctx, "part", match=matches[number])).id for _ in range(2)]

    run_ids = [await start_waiting(app, order, number) for number in range(len(matches))]
    for number, data in zip(range(6), cycle([{"a": 1}, {"b": 1}, {"a": 1, "b": 1}]), strict=False):
        await send(app, "part", data, id=str(number))
    await send(app, "go")
    assert [await result_of(app, run_id) for run_id in run_ids] == [["0", "1"], ["0", "2"], ["1", "2"], ["2", "5"]]


async def test_an_addressed_event_is_seen_by_that_run_alone(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid", match={"n": 1})).data["for"]

    others = [await start_waiting(app, order) for _ in range(2)]
    wanted = await start_waiting(app, order)
    await send(app, "paid", {"n": 1, "for": "one"}, target_instance_id=wanted)
    assert await result_of(app, wanted) == "one"
    await send(app, "paid", {"n": 1, "for": "all"})
    assert [await result_of(app, run_id) for run_id in others] == ["all", "all"]


async def test_an_addressed_event_that_came_before_the_wait_is_found_by_that_run_alone(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        await wait_event(ctx, "go")
        return [(await wait_event(ctx, "paid")).data for _ in range(2)]

    wanted, other = [await start_waiting(app, order) for _ in range(2)]
    await send(app, "paid", 1)
    await send(app, "paid", "for one", target_instance_id=wanted)
    await send(app, "paid", 2)
    await send(app, "go")
    assert await result_of(app, wanted) == [1, "for one"]
    assert await result_of(app, other) == [1, 2]


class Mirror:
    """A transform whose output has nothing readable in it."""

    def seal(self, data: bytes) -> bytes:
        return bytes(byte ^ 0x55 for byte in data)

    def open(self, data: bytes) -> bytes:
        return self.seal(data)


async def test_matching_works_on_events_that_are_stored_encrypted(make_app: MakeApp) -> None:
    app = await make_app(codec=Codec(transform=Mirror()))

    @workflow
    async def order(ctx: WorkflowContext, order_id: str, go_first: bool) -> Any:
        if go_first:
            await wait_event(ctx, "go")
        return (await wait_event(ctx, "paid", match={"order_id": order_id})).data["card"]

    run_ids = [await start_waiting(app, order, *arguments) for arguments in (("A", True), ("A", False), ("B", True))]
    assert await reason_of(app, run_ids[1]) == "paid where order_id match"
    (wait,) = await app.engine.storage.waits(RunId(run_ids[1]))
    assert b"order_id" not in wait.match
    await send(app, "paid", {"order_id": "B", "card": "secret of B"}, id="b")
    await send(app, "paid", {"order_id": "A", "card": "secret of A"}, id="a")
    await send(app, "go")
    assert [await result_of(app, run_id) for run_id in run_ids] == ["secret of A", "secret of A", "secret of B"]
    await check_nothing_is_readable(app, run_ids)


async def check_nothing_is_readable(app: EddaApp, run_ids: list[str]) -> None:
    storage = app.engine.storage
    found = await storage.find_event("/tests", "a")
    assert found is not None
    bodies = [found.event.body]
    for run_id in run_ids:
        record = await app.client.read_run(run_id)
        bodies += [record.input, record.value or b""]
        bodies += [part for entry in await storage.history(record.run_id) for part in (entry.input, entry.value)]
    assert not any(b"secret" in body or b"order_id" in body for body in bodies)
