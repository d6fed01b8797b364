"""The flow chart of a workflow: geometry, and the states of a run."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import combinations, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edda import WorkflowContext, activity, compensation, on_failure, sleep, wait_event
from edda.control.code_graph import Node, NodeKind, Structure, read_structure
from edda.control.views import Bar, BarState
from edda.viewer.flowchart import Box, Edge, EdgeKind, Graph, NodeState, Point, draw


@compensation
async def refund(ctx: WorkflowContext) -> None: ...


@activity
@on_failure(refund)
async def charge(ctx: WorkflowContext, amount: float = 1) -> str:
    return "paid"


@activity
async def ship(ctx: WorkflowContext, item: str = "") -> str:
    return "shipped"


@activity
async def hold(ctx: WorkflowContext) -> str:
    return "held"


async def order(ctx: WorkflowContext, total: int, items: list[str]) -> str:
    if not items:
        return "nothing"
    if total > 100:
        await hold(ctx)
        await charge(ctx, total)
    else:
        await charge(ctx, total)
    for item in items:
        await ship(ctx, item)
    try:
        await wait_event(ctx, "delivered")
    except TimeoutError:
        await hold(ctx)
    finally:
        await sleep(ctx, 5)
    await asyncio.gather(ship(ctx), hold(ctx))
    return "done"


def read(fn: Any = order) -> Structure:
    structure = read_structure(fn)
    assert structure is not None
    return structure


def bar(step: str, state: BarState = BarState.DONE, kind: str = "step") -> Bar:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Bar(step, step.rpartition("/")[2].rpartition(":")[0], kind, state, now, now)


def boxes_of(graph: Graph) -> dict[str, Box]:
    return {box.id: box for box in graph.boxes}


# Geometry


def overlap(one: Box, other: Box) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


def crosses(box: Box, start: Point, end: Point) -> bool:
    """True if a straight line crosses the inside of a box."""
    left, right = sorted((start[0], end[0]))
    top, bottom = sorted((start[1], end[1]))
    return left < box.x + box.width and right > box.x and top < box.y + box.height and bottom > box.y


def check(graph: Graph) -> None:
    for one, other in combinations(graph.boxes, 2):
        assert not overlap(one, other), (one, other)
    for edge in graph.edges:
        for start, end in pairwise(edge.points):
            assert start[0] == end[0] or start[1] == end[1], edge
            assert not [box for box in graph.boxes if crosses(box, start, end)], edge
    for box in graph.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.width <= graph.width
        assert box.y + box.height <= graph.height
    for x, y in (point for edge in graph.edges for point in edge.points):
        assert 0 <= x <= graph.width
        assert 0 <= y <= graph.height


LEAVES = [NodeKind.STEP, NodeKind.TIMER, NodeKind.EVENT, NodeKind.UNDO, NodeKind.RETURN, NodeKind.BREAK]
HOLDERS = [NodeKind.LOOP, NodeKind.BLOCK, NodeKind.CALL]
names = st.text("abcdef ", max_size=60)


def leaves() -> st.SearchStrategy[Node]:
    undo = st.builds(Node, st.just(NodeKind.UNDO), st.just(1), names)
    step = st.builds(Node, st.just(NodeKind.STEP), st.just(1), names, children=st.tuples(undo))
    return st.builds(Node, st.sampled_from(LEAVES), st.just(1), names, names) | step


def holders(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    below = st.lists(inner, min_size=1, max_size=3).map(tuple)
    arm = st.builds(
        Node, st.just(NodeKind.ARM), st.just(1), text=names, children=st.lists(inner, max_size=3).map(tuple)
    )
    arms = st.lists(arm, min_size=1, max_size=4).map(tuple)
    final = st.builds(Node, st.just(NodeKind.ARM), st.just(1), text=st.just("finally"), children=below)
    fans = st.sampled_from([NodeKind.BRANCH, NodeKind.PARALLEL, NodeKind.RACE, NodeKind.TRY])
    return (
        st.builds(Node, st.sampled_from(HOLDERS), st.just(1), text=names, children=below)
        | st.builds(Node, fans, st.just(1), text=names, children=arms)
        | st.builds(Node, st.just(NodeKind.TRY), st.just(1), children=st.tuples(arm, arm, final))
    )


def numbered(nodes: tuple[Node, ...], prefix: str = "") -> tuple[Node, ...]:
    return tuple(
        Node(one.kind, one.line, one.name, one.text, numbered(one.children, f"{prefix}{place}."), f"{prefix}{place}")
        for place, one in enumerate(nodes)
    )


@given(st.lists(st.recursive(leaves(), holders, max_leaves=25), max_size=4).map(tuple))
def test_no_box_overlaps_another_and_no_line_goes_through_one(nodes: tuple[Node, ...]) -> None:
    graph = draw(Structure("any", "any.py", 1, numbered(nodes)))
    check(graph)


def test_the_same_code_is_always_drawn_in_the_same_way() -> None:
    assert draw(read()) == draw(read())
    check(draw(read()))


def test_arms_stand_side_by_side_and_steps_below_each_other() -> None:
    boxes = boxes_of(draw(read()))
    first, second, other = boxes["1.0.0"], boxes["1.0.1"], boxes["1.1.0"]
    assert (first.label, second.label, other.label) == ("hold", "charge", "charge")
    assert first.y < second.y
    assert first.y == other.y
    assert other.x > first.x + first.width


def test_a_loop_has_a_line_back_and_what_catches_stands_to_the_side() -> None:
    graph = draw(read())
    boxes = boxes_of(graph)
    assert boxes["2"].label == "for item in items"
    (back,) = [edge for edge in graph.edges if edge.kind is EdgeKind.BACK]
    assert back.points[0][1] > back.points[-1][1]
    assert back.points[-1] == (boxes["2"].x, boxes["2"].y + boxes["2"].height / 2)
    (error,) = [edge for edge in graph.edges if edge.kind is EdgeKind.ERROR]
    assert boxes["3.1"].label == "except TimeoutError"
    assert boxes["3.1"].x > boxes["3.0.0"].x + boxes["3.0.0"].width
    assert error.points[-1] == (boxes["3.1"].x + boxes["3.1"].width / 2, boxes["3.1"].y)


def test_arms_are_labelled_and_what_undoes_stands_beside_its_step() -> None:
    graph = draw(read())
    boxes = boxes_of(graph)
    assert {edge.label for edge in graph.edges if edge.label} == {"yes", "no"}
    assert boxes["1.1.0.0"].label == "refund"
    assert boxes["1.1.0.0"].y == boxes["1.1.0"].y
    assert len([edge for edge in graph.edges if edge.kind is EdgeKind.UNDO]) == 2


def test_a_long_text_is_shortened_and_kept_in_full_beside_it() -> None:
    async def long(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "a.very.long.type.of.an.event.that.nobody.would.give.to.one")

    box = boxes_of(draw(read(long)))["0"]
    assert len(box.label) < len(box.title)
    assert box.title.endswith("to.one")


# States of a run


def states(graph: Graph) -> dict[str, NodeState]:
    return {box.id: box.state for box in graph.boxes if box.state is not NodeState.UNREACHED}


def test_without_a_run_nothing_is_reached() -> None:
    graph = draw(read())
    assert states(graph) == {}
    assert not any(edge.is_taken for edge in graph.edges)


def test_a_run_is_seen_in_the_branch_it_took_and_at_the_step_it_waits_in() -> None:
    bars = [bar("charge:1"), bar("ship:1"), bar("ship:2"), bar("delivered:1", BarState.WAITING, "event")]
    graph = draw(read(), bars)
    assert states(graph) == {
        "start": NodeState.DONE,
        "0": NodeState.DONE,  # passed by
        "1": NodeState.DONE,
        "1.1.0": NodeState.DONE,
        "2": NodeState.DONE,
        "2.0": NodeState.DONE,
        "3": NodeState.WAITING,
        "3.0.0": NodeState.WAITING,
    }
    boxes = boxes_of(graph)
    assert boxes["2.0"].steps == ("ship:1", "ship:2")
    assert boxes["2.0"].times == 2
    assert [edge.is_taken for edge in _labelled(graph)] == [False, True, False, True]
    assert [edge.is_taken for edge in graph.edges if edge.kind is EdgeKind.BACK] == [True]


def _labelled(graph: Graph) -> list[Edge]:
    """The edges into the arms of the two branches."""
    return sorted(
        (edge for edge in graph.edges if edge.label), key=lambda edge: (edge.points[0][1], edge.points[-1][0])
    )


def test_a_run_that_completed_has_its_end_marked() -> None:
    bars = [
        bar("charge:1"),
        bar("delivered:1", kind="event"),
        bar("sleep:1", kind="timer"),
        bar("ship:1"),
        bar("hold:1"),
    ]
    graph = draw(read(), bars, is_over=True)
    assert states(graph)["5"] is NodeState.DONE
    assert boxes_of(graph)["4.0.0"].steps == ("ship:1",)


def test_a_step_that_failed_and_was_compensated_has_that_state() -> None:
    async def risky(ctx: WorkflowContext) -> None:
        await charge(ctx)
        await ship(ctx)

    bars = [bar("charge:1"), bar("ship:1", BarState.FAILED), bar("undo:1/refund", BarState.RUNNING, "undo")]
    shown = states(draw(read(risky), [bars[0], bars[1], _named(bars[2], "refund")]))
    assert shown == {
        "start": NodeState.DONE,
        "0": NodeState.DONE,
        "0.0": NodeState.RUNNING,
        "1": NodeState.FAILED,
    }


def _named(one: Bar, name: str) -> Bar:
    return Bar(one.step, name, one.kind, one.state, one.since, one.until)
