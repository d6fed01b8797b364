"""A workflow's structure as a flow chart from top to bottom, with what a run did: plain geometry for a page to draw.

Every part of the code is laid out as a piece that is entered at its top and left at its bottom, on its axis. Pieces
stand below each other or side by side and never overlap, so neither do boxes; lines run between pieces only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

import msgspec

from edda.control.code_graph.match import match_steps
from edda.control.code_graph.nodes import Node, NodeKind, Structure, walk
from edda.control.views import Bar, BarState, DefinitionView, Timeline
from edda.core.value_path import truncate

BOX_HEIGHT = 30.0
ROW_GAP = 26.0
COLUMN_GAP = 28.0
LANE = 20.0
"""Between what a loop repeats and the lines around it."""
ARM_GAP = 44.0
"""Below what forks: a line to the side, and the arm's label."""
TURN = 12.0
"""How far a line goes straight before it turns."""
MARGIN = 16.0
CHARACTER = 7.0
LONGEST_LABEL = 38
LONGEST_ARM = 26

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
    """To the next round of a loop."""
    ERROR = "error"
    UNDO = "undo"


@dataclass(frozen=True)
class NodeMark:
    """What a run did at one place of the code."""

    state: NodeState = NodeState.UNREACHED
    steps: tuple[str, ...] = ()
    """Ids, in the order they began: a loop has many."""


@dataclass(frozen=True)
class Box:
    id: str
    kind: str
    label: str
    title: str
    """The label in full."""
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
    """Lines that only join others have none."""


@dataclass(frozen=True)
class Graph:
    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


def draw(structure: Structure, bars: Sequence[Bar] = (), *, is_over: bool = False) -> Graph:
    """`is_over`: the run completed, so its way led to the end."""
    marks = mark(structure, bars, is_over=is_over)
    whole = _FlowchartLayout(marks).whole(structure)
    return Graph(
        whole.width + 2 * MARGIN,
        whole.height + 2 * MARGIN,
        tuple(_move_box(box, MARGIN, MARGIN) for box in whole.boxes),
        tuple(_move_edge(edge, MARGIN, MARGIN) for edge in whole.edges),
    )


# What the run did

_FIRST = (NodeState.RUNNING, NodeState.WAITING, NodeState.FAILED, NodeState.OVER, NodeState.DONE)
"""What is said of a place that holds others in several states."""
_RECORDED = {NodeKind.STEP, NodeKind.TIMER, NodeKind.EVENT, NodeKind.MESSAGE, NodeKind.CHILD}
_TURNS = {NodeKind.RETURN, NodeKind.RAISE, NodeKind.BREAK, NodeKind.CONTINUE, NodeKind.RECUR}
_HERE = (NodeState.UNREACHED, NodeState.RUNNING, NodeState.WAITING)
_STATES = {state: NodeState(state.value) for state in BarState}


def mark(structure: Structure, bars: Sequence[Bar], *, is_over: bool = False) -> dict[str, NodeMark]:
    """By node; places that the run was not at are left out."""
    matched = match_steps(structure, bars, is_over=is_over)
    found: dict[str, list[Bar]] = {}
    for bar in bars:
        if bar.step in matched:
            found.setdefault(matched[bar.step], []).append(bar)
    marks = {id: NodeMark(_state_of(known), tuple(bar.step for bar in known)) for id, known in found.items()}
    _mark_around(structure.nodes, marks, is_over)
    return marks


def _state_of(bars: Sequence[Bar]) -> NodeState:
    """That of the last round, unless another is still going on."""
    states = [_STATES[bar.state] for bar in bars]
    return next((state for state in _FIRST[:2] if state in states), states[-1])


def _mark_around(nodes: Sequence[Node], marks: dict[str, NodeMark], is_over: bool) -> None:
    for node in nodes:
        _mark_around(node.children, marks, is_over)
        states = [marks[child.id].state for child in node.children if child.id in marks]
        if node.id not in marks and states and node.kind is not NodeKind.STEP:
            marks[node.id] = NodeMark(_whole_state(states))
    _mark_return(nodes, marks, is_over)
    _mark_passed(nodes, marks)


def _whole_state(states: Sequence[NodeState]) -> NodeState:
    """Of what holds others: where one failed and the run went on, it is not the whole that failed."""
    if NodeState.FAILED in states and states[-1] is not NodeState.FAILED:
        states = [state for state in states if state is not NodeState.FAILED]
    return min(states, key=_FIRST.index)


