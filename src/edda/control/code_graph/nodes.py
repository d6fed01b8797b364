"""What a workflow's code does, in order, as plain records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct


class NodeKind(StrEnum):
    # What a run records
    STEP = "step"
    TIMER = "timer"
    EVENT = "event"
    MESSAGE = "message"
    CHILD = "child"
    UNDO = "undo"
    """How to undo: below the step it belongs to, or where it is registered."""

    # What holds others
    BRANCH = "branch"
    """Its children are arms, one of which is taken, or none."""
    LOOP = "loop"
    TRY = "try"
    """Its children are arms: the body, then what catches, then what is done in any case."""
    PARALLEL = "parallel"
    """Its children are arms that go on at the same time."""
    RACE = "race"
    """As parallel, but the first is enough."""
    BLOCK = "block"
    """Under a `with`."""
    CALL = "call"
    """A function that the workflow gives its context to."""
    ARM = "arm"

    # Where it goes elsewhere
    RETURN = "return"
    RAISE = "raise"
    BREAK = "break"
    CONTINUE = "continue"
    RECUR = "recur"


class Node(Struct, frozen=True, omit_defaults=True):
    kind: NodeKind
    line: int
    """In its file."""
    name: str = ""
    """As in the history; empty if only the running code knows it."""
    text: str = ""
    """For the reader: a condition, what is iterated, what is returned."""
    children: tuple[Node, ...] = ()
    id: str = ""
    """Its place, such as `2.0.1`."""
    step: str = ""
    """The id of the step, if the code gives one."""


class Structure(Struct, frozen=True):
    name: str
    file: str
    line: int
    nodes: tuple[Node, ...]

    def walk(self) -> Iterator[Node]:
        """All nodes, in the order of the code."""
        return walk(self.nodes)

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Structure:
        return msgspec.convert(value, cls)


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from walk(node.children)
