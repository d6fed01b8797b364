"""`python -m faults`: the long fault runs."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from .acknowledged_events import acknowledge
from .competing_consumers import compete
from .duplicate_events import repeat
from .hammer import Hammer, Report, Task, hammer
from .ledger_hammer import LedgerHammer
from .memory_growth import measure
from .outbox_outage import endure
from .protocol_breaks import CONTROLS, OF_EVENTS, OF_LEDGER
from .random_programs import programs
from .rolling_restart import roll
from .target_databases import KINDS, fresh

ENOUGH = {"postgres": 1000, "mysql": 300, "sqlite": 300}


@click.group(invoke_without_command=True)
@click.option("--database", type=click.Choice(KINDS), multiple=True, help="All of them, if none is named.")
@click.option("--seconds", type=float, default=600.0, show_default=True, help="Of noise, on each.")
@click.option("--seed", type=int, help="Of a run before.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep ledgers and logs in a new folder below this one.")
@click.pass_context
def main(
    context: click.Context, database: tuple[str, ...], seconds: float, seed: int | None, keep: Path | None
) -> None:
    """Without a command: everything at once, on one database after the other.

    Runs wait for events, begin anew, start and await others, fail and are undone, pass their deadlines and are
    cancelled, while their workers are killed, stopped, robbed and cut off. The last third of the time is the ledger's.
    """
    if context.invoked_subcommand is not None:
        return
    reports = []
    for kind in database or KINDS:
        of_run = _seed() if seed is None else seed
        reports.append(_strike(Task(kind, None, seconds * 2 / 3, of_run, events=True), keep))
        reports.append(_strike(Task(kind, None, seconds / 3, of_run, trades=True), keep))
    _finish(reports)


def _hit_with_everything(
    database: tuple[str, ...], seconds: float, crashes: bool, control: str, seed: int | None, keep: Path | None
) -> None:
    reports = []
    for kind in database or KINDS:
        of_run = _seed() if seed is None else seed
        reports.append(_strike(Task(kind, None, seconds, of_run, crashes, control, events=True), keep))
    _finish(reports)


@main.command()
@click.option("--database", type=click.Choice(KINDS), multiple=True, help="All of them, if none is named.")
@click.option("--takeovers", type=int, help="Go on until there were so many.")
@click.option("--seconds", type=float, default=3600.0, show_default=True, help="But not for longer than this.")
@click.option("--crashes", is_flag=True, help="Crash the database server too, every few seconds.")
@click.option("--control", is_flag=True, help="Break the protocol on purpose; fails if nobody notices.")
@click.option("--seed", type=int, help="Of a run before.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep ledgers and logs in a new folder below this one.")
def journal(
    database: tuple[str, ...],
    takeovers: int | None,
    seconds: float,
    crashes: bool,
    control: bool,
    seed: int | None,
    keep: Path | None,
) -> None:
    """Kill, stop, rob and cut off workers until there were enough takeovers; then check every invariant."""
    reports = []
    for kind in database or KINDS:
        enough = takeovers or (None if seconds < 3600 else ENOUGH[kind])
        task = Task(kind, enough, seconds, _seed() if seed is None else seed, crashes, "fence" if control else "")
        reports.append(_strike(task, keep))
    _finish(reports)


@main.command()
@click.option("--database", type=click.Choice(KINDS), multiple=True, help="All of them, if none is named.")
@click.option("--seconds", type=float, default=600.0, show_default=True, help="Of noise, on each.")
@click.option("--crashes", is_flag=True, help="Crash the database server too, every few seconds.")
@click.option("--control", type=click.Choice(OF_EVENTS), help="What to break on purpose; fails if nobody notices.")
@click.option("--seed", type=int, help="Of a run before.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep ledgers and logs in a new folder below this one.")
def events(
    database: tuple[str, ...], seconds: float, crashes: bool, control: str | None, seed: int | None, keep: Path | None
) -> None:
    """Everything at once but the ledger, also with crashing servers or a protocol that is broken."""
    _hit_with_everything(database, seconds, crashes, control or "", seed, keep)


@main.command()
@click.option("--database", type=click.Choice(KINDS), multiple=True, help="All of them, if none is named.")
@click.option("--times", type=int, default=1000, show_default=True)
@click.option("--control", is_flag=True, help="Answer before the event is stored; fails if nobody notices.")
def acknowledged(database: tuple[str, ...], times: int, control: bool) -> None:
    """Kill a server right after its 202 was read; then look for every event it said it has."""
    outcomes, what = [], "promise" if control else ""
    for kind in database or KINDS:
        with TemporaryDirectory(prefix="edda_faults_") as folder, fresh(kind, Path(folder)) as place:
            outcomes.append(asyncio.run(acknowledge(place, Path(folder), times, _say, what)))
        _tell(outcomes[-1], outcomes[-1].violations)
    sys.exit(0 if all(outcome.lost if control else outcome.is_sound for outcome in outcomes) else 1)


@main.command()
@click.option("--database", type=click.Choice(KINDS), default="postgres", show_default=True)
@click.option("--events", type=int, default=20_000, show_default=True)
@click.option("--seed", type=int, help="Of a run before.")
def duplicates(database: str, events: int, seed: int | None) -> None:
    """Send each event up to five times at once to two endpoints that are killed meanwhile."""
    with TemporaryDirectory(prefix="edda_faults_") as folder, fresh(database, Path(folder)) as place:
        outcome = asyncio.run(repeat(place, Path(folder), events, _seed() if seed is None else seed, _say))
    _tell(outcome, outcome.violations)
    sys.exit(0 if outcome.is_sound else 1)


@main.command()
@click.option("--database", type=click.Choice(KINDS), default="postgres", show_default=True)
@click.option("--messages", type=int, default=50_000, show_default=True)
@click.option("--consumers", type=int, default=4, show_default=True)
@click.option("--control", is_flag=True, help="Commit rows before their steps' records; fails if nobody notices.")
@click.option("--seed", type=int, help="Of a run before.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep ledgers and logs in a new folder below this one.")
def competing(database: str, messages: int, consumers: int, control: bool, seed: int | None, keep: Path | None) -> None:
    """Publish many messages to a few runs that compete for them, on workers that are killed and stopped in bursts."""
    of_run = _seed() if seed is None else seed
    kept = None if keep is None else _below(keep, f"competing-{database}-{of_run}")
    with TemporaryDirectory(prefix="edda_faults_") as folder, fresh(database, Path(folder)) as place:
        there, what = kept or Path(folder), "records" if control else ""
        contest = asyncio.run(compete(place, there, messages, consumers, of_run, _say, control=what))
    _tell(contest, contest.violations)
    is_right = CONTROLS[what].is_seen(contest.violations) if control else not contest.violations
    sys.exit(0 if is_right else 1)


@main.command()
@click.option("--database", type=click.Choice(KINDS), multiple=True, help="All of them, if none is named.")
@click.option("--seconds", type=float, default=600.0, show_default=True, help="Of noise, on each.")
@click.option("--crashes", is_flag=True, help="Crash the database server too, every few seconds.")
@click.option("--control", type=click.Choice(OF_LEDGER), help="What to break on purpose; fails if nobody notices.")
@click.option("--seed", type=int, help="Of a run before.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep ledgers and logs in a new folder below this one.")
def ledger(
    database: tuple[str, ...], seconds: float, crashes: bool, control: str | None, seed: int | None, keep: Path | None
) -> None:
    """Runs that write users' rows, publish and send, and handlers who start some: compare all of it with histories."""
    reports = []
    for kind in database or KINDS:
        of_run = _seed() if seed is None else seed
        reports.append(_strike(Task(kind, None, seconds, of_run, crashes, control or "", trades=True), keep))
    _finish(reports)


