"""The output of the demo: plain text, in colour if the terminal supports it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from textwrap import shorten

from demo_ledger import Audit
from demo_order import COURIER_COMES_IN
from edda.core.model import MICROSECONDS, Entry, EntryKind

RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = "31", "32", "33", "34", "35", "36"
BOLD, DIM = "1", "2"

PROCESSES = {1: CYAN, 2: MAGENTA, 3: YELLOW}
VERBS = {"runs": "", "recorded": GREEN, "replayed": BLUE, "status": DIM, "warning": DIM, "completed": GREEN}

ROOM = 48
"""Columns that remain of eighty for the message of a process."""

_began = time.monotonic()


def is_coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, *codes: str) -> str:
    wanted = ";".join(code for code in codes if code)
    return f"\x1b[{wanted}m{text}\x1b[0m" if wanted and is_coloured() else text


def tell(text: str = "", *codes: str) -> None:
    print(paint(text.rstrip(), *codes), flush=True)


def headline(text: str) -> None:
    tell()
    tell(text, BOLD)


def line(process: int, verb: str, about: str = "", *codes: str) -> None:
    """As in `  1.42  process 2  replayed   charge_card:1`."""
    clock = paint(f"{time.monotonic() - _began:6.2f}", DIM)
    who = paint(f"process {process}", PROCESSES[process])
    tell(f"{clock}  {who}  {paint(f'{verb:<10}', *codes)} {about}".rstrip())


def fact(process: int, what: str, about: str) -> None:
    remark = paint("(not run again)", DIM) if what == "replayed" else ""
    shown = "" if what == "completed" else shorten(about, ROOM, placeholder=" ...")
    line(process, what, f"{shown:<18}{remark}", VERBS[what])


def table(audit: Audit, history: Sequence[Entry]) -> None:
    tell(f"{'step':<17}{'ran in':<17}{'times':<7}{'recorded (UTC)':<16}", BOLD)
    before = history[0]
    for entry in history:
        tell(_timer_row(entry, before) if entry.kind is EntryKind.TIMER else _step_row(entry, audit))
        before = entry


def _step_row(entry: Entry, audit: Audit) -> str:
    runs = audit.runs(entry.step)
    where = "process " + ", ".join(str(run.process) for run in runs)
    row = f"{entry.step:<17}{where:<17}{len(runs):<7}{_clock(entry.at):<16}"
    return row + (paint("in flight at a kill", YELLOW) if audit.killed_in(entry.step) else "")


def _timer_row(entry: Entry, before: Entry) -> str:
    late = entry.at - before.at - COURIER_COMES_IN * MICROSECONDS
    row = f"{entry.step:<17}{'no process':<17}{'':<7}{_clock(entry.at):<16}"
    return row + paint(f"due {late / 1000:.0f} ms before", DIM)


def _clock(microseconds: int) -> str:
    moment = datetime.fromtimestamp(microseconds / MICROSECONDS, UTC)
    return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}"