def _mark_return(nodes: Sequence[Node], marks: dict[str, NodeMark], is_over: bool) -> None:
    """It is not recorded: what came right before it was."""
    for before, node in pairwise(nodes):
        if is_over and node.kind is NodeKind.RETURN and _is_done(marks.get(before.id)):
            marks[node.id] = NodeMark(NodeState.DONE)


def _mark_passed(nodes: Sequence[Node], marks: dict[str, NodeMark]) -> None:
    """What leaves no record, though the run must have come by: it was further on."""
    is_further_on = False
    for node in reversed(nodes):
        if is_further_on and node.id not in marks and node.kind not in _RECORDED | {NodeKind.ARM}:
            marks[node.id] = NodeMark(NodeState.DONE)
            silent = [arm for arm in node.children if node.kind is NodeKind.BRANCH and _is_silent(arm)]
            if len(silent) == 1:
                marks[silent[0].id] = NodeMark(NodeState.DONE)
        is_further_on = is_further_on or node.id in marks


def _is_silent(arm: Node) -> bool:
    """Whether the code can go through it to what is below and record nothing."""
    kinds = {node.kind for node in walk(arm.children)}
    return not kinds & (_RECORDED | _TURNS)


def _is_done(mark: NodeMark | None) -> bool:
    return mark is not None and mark.state is NodeState.DONE


# Pieces


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
    """Whether the code goes on below it."""
    is_entered: bool = False
    is_left: bool = False

    @property
    def width(self) -> float:
        return self.left + self.right

    def moved(self, x: float, y: float) -> _LayoutBlock:
        boxes = tuple(_move_box(box, x, y) for box in self.boxes)
        return replace(self, boxes=boxes, edges=tuple(_move_edge(edge, x, y) for edge in self.edges))


def _move_box(box: Box, x: float, y: float) -> Box:
    return replace(box, x=box.x + x, y=box.y + y)


def _move_edge(edge: Edge, x: float, y: float) -> Edge:
    points = tuple((a + x, b + y) for a, b in edge.points)
    return replace(edge, points=points, label_at=(edge.label_at[0] + x, edge.label_at[1] + y))


def _stack(pieces: Sequence[_LayoutBlock]) -> _LayoutBlock:
    """One below the other, on one axis."""
    boxes: list[Box] = []
    edges: list[Edge] = []
    y, before = 0.0, None
    for piece in pieces:
        if before is not None:
            if before.is_open:
                edges.append(Edge(((0, y), (0, y + ROW_GAP)), is_taken=before.is_left and piece.is_entered))
            y += ROW_GAP
        moved = piece.moved(0, y)
        boxes += moved.boxes
        edges += moved.edges
        y, before = y + piece.height, piece
    return _LayoutBlock(
        max((piece.left for piece in pieces), default=0),
        max((piece.right for piece in pieces), default=0),
        y,
        tuple(boxes),
        tuple(edges),
        pieces[-1].is_open if pieces else True,
        pieces[0].is_entered if pieces else False,
        pieces[-1].is_left if pieces else False,
    )


