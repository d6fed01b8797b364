"""Geometry of a flow chart: a workflow's structure from top to bottom, with the steps that a run has reached.

Every part of the code becomes a block. The flow enters a block at the top of its axis and leaves it at the bottom.
Blocks are placed below each other or side by side and do not overlap, so boxes do not either; edges run between blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from edda.control.code_graph import Node, NodeKind, Structure, walk
from edda.control.step_match import match_steps
from edda.control.views import Bar, BarState
from edda.core.value_path import truncate

BOX_HEIGHT = 30.0
ROW_GAP = 26.0
COLUMN_GAP = 28.0
LOOP_GAP = 20.0
"""Between the body of a loop and the edges around it."""
ARM_GAP = 44.0
"""Below a fork: an edge to the side, and the label of the arm."""
TURN = 12.0
"""Straight part of an edge before it turns."""
MARGIN = 16.0
CHARACTER = 7.0
MAX_LABEL_LENGTH = 38
MAX_ARM_LENGTH = 26

Point = tuple[float, float]


class NodeState(StrEnum):
    UNREACHED = "not reached"
    DONE = "done"
    FAILED = "failed"
    RUNNING = "running"
    WAITING = "waiting"
    OVER = "over"


class EdgeKind(StrEnum):
    NEXT = "next"
    BACK = "back"
    """To the next iteration of a loop."""
    ERROR = "error"
    UNDO = "undo"


@dataclass(frozen=True)
class NodeMark:
    """State of a run at one node of the code."""

    state: NodeState = NodeState.UNREACHED
    steps: tuple[str, ...] = ()
    """Step ids in the order of their start; a loop has several."""


@dataclass(frozen=True)
class Box:
    id: str
    kind: str
    label: str
    title: str
    """The label before it is truncated."""
    line: int
    x: float
    y: float
    width: float
    height: float = BOX_HEIGHT
    state: NodeState = NodeState.UNREACHED
    steps: tuple[str, ...] = ()

    @property
    def times(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Edge:
    points: tuple[Point, ...]
    kind: EdgeKind = EdgeKind.NEXT
    label: str = ""
    label_at: Point = (0.0, 0.0)
    is_taken: bool = False
    has_arrow: bool = True
    """False for an edge that ends at another edge."""


@dataclass(frozen=True)
class Graph:
    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


def draw(structure: Structure, bars: Sequence[Bar] = (), *, is_over: bool = False) -> Graph:
    """`is_over`: the run has completed, so it has reached the end."""
    marks = mark(structure, bars, is_over=is_over)
    chart = _FlowchartLayout(marks).chart(structure).moved(MARGIN, MARGIN)
    return Graph(chart.width + 2 * MARGIN, chart.height + 2 * MARGIN, chart.boxes, chart.edges)


# States of the run

_PRECEDENCE = (NodeState.RUNNING, NodeState.WAITING, NodeState.FAILED, NodeState.OVER, NodeState.DONE)
"""Of the states of its children, a node has the first in this list."""
_RECORDED = {NodeKind.STEP, NodeKind.TIMER, NodeKind.EVENT, NodeKind.MESSAGE, NodeKind.CHILD}
_EXITS = {NodeKind.RETURN, NodeKind.RAISE, NodeKind.BREAK, NodeKind.CONTINUE, NodeKind.RECUR}
_NOT_LEFT = (NodeState.UNREACHED, NodeState.RUNNING, NodeState.WAITING)
_STATES = {state: NodeState(state.value) for state in BarState}


def mark(structure: Structure, bars: Sequence[Bar], *, is_over: bool = False) -> dict[str, NodeMark]:
    """By node id, without the nodes that the run has not reached."""
    matched = match_steps(structure, bars, is_over=is_over)
    found: dict[str, list[Bar]] = {}
    for bar in bars:
        if bar.step in matched:
            found.setdefault(matched[bar.step], []).append(bar)
    marks = {id: NodeMark(_state_of(known), tuple(bar.step for bar in known)) for id, known in found.items()}
    _mark_around(structure.nodes, marks, is_over)
    return marks


def _state_of(bars: Sequence[Bar]) -> NodeState:
    """That of the last iteration, unless another one is not over."""
    states = [_STATES[bar.state] for bar in bars]
    return next((state for state in _PRECEDENCE[:2] if state in states), states[-1])


def _mark_around(nodes: Sequence[Node], marks: dict[str, NodeMark], is_over: bool) -> None:
    for node in nodes:
        _mark_around(node.children, marks, is_over)
        states = [marks[child.id].state for child in node.children if child.id in marks]
        if node.id not in marks and states and node.kind is not NodeKind.STEP:
            marks[node.id] = NodeMark(_combined_state(states))
    _mark_return(nodes, marks, is_over)
    _mark_passed(nodes, marks)


def _combined_state(states: Sequence[NodeState]) -> NodeState:
    """Of a node with children: a child that failed does not count if the run continued after it."""
    if NodeState.FAILED in states and states[-1] is not NodeState.FAILED:
        states = [state for state in states if state is not NodeState.FAILED]
    return min(states, key=_PRECEDENCE.index)


def _mark_return(nodes: Sequence[Node], marks: dict[str, NodeMark], is_over: bool) -> None:
    """`return` records nothing: it was reached if the run has completed and the node before it is done."""
    for before, node in pairwise(nodes):
        if is_over and node.kind is NodeKind.RETURN and _is_done(marks.get(before.id)):
            marks[node.id] = NodeMark(NodeState.DONE)


def _mark_passed(nodes: Sequence[Node], marks: dict[str, NodeMark]) -> None:
    """Marks nodes that record nothing and precede a node that the run has reached."""
    is_passed = False
    for node in reversed(nodes):
        if is_passed and node.id not in marks and node.kind not in _RECORDED | {NodeKind.ARM}:
            marks[node.id] = NodeMark(NodeState.DONE)
            silent = [arm for arm in node.children if node.kind is NodeKind.BRANCH and _is_silent(arm)]
            if len(silent) == 1:
                marks[silent[0].id] = NodeMark(NodeState.DONE)
        is_passed = is_passed or node.id in marks


def _is_silent(arm: Node) -> bool:
    """True if the code can pass through the arm without a recorded step."""
    kinds = {node.kind for node in walk(arm.children)}
    return not kinds & (_RECORDED | _EXITS)


def _is_done(mark: NodeMark | None) -> bool:
    return mark is not None and mark.state is NodeState.DONE


# Blocks


@dataclass(frozen=True)
class _LayoutBlock:
    left: float
    """From its left border to its axis."""
    right: float
    height: float
    boxes: tuple[Box, ...] = ()
    edges: tuple[Edge, ...] = ()
    """Relative to the top of the axis."""
    is_open: bool = True
    """False if the code cannot continue below it, as after `return`."""
    is_entered: bool = False
    is_left: bool = False

    @property
    def width(self) -> float:
        return self.left + self.right

    def moved(self, x: float, y: float) -> _LayoutBlock:
        boxes = tuple(replace(box, x=box.x + x, y=box.y + y) for box in self.boxes)
        return replace(self, boxes=boxes, edges=tuple(_move_edge(edge, x, y) for edge in self.edges))


def _move_edge(edge: Edge, x: float, y: float) -> Edge:
    points = tuple((a + x, b + y) for a, b in edge.points)
    return replace(edge, points=points, label_at=(edge.label_at[0] + x, edge.label_at[1] + y))


def _stack(blocks: Sequence[_LayoutBlock]) -> _LayoutBlock:
    """Blocks below each other on one axis."""
    boxes: list[Box] = []
    edges: list[Edge] = []
    y, before = 0.0, None
    for block in blocks:
        if before is not None:
            if before.is_open:
                edges.append(Edge(((0, y), (0, y + ROW_GAP)), is_taken=before.is_left and block.is_entered))
            y += ROW_GAP
        moved = block.moved(0, y)
        boxes += moved.boxes
        edges += moved.edges
        y, before = y + block.height, block
    return _LayoutBlock(
        max((block.left for block in blocks), default=0),
        max((block.right for block in blocks), default=0),
        y,
        tuple(boxes),
        tuple(edges),
        blocks[-1].is_open if blocks else True,
        blocks[0].is_entered if blocks else False,
        blocks[-1].is_left if blocks else False,
    )


class _FlowchartLayout:
    def __init__(self, marks: Mapping[str, NodeMark]) -> None:
        self._marks = marks

    def chart(self, structure: Structure) -> _LayoutBlock:
        """With a start and an end box, and no negative x."""
        state = NodeState.DONE if self._marks else NodeState.UNREACHED
        blocks = [
            self._single("start", "start", structure.name, structure.line, NodeMark(state)),
            *map(self._block, structure.nodes),
        ]
        if blocks[-1].is_open:
            last = self._marks.get(structure.nodes[-1].id) if structure.nodes else None
            ended = NodeMark(NodeState.DONE if _is_done(last) else NodeState.UNREACHED)
            blocks.append(self._single("end", "end", "end", structure.line, ended))
        chart = _stack(blocks)
        return chart.moved(chart.left, 0)

    def _block(self, node: Node) -> _LayoutBlock:
        match node.kind:
            case NodeKind.BRANCH | NodeKind.PARALLEL | NodeKind.RACE:
                return self._fan(node)
            case NodeKind.LOOP:
                return self._loop(node)
            case NodeKind.TRY:
                return self._try(node)
            case NodeKind.BLOCK | NodeKind.CALL | NodeKind.ARM:
                return _stack([self._head(node), *map(self._block, node.children)])
            case NodeKind.STEP:
                return self._step(node)
            case _:
                return replace(self._head(node), is_open=node.kind not in _EXITS)

    def _mark_of(self, node: Node) -> NodeMark:
        return self._marks.get(node.id, NodeMark())

    def _head(self, node: Node) -> _LayoutBlock:
        return self._single(node.id, node.kind, _title(node), node.line, self._mark_of(node))

    def _single(self, id: str, kind: str, title: str, line: int, mark: NodeMark) -> _LayoutBlock:
        label = truncate(title, MAX_LABEL_LENGTH)
        half = max(30.0, (len(label) * CHARACTER + 28) / 2)
        box = Box(id, kind, label, title, line, -half, 0, 2 * half, state=mark.state, steps=mark.steps)
        is_entered, is_left = mark.state is not NodeState.UNREACHED, mark.state not in _NOT_LEFT
        return _LayoutBlock(half, half, BOX_HEIGHT, (box,), is_entered=is_entered, is_left=is_left)

    def _step(self, node: Node) -> _LayoutBlock:
        """With its compensations to the right."""
        block = self._head(node)
        for undo in node.children:
            beside = self._head(undo)
            x = block.right + COLUMN_GAP
            line = ((block.right, BOX_HEIGHT / 2), (x, BOX_HEIGHT / 2))
            edge = Edge(line, EdgeKind.UNDO, is_taken=beside.is_entered)
            moved = beside.moved(x + beside.left, 0)
            boxes, edges = (*block.boxes, *moved.boxes), (*block.edges, edge)
            block = replace(block, right=x + beside.width, boxes=boxes, edges=edges)
        return block

    def _fan(self, node: Node) -> _LayoutBlock:
        """Arms side by side below their head."""
        head = self._head(node)
        arms = [self._arm(arm) for arm in node.children]
        axes = _side_by_side(arms)
        middle = (axes[0] + axes[-1]) / 2
        labels = [_arm_label(node, arm) for arm in node.children]
        return self._join(head, list(zip(labels, arms, (axis - middle for axis in axes), strict=True)))

    def _arm(self, arm: Node) -> _LayoutBlock:
        column = _stack([*map(self._block, arm.children)])
        state = self._mark_of(arm).state
        label = len(truncate(arm.text, MAX_ARM_LENGTH)) * CHARACTER + 8
        return replace(
            column,
            left=max(column.left, 12),
            right=max(column.right, label),
            is_entered=state is not NodeState.UNREACHED,
            is_left=state not in _NOT_LEFT,
        )

    def _join(self, head: _LayoutBlock, arms: Sequence[tuple[str, _LayoutBlock, float]]) -> _LayoutBlock:
        top = head.height + ARM_GAP
        bottom = top + max(block.height for _, block, _ in arms) + TURN
        boxes, edges = list(head.boxes), list(head.edges)
        for label, block, x in arms:
            moved = block.moved(x, top)
            boxes += moved.boxes
            edges += moved.edges
            edges.append(_down_to_arm(label, block, x, head.height, top))
            if block.is_open:
                end = top + block.height
                edges.append(_line((x, end), (x, bottom), (0, bottom), is_taken=block.is_left, has_arrow=False))
        return _LayoutBlock(
            max(head.left, *(block.left - x for _, block, x in arms)),
            max(head.right, *(block.right + x for _, block, x in arms)),
            bottom,
            tuple(boxes),
            tuple(edges),
            any(block.is_open for _, block, _ in arms),
            head.is_entered,
            head.is_left,
        )

    def _loop(self, node: Node) -> _LayoutBlock:
        """The body, an edge back to the head on its left, and an edge to the exit on its right."""
        head, body = self._head(node), _stack([*map(self._block, node.children)])
        top = head.height + ROW_GAP
        turn = top + body.height + TURN
        bottom = turn + TURN
        left, right = max(head.left, body.left) + LOOP_GAP, max(head.right, body.right) + LOOP_GAP
        middle = BOX_HEIGHT / 2
        moved = body.moved(0, top)
        edges = [*head.edges, *moved.edges, _line((0, head.height), (0, top), is_taken=body.is_entered)]
        if body.is_open:
            back = ((0, top + body.height), (0, turn), (-left, turn), (-left, middle), (-head.left, middle))
            is_repeated = any(box.times > 1 for box in body.boxes)
            edges.append(Edge(back, EdgeKind.BACK, is_taken=is_repeated))
        exit_points = ((head.right, middle), (right, middle), (right, bottom), (0, bottom))
        edges.append(Edge(exit_points, is_taken=head.is_left, has_arrow=False))
        boxes = (*head.boxes, *moved.boxes)
        return _LayoutBlock(left, right, bottom, boxes, tuple(edges), True, head.is_entered, head.is_left)

    def _try(self, node: Node) -> _LayoutBlock:
        """The body, its exception handlers to the right, and `finally` below."""
        body, *others = node.children
        final = [arm for arm in others if arm.text == "finally"]
        handlers = [self._block(arm) for arm in others if arm not in final]
        guarded = self._caught(self._head(node), _stack([*map(self._block, body.children)]), handlers)
        return _stack([guarded, *map(self._block, final)])

    def _caught(self, head: _LayoutBlock, body: _LayoutBlock, handlers: Sequence[_LayoutBlock]) -> _LayoutBlock:
        top, middle = head.height + ROW_GAP, BOX_HEIGHT / 2
        bottom = top + max(block.height for block in (body, *handlers)) + TURN
        moved = body.moved(0, top)
        boxes, edges = [*head.boxes, *moved.boxes], [*head.edges, *moved.edges]
        edges.append(_line((0, head.height), (0, top), is_taken=body.is_entered))
        if body.is_open:
            end = top + body.height
            edges.append(_line((0, end), (0, bottom), is_taken=body.is_left, has_arrow=False))
        right = max(head.right, body.right)
        for block in handlers:
            x = right + COLUMN_GAP + block.left
            moved = block.moved(x, top)
            boxes += moved.boxes
            points = ((head.right, middle), (x, middle), (x, top))
            edges += [*moved.edges, Edge(points, EdgeKind.ERROR, is_taken=block.is_entered)]
            if block.is_open:
                end = top + block.height
                edges.append(_line((x, end), (x, bottom), (0, bottom), is_taken=block.is_left, has_arrow=False))
            right = x + block.right
        is_open = body.is_open or any(block.is_open for block in handlers)
        left = max(head.left, body.left)
        return _LayoutBlock(left, right, bottom, tuple(boxes), tuple(edges), is_open, head.is_entered, head.is_left)


def _line(*points: Point, is_taken: bool, has_arrow: bool = True) -> Edge:
    return Edge(points, is_taken=is_taken, has_arrow=has_arrow)


def _arm_label(branch: Node, arm: Node) -> str:
    if branch.kind is NodeKind.BRANCH and len(branch.children) == 2 and branch.children[0].text == branch.text:
        return "yes" if arm is branch.children[0] else "no"
    return truncate(arm.text, MAX_ARM_LENGTH)


def _down_to_arm(label: str, block: _LayoutBlock, x: float, start: float, top: float) -> Edge:
    turn = start + TURN
    return Edge(
        ((0, start), (0, turn), (x, turn), (x, top)),
        label=label,
        label_at=(x + 6, turn + 18),
        is_taken=block.is_entered,
        has_arrow=bool(block.boxes),
    )


def _side_by_side(blocks: Sequence[_LayoutBlock]) -> list[float]:
    """The x of each axis."""
    axes, x = [], 0.0
    for block in blocks:
        axes.append(x + block.left)
        x += block.width + COLUMN_GAP
    return axes


def _title(node: Node) -> str:
    if node.kind in _EXITS:
        return f"{node.kind} {node.text}".strip()
    if node.kind in (NodeKind.TIMER, NodeKind.CHILD) or (node.kind is NodeKind.STEP and node.name):
        return f"{node.name} {node.text}".strip()
    return node.name if node.name and node.kind is not NodeKind.BLOCK else node.text or node.kind.value
