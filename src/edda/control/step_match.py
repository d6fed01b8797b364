"""`match_steps`: finds the node of the code for each step of a run.

The history has names, not line numbers. If a name occurs several times in the code, the path of lowest cost through
the control flow decides, by dynamic programming over the steps in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from .code_graph import Node, NodeKind, Structure, walk

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
_NEXT, _LATER, _UNREACHABLE = 0, 1, 10
"""Costs of a transition: to a next recorded node, to one that is reachable later, to one that is not reachable."""
_START, _END = "start", "end"


class NamedStep(Protocol):
    """A bar of a timeline, or a history entry."""

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
    """Node ids by step ids, for each step that has a node. `recorded` is in the order in which the steps started.

    `is_over`: the run has completed, so the code can end after its last step.
    """
    steps: dict[str, Step] = {}
    for one in recorded:
        kind = NodeKind.UNDO if one.step.startswith(_UNDO) else _AS_NODE.get(one.kind)
        if kind is not None:
            steps.setdefault(one.step, Step(one.step, one.name, kind))
    tasks: dict[str, list[Step]] = {}  # the code defines no order between the steps of two tasks
    for step in steps.values():
        if step.kind is not NodeKind.UNDO:
            tasks.setdefault(step.id.rpartition("/")[0], []).append(step)
    matched: dict[str, str] = {}
    for path, group in tasks.items():
        nodes = _nodes_of_task(structure, path) or structure.nodes
        matched.update(_match(nodes, group, is_over=is_over and not path))
    return matched | _match_undos(structure, [*steps.values()], matched)


def _nodes_of_task(structure: Structure, path: str) -> tuple[Node, ...]:
    """The code of the task `ship_all:2` is the second call of `ship_all`, or the last one if there are fewer calls."""
    if not path:
        return ()
    name, _, number = path.rpartition("/")[2].rpartition(":")
    calls = [node for node in walk(structure.nodes) if node.kind is NodeKind.CALL and node.name == name]
    if not calls or not number.isdecimal():
        return ()
    return calls[min(int(number), len(calls)) - 1].children


# The path of lowest cost


def _match(nodes: Sequence[Node], steps: Sequence[Step], *, is_over: bool) -> dict[str, str]:
    known = [(step, found) for step in steps if (found := _candidates(nodes, step))]
    if not known:
        return {}
    flow = CodeFlow(nodes)
    costs: dict[str, int] = {_START: 0}
    predecessors: list[dict[str, str]] = []
    for _, candidates in known:
        best: dict[str, str] = {}
        next_costs: dict[str, int] = {}
        for candidate in candidates:
            best[candidate] = min(costs, key=lambda one: costs[one] + flow.cost(one, candidate))
            next_costs[candidate] = costs[best[candidate]] + flow.cost(best[candidate], candidate)
        predecessors.append(best)
        costs = next_costs
    last = min(costs, key=lambda one: costs[one] + (flow.cost(one, _END) if is_over else 0))
    matched = {}
    for (step, _), best in zip(reversed(known), reversed(predecessors), strict=True):
        matched[step.id] = last
        last = best[last]
    return dict(reversed(matched.items()))


def _candidates(nodes: Sequence[Node], step: Step) -> list[str]:
    """Nodes with its id, else nodes with its name, else nodes whose name is computed at run time."""
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


Exits = dict[NodeKind, str]
"""Targets of `return`, `raise`, `recur`, `break` and `continue`."""
_LEAVE = (NodeKind.RETURN, NodeKind.RAISE, NodeKind.RECUR, NodeKind.BREAK, NodeKind.CONTINUE)


class CodeFlow:
    """The control flow graph. Its points are the ids of nodes, and `id!` for the end of a node."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._edges: dict[str, set[str]] = {}
        self._stops = {node.id for node in walk(nodes) if _kind_of(node) in _RECORDED}
        self._next: dict[str, frozenset[str]] = {}
        self._later: dict[str, frozenset[str]] = {}
        self._sequence(_START, nodes, _END, dict.fromkeys(_LEAVE, _END))

    def cost(self, here: str, there: str) -> int:
        if here not in self._next:
            self._next[here] = self._reach(here, self._stops)
            self._later[here] = self._reach(here, set())
        if there in self._next[here]:
            return _NEXT
        return _LATER if there in self._later[here] else _UNREACHABLE

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

    def _sequence(self, before: str, nodes: Sequence[Node], after: str, exits: Exits) -> None:
        for node in nodes:
            self._link(before, node.id)
            self._node(node, exits)
            before = f"{node.id}!"
        self._link(before, after)

    def _node(self, node: Node, exits: Exits) -> None:
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
                self._sequence(here, node.children, here, exits | {NodeKind.BREAK: after, NodeKind.CONTINUE: here})
            case NodeKind.TRY:
                self._try(node, exits)
            case NodeKind.CALL:
                self._sequence(here, node.children, after, dict.fromkeys(_LEAVE, after))
            case NodeKind.BLOCK:
                self._sequence(here, node.children, after, exits)
            case _:
                self._link(here, exits.get(node.kind, after))

    def _try(self, node: Node, exits: Exits) -> None:
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
            self._link(
                after, exits[NodeKind.RETURN]
            )  # a return or raise in the body runs the `finally` and then leaves
        for inner in walk(body.children):
            for arm in others:
                self._link(inner.id, arm.id)


# Compensations


def _match_undos(structure: Structure, steps: Sequence[Step], matched: Mapping[str, str]) -> dict[str, str]:
    """Compensations run in reverse order: each matches the node below its step, or a `register_compensation` call."""
    nodes = {node.id: node for node in walk(structure.nodes)}
    owned = {child.id: child for node in nodes.values() for child in node.children if node.kind is NodeKind.STEP}
    done = [child for id in matched.values() for child in nodes[id].children if child.id in owned]
    registered = [node for node in nodes.values() if node.kind is NodeKind.UNDO and node.id not in owned]
    found = {}
    for step in steps:
        if step.kind is NodeKind.UNDO:
            own = next((node for node in reversed(done) if node.name == step.name), None)
            if own is not None:
                done.remove(own)
            known = own or next((node for node in registered if node.name in (step.name, "")), None)
            if known is not None:
                found[step.id] = known.id
    return found