@main.command()
@click.option("--database", type=click.Choice(KINDS), default="sqlite", show_default=True)
@click.option("--runs", type=int, default=50_000, show_default=True)
@click.option("--warm-up", type=int, default=5_000, show_default=True, help="Runs before memory is compared.")
@click.option("--bound", type=float, default=20.0, show_default=True, help="Megabytes it may grow by after that.")
def memory(database: str, runs: int, warm_up: int, bound: float) -> None:
    """Send many workflows through one process and watch its memory."""
    growth = measure(database, runs, warm_up, _say)
    click.echo(str(growth))
    sys.exit(1 if growth.megabytes > bound else 0)


@main.command()
@click.option("--database", type=click.Choice(KINDS), default="postgres", show_default=True)
@click.option("--times", type=int, default=30, show_default=True)
def drain(database: str, times: int) -> None:
    """Restart workers with SIGTERM, one after the other, under load."""
    with TemporaryDirectory(prefix="edda_faults_") as folder, fresh(database, Path(folder)) as place:
        asyncio.run(place.prepare())
        rolled = asyncio.run(roll(place, Path(folder), times))
    _tell(rolled, rolled.violations)
    sys.exit(1 if rolled.violations or rolled.repeated or rolled.codes != {0} else 0)


@main.command()
@click.option("--database", type=click.Choice(KINDS), multiple=True, help="All of them, if none is named.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="For which the receiver is gone.")
@click.option("--rate", type=float, default=20.0, show_default=True, help="Runs a second, of three events each.")
def outage(database: tuple[str, ...], seconds: float, rate: float) -> None:
    """Take the outbox's receiver away under load; then look for every event, in order, and for none that is dead."""
    outcomes = []
    for kind in database or KINDS:
        with TemporaryDirectory(prefix="edda_faults_") as folder, fresh(kind, Path(folder)) as place:
            outcomes.append(asyncio.run(endure(place, seconds, rate, _say)))
        _tell(outcomes[-1], outcomes[-1].violations)
    sys.exit(1 if any(outcome.violations for outcome in outcomes) else 0)


main.add_command(programs)


def _say(line: str) -> None:
    click.echo(f"  {line}", err=True)


def _tell(outcome: object, violations: Sequence[str]) -> None:
    for violation in violations[:20]:
        click.echo(f"  VIOLATION {violation}")
    click.echo(str(outcome))


def _seed() -> int:
    return secrets.randbelow(1_000_000)


def _below(keep: Path, name: str) -> Path:
    folder = keep / name
    folder.mkdir(parents=True)
    return folder


def _strike(task: Task, keep: Path | None) -> Report:
    began = time.monotonic()

    def progress(line: str) -> None:
        click.echo(f"  {task.database} {time.monotonic() - began:4.0f} s: {line}", err=True)

    name = f"{'ledger-' if task.trades else ''}{task.database}-{task.seed}"
    folder = None if keep is None else _below(keep, name)
    report = hammer(task, progress, folder, LedgerHammer if task.trades else Hammer)
    _tell(report, report.violations)
    return report


def _finish(reports: list[Report]) -> None:
    sys.exit(0 if all(report.is_right for report in reports) else 1)


if __name__ == "__main__":
    main()
