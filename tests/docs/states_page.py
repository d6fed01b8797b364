"""Writes docs/reference/states.md out of core/states.py: `python -m tests.docs.states_page`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from itertools import pairwise

from edda.core import states
from edda.core.states import ENDED, TRANSITIONS, WAITING, RunStatus

from ..matrix.table import AGAIN, GONE, INPUTS, REFUSED, SAME, STATES, rows
from .pages import DOCS

PAGE = DOCS / "reference" / "states.md"

LATER = frozenset({RunStatus.RECURRED})
"""Reserved: no code of this release stores it."""
RETRIED = frozenset({RunStatus.FAILED, RunStatus.CANCELLED})
"""What `Steering.reopen` opens again."""

MEANINGS = {
    RunStatus.WAITING_FOR_EVENT: "Not in memory until an event arrives, or the time to wait for it is over.",
    RunStatus.WAITING_FOR_TIMER: "Not in memory until its timer, its next attempt or its deadline is due.",
    RunStatus.WAITING_FOR_MESSAGE: "Not in memory until a message arrives, or the time to wait for it is over.",
    RunStatus.WAITING_FOR_CHILD: "Not in memory until another run ends.",
    RunStatus.COMPLETED: "Its function returned.",
    RunStatus.FAILED: "Its function raised, it passed its deadline, its history grew too long, or undoing failed.",
    RunStatus.CANCELLED: "It was asked to stop, and did.",
    RunStatus.RECURRED: (
        "Reserved: no run has it today. One that calls `ctx.recur()` stays `running`, in its next generation."
    ),
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
    return MEANINGS.get(status) or " ".join(documented[status.name].split())


def following(status: RunStatus) -> str:
    found = ", ".join(f"`{after}`" for after in in_order(TRANSITIONS[status] - LATER))
    if status in RETRIED:
        return "`running`, if it is retried by hand"
    return found or ("" if status in LATER else "none: it has ended")


def in_order(some: Iterable[RunStatus]) -> list[RunStatus]:
    wanted = frozenset(some)
    return [status for status in RunStatus if status in wanted]


def table() -> str:
    documented = docs_of_members()
    rows = ["| State | Means | Next |", "|---|---|---|"]
    for status in RunStatus:
        rows.append(f"| `{status}` | {meaning(status, documented)} | {following(status)} |")
    return "\n".join(rows)


def diagram() -> str:
    """Without what is reserved, for it would only hide the rest."""
    used = [status for status in RunStatus if status not in LATER]
    lines = ["stateDiagram-v2", "    [*] --> running"]
    lines += [
        f"    {before} --> {after}" for before in used for after in in_order(TRANSITIONS[before]) if after in used
    ]
    lines += [f"    {status} --> [*]" for status in in_order(ENDED) if status in used]
    return "\n".join(["```mermaid", *lines, "```"])


MEANING_OF_CELLS = {SAME: "", REFUSED: "refused", AGAIN: "the step runs again", GONE: "gone"}


def outcomes() -> str:
    """The table that tests/matrix holds every database to."""
    cells = rows()
    lines = [f"| A run that | {' | '.join(INPUTS.values())} |", "|---" * (len(INPUTS) + 1) + "|"]
    for state, meaning in STATES.items():
        shown = (MEANING_OF_CELLS.get(cells[state, given], STATUS_OF.get(cells[state, given])) for given in INPUTS)
        lines.append(f"| {meaning} | {' | '.join(one or '' for one in shown)} |")
    return OUTCOMES + "\n".join(lines) + "\n"


STATUS_OF = {status.value: f"`{status}`" for status in RunStatus} | {"event": f"`{RunStatus.WAITING_FOR_EVENT}`"}
OUTCOMES = """
## What each input does in each state

An empty cell: the run stays as it is, and what arrived is kept for it. *Refused*: the call raises an error and changes
nothing. *Gone*: no run has the id any more. A step that was in flight when its worker died or stopped runs again on
another one.

"""


def page() -> str:
    waiting = ", ".join(f"`{status}`" for status in in_order(WAITING))
    ended = ", ".join(f"`{status}`" for status in in_order(ENDED - LATER))
    groups = f"Waiting, and so not in memory: {waiting}.\n\nEnded: {ended}.\n"
    return f"{INTRODUCTION}{table()}\n\n{groups}\n{diagram()}\n{outcomes()}"


if __name__ == "__main__":
    PAGE.write_text(page())
