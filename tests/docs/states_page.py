"""Writes docs/reference/states.md out of core/states.py: `python -m tests.docs.states_page`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from itertools import pairwise

from edda.core import states
from edda.core.states import ENDED, MOVES, WAITING, RunStatus

from .pages import DOCS

PAGE = DOCS / "reference" / "states.md"

LATER = frozenset(
    {
        RunStatus.WAITING_FOR_MESSAGE,
        RunStatus.RECURRED,
    }
)
"""Reserved: nothing in this release leads there."""

MEANINGS = {
    RunStatus.WAITING_FOR_EVENT: "Not in memory until an event arrives, or the time to wait for it is over.",
    RunStatus.WAITING_FOR_TIMER: "Not in memory until its timer, its next attempt or its deadline is due.",
    RunStatus.WAITING_FOR_CHILD: "Not in memory until another run ends.",
    RunStatus.COMPLETED: "Its function returned.",
    RunStatus.FAILED: "Its function raised, it passed its deadline, its history grew too long, or undoing failed.",
    RunStatus.CANCELLED: "It was asked to stop, and did.",
}

INTRODUCTION = """# States

<!-- Written by `python -m tests.docs.states_page` out of src/edda/core/states.py. Do not edit. -->

What `await handle.status()` says: a `RunStatus`, which is a string. The moves below are the only
ones, and the database itself refuses other names.

"""


def docs_of_members() -> dict[str, str]:
    """The text below each member, which Python itself does not keep."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(states)).body if isinstance(node, ast.ClassDef))
    found = {}
    for member, below in pairwise(body):
        match member, below:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


def meaning(status: RunStatus, documented: dict[str, str]) -> str:
    text = MEANINGS.get(status) or documented.get(status.name) or "Not in memory until that arrives."
    return f"{text} (Reserved: not reached yet.)" if status in LATER else text


def in_order(some: Iterable[RunStatus]) -> list[RunStatus]:
    wanted = frozenset(some)
    return [status for status in RunStatus if status in wanted]


def table() -> str:
    documented = docs_of_members()
    rows = ["| State | Means | Next |", "|---|---|---|"]
    for status in RunStatus:
        following = ", ".join(f"`{after}`" for after in in_order(MOVES[status])) or "none: it has ended"
        rows.append(f"| `{status}` | {meaning(status, documented)} | {following} |")
    return "\n".join(rows)


def diagram() -> str:
    """Without what is reserved, for it would only hide the rest."""
    used = [status for status in RunStatus if status not in LATER]
    lines = ["stateDiagram-v2", "    [*] --> running"]
    lines += [f"    {before} --> {after}" for before in used for after in in_order(MOVES[before]) if after in used]
    lines += [f"    {status} --> [*]" for status in in_order(ENDED) if status in used]
    return "\n".join(["```mermaid", *lines, "```"])


def page() -> str:
    waiting = ", ".join(f"`{status}`" for status in in_order(WAITING))
    ended = ", ".join(f"`{status}`" for status in in_order(ENDED))
    groups = f"Waiting, and so not in memory: {waiting}.\n\nEnded, for good: {ended}.\n"
    return f"{INTRODUCTION}{table()}\n\n{groups}\n{diagram()}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
