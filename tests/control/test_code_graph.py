"""The structure of workflow code, and the nodes that match the steps of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from edda import (
    EddaApp,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    publish,
    receive,
    register_compensation,
    send_event,
    sleep,
    subscribe,
    wait_any,
    wait_event,
    workflow,
)
from edda.control.code_graph import Node, Structure, read_structure, walk
from edda.control.step_match import match_steps
from edda.workflow.workflow import registry

PAID = "payment.completed"


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_workflows", {})


@compensation
async def refund(ctx: WorkflowContext) -> None: ...


@activity
@on_failure(refund)
async def charge(ctx: WorkflowContext, amount: float = 1) -> str:
    return "paid"


@activity(name="ship_it")
async def ship(ctx: WorkflowContext, order: str = "") -> str:
    return "shipped"


@activity
async def hold(ctx: WorkflowContext) -> str:
    return "held"


untyped: Any = hold


async def ship_all(ctx: WorkflowContext, orders: list[str]) -> None:
    for order in orders:
        await ship(ctx, order)


async def call_oneself(ctx: WorkflowContext) -> None:
    await hold(ctx)
    await call_oneself(ctx)


def outline(nodes: Iterable[Node]) -> list[Any]:
    """Kind and name, and what is below."""
    return [[f"{node.kind} {node.name}".strip(), *outline(node.children)] for node in nodes]


def read(fn: Any) -> Structure:
    structure = read_structure(fn)
    assert structure is not None
    return structure


def test_steps_are_named_as_in_the_history_and_stand_on_their_lines() -> None:
    async def order(ctx: WorkflowContext) -> Any:
        await charge(ctx, 9.5)
        await ship.with_id("by-hand")(ctx)
        await ctx.step("fetch", print, 1)
        return await untyped(ctx, activity_id="mine")

    structure = read(order)
    assert outline(structure.nodes) == [
        ["step charge", ["undo refund"]],
        ["step ship_it"],
        ["step fetch"],
        ["step hold"],
        ["return"],
    ]
    assert [node.step for node in structure.nodes] == ["", "by-hand", "", "mine", ""]
    first = order.__code__.co_firstlineno
    assert [node.line - first for node in structure.nodes] == [1, 2, 3, 4, 4]
    assert [node.id for node in walk(structure.nodes)][:3] == ["0", "0.0", "1"]


def test_waits_have_the_name_of_their_event_or_channel() -> None:
    async def order(ctx: WorkflowContext, kind: str) -> None:
        await wait_event(ctx, PAID)
        await wait_event(ctx, kind, event_id="any")
        await subscribe(ctx, "news")
        await receive(ctx, "news", 5)
        await sleep(ctx, timedelta(minutes=5))
        await asyncio.sleep(3)
        await publish(ctx, "news", {})
        await send_event("order.done", "/orders", {})

    nodes = read(order).nodes
    assert outline(nodes) == [
        ["event payment.completed"],
        ["event"],
        ["step subscribe"],
        ["message news"],
        ["timer sleep"],
        ["timer timer"],
        ["step publish"],
        ["step send_event"],
    ]
    assert (nodes[1].text, nodes[1].step, nodes[4].text) == ("kind", "any", "timedelta(minutes=5)")


async def branch_out(ctx: WorkflowContext, total: int, items: list[str]) -> None:
    if total > 100:
        await hold(ctx)
    elif total > 50:
        await ship(ctx)
    match items:
        case []:
            return
        case [_]:
            await ship(ctx)
    for item in items:
        await ship(ctx, item)
    while await hold(ctx):
        break
    try:
        await charge(ctx)
    except ValueError:
        raise
    else:
        await ship(ctx)
    finally:
        await hold(ctx)
    if total:
        print("nothing durable")


def test_branches_loops_and_handlers_contain_their_nodes() -> None:
    nodes = read(branch_out).nodes
    assert outline(nodes) == [
        ["branch", ["arm", ["step hold"]], ["arm", ["step ship_it"]], ["arm"]],
        ["branch", ["arm", ["return"]], ["arm", ["step ship_it"]], ["arm"]],
        ["loop", ["step ship_it"]],
        ["loop", ["step hold"], ["break"]],
        [
            "try",
            ["arm", ["step charge", ["undo refund"]], ["step ship_it"]],
            ["arm", ["raise"]],
            ["arm", ["step hold"]],
        ],
    ]
    assert [arm.text for arm in nodes[0].children] == ["total > 100", "total > 50", "else"]
    assert [arm.text for arm in nodes[1].children] == ["case []", "case [_]", "else"]
    assert [arm.text for arm in nodes[4].children] == ["try", "except ValueError", "finally"]
    assert [node.text for node in nodes[2:4]] == ["for item in items", "while await hold(ctx)"]


def test_concurrent_calls_have_an_arm_each() -> None:
    async def order(ctx: WorkflowContext, items: list[str]) -> None:
        await asyncio.gather(charge(ctx), *(ship(ctx, item) for item in items))
        await wait_any(ctx, paid=wait_event(ctx, PAID), late=sleep(ctx, 60))
        async with asyncio.TaskGroup() as group:
            group.create_task(hold(ctx))
            group.create_task(ship_all(ctx, items))
        async with asyncio.timeout(5):
            await hold(ctx)

    nodes = read(order).nodes
    assert outline(nodes) == [
        ["parallel", ["arm", ["step charge", ["undo refund"]]], ["arm", ["loop", ["step ship_it"]]]],
        ["race", ["arm", ["event payment.completed"]], ["arm", ["timer sleep"]]],
        ["parallel", ["arm", ["step hold"]], ["arm", ["call ship_all", ["loop", ["step ship_it"]]]]],
        ["block timer", ["step hold"]],
    ]
    assert [arm.text for arm in nodes[1].children] == ["paid", "late"]


def test_children_compensations_and_recurrences_are_seen() -> None:
    @workflow(name="the_child")
    async def child(ctx: WorkflowContext) -> None: ...

    async def order(ctx: WorkflowContext) -> None:
        await register_compensation(ctx, refund)
        await child.run()
        await child.options(id="c").start()
        await child.handle("c").result()
        await ctx.recur()

    assert outline(read(order).nodes) == [
        ["undo refund"],
        ["child the_child"],
        ["child the_child"],
        ["child result"],
        ["recur"],
    ]


def test_functions_that_get_the_context_are_followed_and_never_round_in_circles() -> None:
    async def order(ctx: WorkflowContext, orders: list[str]) -> None:
        async def inner(ctx: WorkflowContext) -> None:
            await hold(ctx)

        await inner(ctx)
        await ship_all(ctx, orders)
        await call_oneself(ctx)

    assert outline(read(order).nodes) == [
        ["call inner", ["step hold"]],
        ["call ship_all", ["loop", ["step ship_it"]]],
        ["call call_oneself", ["step hold"]],
    ]


def test_a_local_name_hides_the_activity_of_the_same_name() -> None:
    async def order(ctx: WorkflowContext, hold: Any) -> None:
        ship = hold
        await hold(ctx)
        await ship(ctx)
        await charge(ctx)

    assert [node.name for node in read(order).nodes] == ["charge"]


def test_a_workflow_has_its_own_name_and_survives_json() -> None:
    @workflow(name="the_order")
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)

    structure = read(order)
    assert structure.name == "the_order"
    assert msgspec.convert(msgspec.to_builtins(structure), Structure) == structure


@pytest.mark.parametrize("unreadable", [lambda ctx: None, print, int], ids=["lambda", "builtin", "class"])
def test_a_workflow_without_source_has_no_structure(unreadable: Any) -> None:
    assert read_structure(unreadable) is None


def test_code_that_was_made_at_run_time_has_no_structure() -> None:
    names: dict[str, Any] = {}
    exec("async def made(ctx): ...", names)
    assert read_structure(names["made"]) is None


# Matching


@dataclass(frozen=True)
class Line:
    step: str
    name: str
    kind: str = "step"


def lines(*ids: str, kind: str = "step") -> list[Line]:
    return [Line(id, id.rpartition("/")[2].rpartition(":")[0], kind) for id in ids]


async def choose(ctx: WorkflowContext, is_big: bool) -> None:
    if is_big:
        await charge(ctx)
        await hold(ctx)
    else:
        await charge(ctx)
        await ship(ctx)
    await hold(ctx)


def test_a_step_in_both_branches_belongs_to_the_one_that_was_taken() -> None:
    structure = read(choose)
    first = match_steps(structure, lines("charge:1", "hold:1", "hold:2"))
    assert first == {"charge:1": "0.0.0", "hold:1": "0.0.1", "hold:2": "1"}
    second = match_steps(structure, lines("charge:1", "ship_it:1", "hold:1"))
    assert second == {"charge:1": "0.1.0", "ship_it:1": "0.1.1", "hold:1": "1"}


def test_the_end_of_a_run_decides_its_branch() -> None:
    async def order(ctx: WorkflowContext, is_big: bool) -> None:
        if is_big:
            await charge(ctx)
            await ship(ctx)
        else:
            await charge(ctx)

    structure = read(order)
    assert match_steps(structure, lines("charge:1")) == {"charge:1": "0.0.0"}
    assert match_steps(structure, lines("charge:1"), is_over=True) == {"charge:1": "0.1.0"}


def test_a_loop_collects_all_its_rounds() -> None:
    async def order(ctx: WorkflowContext, items: list[str]) -> None:
        for item in items:
            await ship(ctx, item)
            if not item:
                continue
            await hold(ctx)
        await ship(ctx)

    ids = ["ship_it:1", "hold:1", "ship_it:2", "ship_it:3", "hold:2", "ship_it:4"]
    matched = match_steps(read(order), lines(*ids), is_over=True)
    assert matched == dict(zip(ids, ["0.0", "0.2", "0.0", "0.0", "0.2", "1"], strict=True))


def test_steps_of_handlers_are_distinguished_from_those_of_the_body() -> None:
    async def order(ctx: WorkflowContext) -> None:
        try:
            await charge(ctx)
            await hold(ctx)
            await ship(ctx)
        except ValueError:
            await hold(ctx)
        await sleep(ctx, 1)

    structure = read(order)
    steps = [*lines("charge:1", "hold:1"), Line("sleep:1", "sleep", "timer")]
    assert match_steps(structure, steps) == {"charge:1": "0.0.0", "hold:1": "0.1.0", "sleep:1": "1"}


def test_tasks_are_matched_each_for_itself() -> None:
    async def one(ctx: WorkflowContext) -> None:
        await hold(ctx)
        await ship(ctx)

    async def other(ctx: WorkflowContext) -> None:
        await ship(ctx)
        await hold(ctx)

    async def order(ctx: WorkflowContext) -> None:
        await asyncio.gather(one(ctx), other(ctx))

    steps = lines("one:1/hold:1", "other:1/ship_it:1", "other:1/hold:1", "one:1/ship_it:1")
    assert list(match_steps(read(order), steps).items()) == [
        ("one:1/hold:1", "0.0.0.0"),
        ("one:1/ship_it:1", "0.0.0.1"),
        ("other:1/ship_it:1", "0.1.0.0"),
        ("other:1/hold:1", "0.1.0.1"),
    ]


def test_ids_of_ones_own_and_names_that_only_running_code_knows_are_found() -> None:
    async def order(ctx: WorkflowContext, kind: str) -> None:
        await ship.with_id("second")(ctx)
        await ship.with_id("first")(ctx)
        await wait_event(ctx, kind)

    steps = [Line("first", "ship_it"), Line("second", "ship_it"), Line("x.y:1", "x.y", "event")]
    assert match_steps(read(order), steps) == {"first": "1", "second": "0", "x.y:1": "2"}


def test_undoing_belongs_to_the_steps_that_are_undone_the_last_one_first() -> None:
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)
        await hold(ctx)
        await charge(ctx)
        await ship(ctx)

    steps = [*lines("charge:1", "hold:1", "charge:2", "ship_it:1")]
    steps += [Line("undo:1/refund", "refund", "undo"), Line("undo:2/refund", "refund")]
    matched = match_steps(read(order), steps)
    assert (matched["undo:1/refund"], matched["undo:2/refund"]) == ("2.0", "0.0")


def test_steps_that_the_code_no_longer_has_are_left_out() -> None:
    structure = read(choose)
    steps = [*lines("gone:1", "charge:1"), Line("", "cancel", "cancel")]
    assert match_steps(structure, steps) == {"charge:1": "0.0.0"}
    assert match_steps(structure, []) == {}


async def test_the_history_of_a_real_run_is_found_in_its_code() -> None:
    @workflow
    async def order(ctx: WorkflowContext, is_big: bool) -> None:
        if is_big:
            await asyncio.gather(charge(ctx), hold(ctx))
        else:
            await charge(ctx)
        await asyncio.gather(ship_all(ctx, ["a", "b"]), ship_all(ctx, ["c"]))
        await sleep(ctx, 0)

    async with EddaApp("test", "memory://") as app:
        run = await app.start(order, True)
        await app.handle(run).result()
        history = await app.handle(run).history()
    recorded = [Line(entry.step, entry.name, str(entry.kind)) for entry in history]
    matched = match_steps(read(order), recorded, is_over=True)
    assert matched == {
        "charge:1": "0.0.0.0.0",
        "hold:1": "0.0.0.1.0",
        "ship_all:1/ship_it:1": "1.0.0.0.0",
        "ship_all:1/ship_it:2": "1.0.0.0.0",
        "ship_all:2/ship_it:1": "1.1.0.0.0",
        "sleep:1": "2",
    }
