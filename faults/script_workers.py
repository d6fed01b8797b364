"""Worker processes that play scripts. Run as a module it is the fork server they are forked from."""

from __future__ import annotations

import subprocess
import sys
from itertools import count

from edda.engine.run import children
from edda.workflow import compensation
from edda.workflow.compensation import Compensator

from . import fork_server, worker
from .fork_server import ROOT, ForkServer
from .scripts import SCRIPTS
from .worker import Orders
from .worker_fleet import Fleet


class _Company(ForkServer):
    def __init__(self, control: str) -> None:
        command = [sys.executable, "-m", "faults.script_workers", *([control] if control else [])]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class ScriptWorkers(Fleet):
    def __init__(self, orders: Orders, control: str = "") -> None:
        """`control`: what its members do wrong on purpose."""
        self._orders = orders
        self._urls = (orders.url,)
        self._fork_server = _Company(control)
        self._numbers = count(1)
        self.members = []


# Broken on purpose


def _undo_the_first_first() -> None:
    def add(self: Compensator, undo: compensation.CompensationStep) -> None:
        self.is_needed = True
        self._undos.insert(0, undo)

    Compensator.add = add  # type: ignore[method-assign]


def _forget_what_comes_late() -> None:
    Compensator.on_late_outcome = lambda self, entry: None  # type: ignore[method-assign]


def _spare_the_children() -> None:
    children.ChildRuns.cancel_dependents = lambda self, after_entry: None  # type: ignore[method-assign]


CONTROLS = {
    "order": _undo_the_first_first,
    "late": _forget_what_comes_late,
    "children": _spare_the_children,
}


SYMPTOMS = {"order": "and undid", "late": "and undid", "children": "went on"}
"""What is seen of each."""


def main(control: str = "") -> None:
    worker.PROGRAM = SCRIPTS  # type: ignore[assignment]
    if control:
        CONTROLS[control]()
    fork_server.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
