"""Kill a workflow twice with SIGKILL and watch it finish: `make demo`.

Three processes run the same program, one after the other, on one SQLite file. The demo kills the first while a
step is running and the second while the workflow sleeps. The third finishes the workflow. Then the demo compares
the ledger, a file that the steps wrote, with the history that Edda recorded.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import demo_screen as screen
from demo_ledger import LEDGER, PROCESS, Audit, Kill, read
from demo_order import COURIER_COMES_IN, Order, fulfil
from demo_program import ORDER
from edda import EddaApp
from edda.core.model import MICROSECONDS, Entry, EntryKind

PATIENCE = 30.0
"""Seconds that a process may take to reach its next state; it needs about three."""

Seen = set[tuple[str, str]]


class Stage:
    """A folder with the database and the ledger, and the processes that were started on it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'shop.db'}"
        self.ledger = folder / "ledger.jsonl"
        self.kills: list[Kill] = []
        self.processes: list[Process] = []

    async def start(self, number: int) -> Process:
        program = Path(__file__).with_name("demo_program.py")
        environment = os.environ | {LEDGER: str(self.ledger), PROCESS: str(number)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(program), self.url, stdout=PIPE, env=environment
        )
        self.processes.append(process)
        screen.line(number, "starts", f"pid {process.pid}")
        return process

    async def kill(self, number: int, process: Process) -> None:
        process.kill()
        await process.wait()
        screen.line(number, "SIGKILL", f"pid {process.pid} is dead", screen.RED, screen.BOLD)
        self.kills.append(Kill(number, frozenset(entry.step for entry in await self.history())))

    def clear(self) -> None:
        """Kill the processes that still run, also after an error."""
        for process in self.processes:
            if process.returncode is None:
                process.kill()

    async def history(self) -> list[Entry]:
        """The recorded entries, read by an app without a worker."""
        async with EddaApp("demo", self.url, worker=False) as app:
            return [*await app.handle(ORDER.id).history()]

    async def show_what_is_left(self) -> None:
        async with EddaApp("demo", self.url, worker=False) as app:
            found = (await app.find_instances())["instances"]
        for run in found:
            screen.tell(
                f"        No process is running. In the database: {run['instance_id']}, {run['status']}.", screen.DIM
            )


async def follow(number: int, process: Process, enough: Callable[[Seen], bool]) -> Seen:
    """Show the lines that a process prints until `enough` is true, or until it ends."""
    assert process.stdout is not None
    seen: Seen = set()
    async with asyncio.timeout(PATIENCE):
        while not enough(seen) and (said := await process.stdout.readline()):
            fact = json.loads(said)
            seen.add((fact["what"], fact["about"]))
            screen.fact(number, fact["what"], fact["about"])
    return seen


def packs_while_the_rest_is_recorded(seen: Seen) -> bool:
    return {("recorded", "print_label:1"), ("recorded", "write_invoice:1"), ("runs", "pack_parcel:1")} <= seen


def sleeps(seen: Seen) -> bool:
    return ("status", "waiting_for_timer") in seen


def never(seen: Seen) -> bool:
    return False


async def play(stage: Stage) -> bool:
    screen.headline("1. The first process takes the order. It dies while pack_parcel is running.")
    process = await stage.start(1)
    await follow(1, process, packs_while_the_rest_is_recorded)
    await stage.kill(1, process)

    screen.headline("2. The second one goes on. It dies while the order sleeps.")
    process = await stage.start(2)
    await follow(2, process, sleeps)
    await stage.kill(2, process)
    await stage.show_what_is_left()

    screen.headline("3. The third one waits for the rest of the timer, and finishes.")
    process = await stage.start(3)
    seen = await follow(3, process, never)
    status = await process.wait()
    return status == 0 and any(what == "completed" for what, _ in seen)


async def audit(stage: Stage) -> tuple[Audit, list[Entry], list[str]]:
    history = await stage.history()
    steps = [entry.step for entry in history if entry.kind is EntryKind.STEP]
    found = Audit(read(stage.ledger), stage.kills, steps)
    return found, history, found.faults() + early_timers(history)


def early_timers(history: list[Entry]) -> list[str]:
    """The order has one timer, which starts at the time of the entry before it."""
    return [
        f"{timer.step} fired early"
        for before, timer in pairwise(history)
        if timer.kind is EntryKind.TIMER and timer.at < before.at + COURIER_COMES_IN * MICROSECONDS
    ]


def judge(finished: bool, found: Audit, faults: list[str]) -> bool:
    faults = faults if finished else ["the order was not finished", *faults]
    screen.tell()
    if faults:
        screen.tell("BROKEN: " + "; ".join(faults), screen.RED, screen.BOLD)
        return False
    ran, steps = len(found.lines), len(found.recorded)
    screen.tell(f"Two kills, {steps} steps, {ran} runs of a step.", screen.BOLD)
    screen.tell("Nothing ran twice: no step that was recorded was run again.", screen.GREEN, screen.BOLD)
    if found.in_flight:
        screen.tell(
            f"In flight at a kill, and so run again: {found.in_flight}. Nobody can know how far it got;\n"
            "it has the same ctx.idempotency_key both times, for the service it calls.",
            screen.YELLOW,
        )
    return True


async def main() -> bool:
    with TemporaryDirectory(prefix="edda-demo-") as folder:
        stage = Stage(Path(folder))
        screen.tell(f"{describe(ORDER)}: eight steps, three side by side, and a timer.", screen.BOLD)
        try:
            finished = await play(stage)
        finally:
            stage.clear()
        found, history, faults = await audit(stage)
        screen.headline("What the steps wrote into their own ledger, and what Edda recorded")
        screen.table(found, history)
        return judge(finished, found, faults)


def describe(order: Order) -> str:
    return f"{fulfil.name}({order.id}, {order.item})"


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