class _FlowchartLayout:
    def __init__(self, marks: Mapping[str, NodeMark]) -> None:
        self._marks = marks

    def whole(self, structure: Structure) -> _LayoutBlock:
        """With its beginning and its end; moved so that nothing is left of zero."""
        is_begun = bool(self._marks)
        state = NodeState.DONE if is_begun else NodeState.UNREACHED
        title = structure.name
        pieces = [
            self._single("start", "start", title, structure.line, NodeMark(state)),
            *map(self._piece, structure.nodes),
        ]
        if pieces[-1].is_open:
            last = self._marks.get(structure.nodes[-1].id) if structure.nodes else None
            ended = NodeMark(NodeState.DONE if _is_done(last) else NodeState.UNREACHED)
            pieces.append(self._single("end", "end", "end", structure.line, ended))
        whole = _stack(pieces)
        return whole.moved(whole.left, 0)

    def _column(self, nodes: Iterable[Node]) -> _LayoutBlock:
        return _stack([self._piece(node) for node in nodes])

    def _piece(self, node: Node) -> _LayoutBlock:
        match node.kind:
            case NodeKind.BRANCH | NodeKind.PARALLEL | NodeKind.RACE:
                return self._fan(node)
            case NodeKind.LOOP:
                return self._loop(node)
            case NodeKind.TRY:
                return self._try(node)
            case NodeKind.BLOCK | NodeKind.CALL | NodeKind.ARM:
                return _stack([self._head(node), *map(self._piece, node.children)])
            case NodeKind.STEP:
                return self._step(node)
            case _:
                return replace(self._head(node), is_open=node.kind not in _TURNS)

    def _mark_of(self, node: Node) -> NodeMark:
        return self._marks.get(node.id, NodeMark())

    def _head(self, node: Node) -> _LayoutBlock:
        return self._single(node.id, node.kind, _title(node), node.line, self._mark_of(node))

    def _single(self, id: str, kind: str, title: str, line: int, mark: NodeMark) -> _LayoutBlock:
        label = truncate(title, LONGEST_LABEL)
        half = max(30.0, (len(label) * CHARACTER + 28) / 2)
        box = Box(id, kind, label, title, line, -half, 0, 2 * half, state=mark.state, steps=mark.steps)
        is_entered, is_left = mark.state is not NodeState.UNREACHED, mark.state not in _HERE
        return _LayoutBlock(half, half, BOX_HEIGHT, (box,), is_entered=is_entered, is_left=is_left)

    def _step(self, node: Node) -> _LayoutBlock:
        """What undoes it stands beside it."""
        piece = self._head(node)
        for undo in node.children:
            beside = self._head(undo)
            x = piece.right + COLUMN_GAP
            line = ((piece.right, BOX_HEIGHT / 2), (x, BOX_HEIGHT / 2))
            edge = Edge(line, EdgeKind.UNDO, is_taken=beside.is_entered)
            moved = beside.moved(x + beside.left, 0)
            boxes, edges = (*piece.boxes, *moved.boxes), (*piece.edges, edge)
            piece = replace(piece, right=x + beside.width, boxes=boxes, edges=edges)
        return piece

    def _fan(self, node: Node) -> _LayoutBlock:
        """Arms side by side, below what they fork from."""
        head = self._head(node)
        arms = [self._arm(arm) for arm in node.children]
        places = _side_by_side(arms)
        middle = (places[0] + places[-1]) / 2
        labels = [_arm_label(node, arm) for arm in node.children]
        return self._join(head, list(zip(labels, arms, (place - middle for place in places), strict=True)))

    def _arm(self, arm: Node) -> _LayoutBlock:
        column = self._column(arm.children)
        state = self._mark_of(arm).state
        label = len(truncate(arm.text, LONGEST_ARM)) * CHARACTER + 8
        return replace(
            column,
            left=max(column.left, 12),
            right=max(column.right, label),
            is_entered=state is not NodeState.UNREACHED,
            is_left=state not in _HERE,
        )

    def _join(self, head: _LayoutBlock, arms: Sequence[tuple[str, _LayoutBlock, float]]) -> _LayoutBlock:
        top = head.height + ARM_GAP
        bottom = top + max(piece.height for _, piece, _ in arms) + TURN
        boxes, edges = list(head.boxes), list(head.edges)
        for label, piece, x in arms:
            moved = piece.moved(x, top)
            boxes += moved.boxes
            edges += moved.edges
            edges.append(_down_to_arm(label, piece, x, head.height, top))
            if piece.is_open:
                end = top + piece.height
                edges.append(_line((x, end), (x, bottom), (0, bottom), is_taken=piece.is_left, has_arrow=False))
        return _LayoutBlock(
            max(head.left, *(piece.left - x for _, piece, x in arms)),
            max(head.right, *(piece.right + x for _, piece, x in arms)),
            bottom,
            tuple(boxes),
            tuple(edges),
            any(piece.is_open for _, piece, _ in arms),
            head.is_entered,
            head.is_left,
        )

    def _loop(self, node: Node) -> _LayoutBlock:
        """What is repeated, with a line back on its left, and one that leaves it on its right."""
        head, body = self._head(node), self._column(node.children)
        top = head.height + ROW_GAP
        turn = top + body.height + TURN
        bottom = turn + TURN
        left, right = max(head.left, body.left) + LANE, max(head.right, body.right) + LANE
        middle = BOX_HEIGHT / 2
        moved = body.moved(0, top)
        edges = [*head.edges, *moved.edges, _line((0, head.height), (0, top), is_taken=body.is_entered)]
        if body.is_open:
            back = ((0, top + body.height), (0, turn), (-left, turn), (-left, middle), (-head.left, middle))
            edges.append(Edge(back, EdgeKind.BACK, is_taken=len(_steps_in(body)) > len(set(_places_in(body)))))
        way_out = ((head.right, middle), (right, middle), (right, bottom), (0, bottom))
        edges.append(Edge(way_out, is_taken=head.is_left, has_arrow=False))
        boxes = (*head.boxes, *moved.boxes)
        return _LayoutBlock(left, right, bottom, boxes, tuple(edges), True, head.is_entered, head.is_left)

    def _try(self, node: Node) -> _LayoutBlock:
        """What may fail in the middle, what catches on its right, what is done in any case below."""
        body, *others = node.children
        final = [arm for arm in others if arm.text == "finally"]
        handlers = [self._piece(arm) for arm in others if arm not in final]
        whole = self._caught(self._head(node), self._column(body.children), handlers)
        return _stack([whole, *map(self._piece, final)])

    def _caught(self, head: _LayoutBlock, body: _LayoutBlock, handlers: Sequence[_LayoutBlock]) -> _LayoutBlock:
        top, middle = head.height + ROW_GAP, BOX_HEIGHT / 2
        bottom = top + max(piece.height for piece in (body, *handlers)) + TURN
        moved = body.moved(0, top)
        boxes, edges = [*head.boxes, *moved.boxes], [*head.edges, *moved.edges]
        edges.append(_line((0, head.height), (0, top), is_taken=body.is_entered))
        if body.is_open:
            end = top + body.height
            edges.append(_line((0, end), (0, bottom), is_taken=body.is_left, has_arrow=False))
        right = max(head.right, body.right)
        for piece in handlers:
            x = right + COLUMN_GAP + piece.left
            moved = piece.moved(x, top)
            boxes += moved.boxes
            way_in = ((head.right, middle), (x, middle), (x, top))
            edges += [*moved.edges, Edge(way_in, EdgeKind.ERROR, is_taken=piece.is_entered)]
            if piece.is_open:
                end = top + piece.height
                edges.append(_line((x, end), (x, bottom), (0, bottom), is_taken=piece.is_left, has_arrow=False))
            right = x + piece.right
        is_open = body.is_open or any(piece.is_open for piece in handlers)
        left = max(head.left, body.left)
        return _LayoutBlock(left, right, bottom, tuple(boxes), tuple(edges), is_open, head.is_entered, head.is_left)


