"""Which place in a workflow's code each step of a run belongs to.

The history has names, not lines. A name that the code has in several places is told apart by what came before and
after it: of all ways through the code, the one that explains the steps best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from .nodes import Node, NodeKind, Structure, walk

_AS_NODE = {
    "step": NodeKind.STEP,
    "timer": NodeKind.TIMER,
    "event": NodeKind.EVENT,
    "message": NodeKind.MESSAGE,
    "child": NodeKind.CHILD,
    "start": NodeKind.CHILD,
    "retry": NodeKind.STEP,
    "undo": NodeKind.UNDO,
}
_UNDO = "undo:"
_NEXT, _AHEAD, _ELSEWHERE = 0, 1, 10
"""What it costs to go to a place: the next one, one further on, one that cannot be reached from here."""
_START, _END = "start", "end"


class NamedStep(Protocol):
    """A bar of a timeline, or a line of a history."""

    @property
    def step(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...


class Step(Struct, frozen=True):
    id: str
    name: str
    kind: NodeKind


def match_steps(structure: Structure, recorded: Iterable[NamedStep], *, is_over: bool = False) -> dict[str, str]:
    """The id of the node by the id of the step, for all that have one. Steps come in the order they began.

    If the run completed, `is_over`, its last step is one that the code can end after.
    """
    steps = _steps_of(recorded)
    matched: dict[str, str] = {}
    for path, group in _by_path(steps).items():
        nodes = _nodes_of_task(structure, path) or structure.nodes
        matched.update(_match(nodes, group, is_over=is_over and not path))
    return matched | _match_undos(structure, steps, matched)


def _steps_of(recorded: Iterable[NamedStep]) -> tuple[Step, ...]:
    steps: dict[str, Step] = {}
    for one in recorded:
        kind = NodeKind.UNDO if one.step.startswith(_UNDO) else _AS_NODE.get(one.kind)
        if kind is not None:
            steps.setdefault(one.step, Step(one.step, one.name, kind))
    return tuple(steps.values())


def _by_path(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """Each task of a run counts for itself: between them there is no order that the code could tell."""
    groups: dict[str, list[Step]] = {}
    for step in steps:
        if step.kind is not NodeKind.UNDO:
            groups.setdefault(step.id.rpartition("/")[0], []).append(step)
    return groups


def _nodes_of_task(structure: Structure, path: str) -> tuple[Node, ...]:
    """The code of the task `ship_all:2`: the second call of `ship_all`, or the only one, again and again."""
    if not path:
        return ()
    name, _, number = path.rpartition("/")[2].rpartition(":")
    calls = [node for node in structure.walk() if node.kind is NodeKind.CALL and node.name == name]
    if not calls or not number.isdecimal():
        return ()
    return calls[min(int(number), len(calls)) - 1].children


# The best way through the code


def _match(nodes: Sequence[Node], steps: Sequence[Step], *, is_over: bool) -> dict[str, str]:
    known = [(step, found) for step in steps if (found := _candidates(nodes, step))]
    flow = CodeFlow(nodes)
    costs: dict[str, int] = {_START: 0}
    ways: list[dict[str, str]] = []
    for _, candidates in known:
        way: dict[str, str] = {}
        reached: dict[str, int] = {}
        for candidate in candidates:
            way[candidate] = min(costs, key=lambda one: costs[one] + flow.cost(one, candidate))
            reached[candidate] = costs[way[candidate]] + flow.cost(way[candidate], candidate)
        ways.append(way)
        costs = reached
    if not known:
        return {}
    last = min(costs, key=lambda one: costs[one] + (flow.cost(one, _END) if is_over else 0))
    return _go_back(last, ways, [step for step, _ in known])


def _go_back(last: str, ways: Sequence[Mapping[str, str]], steps: Sequence[Step]) -> dict[str, str]:
    matched = {}
    for step, way in zip(reversed(steps), reversed(ways), strict=True):
        matched[step.id] = last
        last = way[last]
    return dict(reversed(matched.items()))


def _candidates(nodes: Sequence[Node], step: Step) -> list[str]:
    """Those with its id, else those with its name, else those whose name only the running code knew."""
    leaves = [node for node in walk(nodes) if _kind_of(node) is step.kind]
    return (
        [node.id for node in leaves if node.step and node.step == step.id]
        or [node.id for node in leaves if node.name == step.name and not node.step]
        or [node.id for node in leaves if not node.name]
    )


def _kind_of(node: Node) -> NodeKind:
    is_timed = node.kind is NodeKind.BLOCK and node.name == "timer"
    return NodeKind.TIMER if is_timed else node.kind


_RECORDED = frozenset(_AS_NODE.values()) - {NodeKind.UNDO}


class CodeFlow:
    """Which place can follow which. Points of the code are the ids of nodes, and `id!` where they are left."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._edges: dict[str, set[str]] = {}
        self._stops = {node.id for node in walk(nodes) if _kind_of(node) in _RECORDED}
        self._next: dict[str, frozenset[str]] = {}
        self._ahead: dict[str, frozenset[str]] = {}
        self._sequence(_START, nodes, _END, CodeExits(_END, _END, _END))

    def cost(self, here: str, there: str) -> int:
        if here not in self._next:
            self._next[here] = self._reach(here, self._stops)
            self._ahead[here] = self._reach(here, set())
        if there in self._next[here]:
            return _NEXT
        return _AHEAD if there in self._ahead[here] else _ELSEWHERE

    def _reach(self, here: str, stops: set[str]) -> frozenset[str]:
        seen: set[str] = set()
        left = list(self._edges.get(here, ()))
        while left:
            point = left.pop()
            if point not in seen:
                seen.add(point)
                left.extend(() if point in stops else self._edges.get(point, ()))
        return frozenset(seen)

    def _link(self, here: str, there: str) -> None:
        self._edges.setdefault(here, set()).add(there)

    def _sequence(self, before: str, nodes: Sequence[Node], after: str, exits: CodeExits) -> None:
        for node in nodes:
            self._link(before, node.id)
            self._node(node, exits)
            before = f"{node.id}!"
        self._link(before, after)

    def _node(self, node: Node, exits: CodeExits) -> None:
        here, after = node.id, f"{node.id}!"
        match node.kind:
            case NodeKind.BRANCH:
                for arm in node.children:
                    self._sequence(here, arm.children, after, exits)
            case NodeKind.PARALLEL | NodeKind.RACE:
                self._link(here, after)
                for arm in node.children:
                    self._sequence(here, arm.children, after, exits)
                    self._sequence(after, arm.children, after, exits)
            case NodeKind.LOOP:
                self._link(here, after)
                self._sequence(here, node.children, here, CodeExits(exits.end, after, here))
            case NodeKind.TRY:
                self._try(node, exits)
            case NodeKind.CALL:
                self._sequence(here, node.children, after, CodeExits(after, _END, _END))
            case NodeKind.BLOCK:
                self._sequence(here, node.children, after, exits)
            case _:
                self._link(here, exits.of(node.kind) or after)

    def _try(self, node: Node, exits: CodeExits) -> None:
        here, after = node.id, f"{node.id}!"
        body, *others = node.children
        final = next((arm for arm in others if arm.text == "finally"), None)
        handlers = [arm for arm in others if arm is not final]
        done = after if final is None else final.id
        self._sequence(here, body.children, done, exits)
        for handler in handlers:
            self._sequence(handler.id, handler.children, done, exits)
        if final is not None:
            self._sequence(final.id, final.children, after, exits)
            self._link(after, exits.end)  # also what returned or raised comes through here
        for inner in walk(body.children):
            for arm in others:
                self._link(inner.id, arm.id)


