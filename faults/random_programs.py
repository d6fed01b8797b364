"""Random programs through the real engine: played by worker processes that are killed all the time, then judged.

`python -m faults.random_programs --database sqlite --programs 1000`
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
from msgspec import Struct

from edda import EddaApp
from edda.errors import EddaError

from .script_invariants import Played, read_leftovers, read_played, violations
from .script_workers import CONTROLS, SYMPTOMS, ScriptWorkers
from .scripts import SCRIPTS, Author, Script, control_scripts, play, read_lines
from .target_databases import KINDS, Place, fresh
from .worker import Orders
from .worker_fleet import complaints

WORKERS = 4
LEASE = 0.5
VICTIMS = (1, 1, 1, 2, WORKERS)
"""Killed at once."""
CROWD = 30
"""Runs that are open at once, at most, when another program is started."""
UPROAR = 4.0
"""Seconds for which workers are still killed when the last program was started."""
PATIENCE = 60.0
"""Seconds in which everything must have ended when the kills are over."""
COUNT_OPEN = "SELECT count(*) FROM edda_open_run"


class Task(Struct, frozen=True):
    database: str
    programs: int
    seed: int = 0
    control: str = ""
    """What the workers do wrong on purpose."""


class Report(Struct, frozen=True):
    task: Task
    counts: dict[str, object]
    violations: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Nothing was found, or what was broken on purpose."""
        if not self.task.control:
            return not self.violations
        return any(SYMPTOMS[self.task.control] in violation for violation in self.violations)

    def __str__(self) -> str:
        facts = self.counts | {"violations": len(self.violations), "seed": self.task.seed}
        broken = f"+broken {self.task.control}" if self.task.control else ""
        return f"programs {self.task.database}{broken} " + " ".join(f"{key}={value}" for key, value in facts.items())


class Theatre:
    def __init__(self, task: Task, place: Place, folder: Path) -> None:
        self._task = task
        self._place = place
        self._folder = folder
        self._rng = random.Random(task.seed)
        self._line = place.line()
        orders = Orders(place.url, str(folder), "p", seed=task.seed * 100_000, lease=LEASE)
        self._troupe = ScriptWorkers(orders, task.control)
        self._client = EddaApp("audience", place.url, workflows=SCRIPTS, worker=False, auto_migrate=False)
        self._cancels: set[asyncio.Task[None]] = set()
        self._kills = 0
        self._found: list[str] = []

    async def run(self, progress: Callable[[str], None]) -> Report:
        began = time.monotonic()
        await self._place.prepare()
        try:
            async with self._client:
                self._fill_up()
                self._troupe.wait_until_ready()
                await self._under_fire(progress)
                rest = await self._let_finish()
            return await self._judge(time.monotonic() - began, rest)
        finally:
            self._troupe.close()
            self._line.close()

    async def _under_fire(self, progress: Callable[[str], None]) -> None:
        killer = asyncio.create_task(self._kill_for_ever())
        try:
            await self._start_all(progress)
            await asyncio.gather(*self._cancels)
            await asyncio.wait((killer,), timeout=UPROAR)
        finally:
            killer.cancel()
            with suppress(asyncio.CancelledError):
                await killer

    async def _kill_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.05, 0.5))
            self._found += [f"worker {member.orders.name} ended by itself" for member in self._troupe.deserters()]
            self._fill_up()
            for victim in self._rng.sample(self._troupe.members, self._rng.choice(VICTIMS)):
                self._troupe.kill(victim)
                self._kills += 1
            self._fill_up()

    def _fill_up(self) -> None:
        while len(self._troupe.members) < WORKERS:
            self._troupe.launch()

    async def _start_all(self, progress: Callable[[str], None]) -> None:
        author = Author(self._task.seed, str(self._folder))
        for script in control_scripts(str(self._folder)):
            await self._start(script)
        for number in range(self._task.programs):
            await self._line.until(COUNT_OPEN, lambda crowd: crowd <= CROWD, PATIENCE)
            await self._start(author.write(f"program{number}"))
            if (number + 1) % 100 == 0:
                progress(f"{number + 1} programs, {self._kills} kills")

    async def _start(self, script: Script) -> None:
        await self._client.start(play.options(id=script.name, timeout=script.timeout), script.pack())
        if script.cancel_after is not None:
            task = asyncio.create_task(self._cancel(script.name, script.cancel_after))
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

    async def _cancel(self, run_id: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            await self._client.cancel(run_id)
        except EddaError as error:
            self._found.append(f"run {run_id} could not be cancelled: {error!r}")

    async def _let_finish(self) -> float:
        began = time.monotonic()
        await self._line.until(COUNT_OPEN, lambda left: left == 0, PATIENCE)
        return time.monotonic() - began

    async def _judge(self, seconds: float, rest: float) -> Report:
        played = await read_played(self._line)
        lines = read_lines(self._folder)
        found = [*self._found, *violations(played, lines), *await read_leftovers(self._line)]
        found += complaints(self._folder)
        counts = _count(played) | {
            "did": sum(line.what == "did" for line in lines),
            "undid": sum(line.what == "undid" for line in lines),
            "kills": self._kills,
            "seconds": round(seconds, 1),
            "rest": round(rest, 1),
        }
        return Report(self._task, counts, tuple(found))


def _count(played: dict[str, Played]) -> dict[str, object]:
    records = [record for run in played.values() for record in run.history]
    return {
        "runs": len(played),
        "children": sum(run.parent is not None for run in played.values()),
        "generations": sum(run.gens for run in played.values()),
        "entries": len(records),
        **Counter(run.status for run in played.values()),
        "late": sum(record.kind == "late" for record in records),
    }


def run_programs(task: Task, progress: Callable[[str], None] = lambda line: None, keep: Path | None = None) -> Report:
    """Synchronous, and without a loop of its own until the fork server is there."""
    with (
        tempfile.TemporaryDirectory(prefix="edda_faults_", ignore_cleanup_errors=True) as folder,
        fresh(task.database, Path(folder)) as place,
    ):
        return asyncio.run(Theatre(task, place, keep or Path(folder)).run(progress))


@click.command()
@click.option("--database", type=click.Choice(KINDS), multiple=True, help="All of them, if none is named.")
@click.option("--programs", "number", type=int, default=1000, show_default=True)
@click.option("--control", type=click.Choice(tuple(CONTROLS)), help="Break this on purpose; fails if nobody notices.")
@click.option("--seed", type=int, help="Of a run before.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep what was done and logged in this folder.")
def programs(database: tuple[str, ...], number: int, control: str | None, seed: int | None, keep: Path | None) -> None:
    """Play random programs (sagas, children, time-outs, cancels, recur) while workers are killed; then judge them."""
    reports = []
    for kind in database or KINDS:
        task = Task(kind, number, secrets.randbelow(1_000_000) if seed is None else seed, control or "")
        if keep is not None:
            (keep / kind).mkdir(parents=True)
        report = run_programs(task, lambda line: click.echo(f"  {line}", err=True), keep and keep / kind)
        for violation in report.violations[:20]:
            click.echo(f"  VIOLATION {violation}")
        click.echo(str(report))
        reports.append(report)
    sys.exit(0 if all(report.is_right for report in reports) else 1)


if __name__ == "__main__":
    programs()