def _line(*points: Point, is_taken: bool, has_arrow: bool = True) -> Edge:
    return Edge(points, is_taken=is_taken, has_arrow=has_arrow)


def _arm_label(branch: Node, arm: Node) -> str:
    if branch.kind is NodeKind.BRANCH and len(branch.children) == 2 and branch.children[0].text == branch.text:
        return "yes" if arm is branch.children[0] else "no"
    return truncate(arm.text, LONGEST_ARM)


def _down_to_arm(label: str, piece: _LayoutBlock, x: float, start: float, top: float) -> Edge:
    turn = start + TURN
    return Edge(
        ((0, start), (0, turn), (x, turn), (x, top)),
        label=label,
        label_at=(x + 6, turn + 18),
        is_taken=piece.is_entered,
        has_arrow=bool(piece.boxes),
    )


def _side_by_side(pieces: Sequence[_LayoutBlock]) -> list[float]:
    """Where the axis of each is."""
    places, x = [], 0.0
    for piece in pieces:
        places.append(x + piece.left)
        x += piece.width + COLUMN_GAP
    return places


def _steps_in(piece: _LayoutBlock) -> list[str]:
    return [step for box in piece.boxes for step in box.steps]


def _places_in(piece: _LayoutBlock) -> list[str]:
    return [box.id for box in piece.boxes if box.steps]


def _title(node: Node) -> str:
    if node.kind in _TURNS:
        return f"{node.kind} {node.text}".strip()
    if node.kind in (NodeKind.TIMER, NodeKind.CHILD) or (node.kind is NodeKind.STEP and node.name):
        return f"{node.name} {node.text}".strip()
    return node.name if node.name and node.kind is not NodeKind.BLOCK else node.text or node.kind.value


def draw_chart(definition: DefinitionView | None, timeline: Timeline, *, is_over: bool) -> Graph | None:
    """None if nobody has told what the code does, or in a way that this release does not know."""
    if definition is None or definition.structure is None:
        return None
    try:
        structure = msgspec.convert(definition.structure, Structure)
    except msgspec.ValidationError:
        return None
    return draw(structure, timeline.bars, is_over=is_over)