class CodeExits(Struct, frozen=True):
    """Where the code goes that does not go on to the next line."""

    end: str
    after_loop: str
    loop: str

    def of(self, kind: NodeKind) -> str | None:
        if kind in (NodeKind.RETURN, NodeKind.RAISE, NodeKind.RECUR):
            return self.end
        return {NodeKind.BREAK: self.after_loop, NodeKind.CONTINUE: self.loop}.get(kind)


# Undoing


def _match_undos(structure: Structure, steps: Sequence[Step], matched: Mapping[str, str]) -> dict[str, str]:
    """The last thing first: each step's own, or where it was registered."""
    nodes = {node.id: node for node in structure.walk()}
    owned = {child.id: child for node in nodes.values() for child in node.children if node.kind is NodeKind.STEP}
    done = [child for id in matched.values() for child in nodes[id].children if child.id in owned]
    free = [node for node in nodes.values() if node.kind is NodeKind.UNDO and node.id not in owned]
    found = {}
    for step in steps:
        if step.kind is NodeKind.UNDO:
            own = next((node for node in reversed(done) if node.name == step.name), None)
            if own is not None:
                done.remove(own)
            known = own or next((node for node in free if node.name in (step.name, "")), None)
            if known is not None:
                found[step.id] = known.id
    return found
