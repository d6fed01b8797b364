"""`edda doctor`: what is wrong with a database and what is installed here, and what to do."""

from __future__ import annotations

import asyncio
import platform
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

import click
from msgspec import Struct

from edda.cli.target import database_option, missing_sqlite_file
from edda.control.status_text import format_duration
from edda.core.model import SUSPECT_DEATHS, RunRecord
from edda.core.queries import RunQuery, WorkerRecord
from edda.core.states import RunStatus
from edda.core.value_path import truncate
from edda.databases import max_connections, open_storage
from edda.engine.worker.unclaimed import UNCLAIMED, find_unclaimed
from edda.errors import AppError, EddaError
from edda.storage.ports import Dialect, Storage

from .errors import EXTRAS, error_text, report_errors
from .output import StyledText, as_json, line, show, show_json, single_line

_OLDEST_PYTHON = (3, 11)
_LATE = 1.0
"""Seconds that clocks may differ: leases and timers go by the database's, only what people are shown goes wrong."""
_LOOKED_AT = 200
_SHOWN = 3
_DRIVEN = frozenset({RunStatus.RUNNING, RunStatus.COMPENSATING})
_START = "start a worker that has their workflows: it takes over the runs of a lost worker when that lease has lapsed"
_WAL_RESET_BUG = (3, 51, 3)
_CONNECTIONS: dict[Dialect, tuple[str, str]] = {
    "postgresql": (
        "SELECT current_setting('max_connections')",
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'",
    ),
    "mysql": ("SELECT @@max_connections", "SHOW GLOBAL STATUS LIKE 'Threads_connected'"),
}
"""How many there may be, and how many there are."""
_CLUSTER = "SHOW STATUS WHERE Variable_name IN ('wsrep_cluster_size', 'wsrep_cluster_status')"
_PACKAGES = ("msgspec", "pydantic", "click", "uvicorn", "httpx2", "jinja2")


class CheckResult(Struct, frozen=True):
    subject: str
    words: str
    ok: bool = True
    remedy: str = ""


@click.command()
@database_option
@as_json
def doctor(url: str, as_json: bool) -> None:
    """Say what is wrong with the database and with what is installed, and what to do; exit 1 if anything is."""
    with report_errors():
        findings = [*_check_install(), *asyncio.run(_check_database(url))]
    if as_json:
        show_json(findings)
    else:
        for finding in findings:
            _show(finding)
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


def _show(finding: CheckResult) -> None:
    mark = StyledText("✔ ", "green") if finding.ok else StyledText("✖ ", "red")
    show([line(mark, StyledText(f"{finding.subject}: ", "bold"), single_line(finding.words))])
    if finding.remedy:
        show([line(f"  → {single_line(finding.remedy)}")])


# Here


def _check_install() -> Iterator[CheckResult]:
    wanted = ".".join(map(str, _OLDEST_PYTHON))
    is_new = sys.version_info >= _OLDEST_PYTHON
    yield CheckResult("Python", platform.python_version(), is_new, "" if is_new else f"install {wanted} or newer")
    yield CheckResult("edda", _version("edda-framework") or "not installed as a package")
    missing = [name for name in _PACKAGES if _version(name) is None]
    remedy = f"pip install {' '.join(missing)}" if missing else ""
    yield CheckResult("packages", _versions(_PACKAGES), not missing, remedy)
    yield CheckResult("extras", _versions(EXTRAS) or "none")


def _versions(packages: Iterable[str]) -> str:
    return ", ".join(f"{name} {found}" for name in packages if (found := _version(name)))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# There


async def _check_database(url: str) -> list[CheckResult]:
    if (path := missing_sqlite_file(url)) is not None:
        return [
            CheckResult("database", f"there is no file {path}", False, "give the right --db, or run `edda migrate`")
        ]
    try:
        async with _open(url) as storage:
            found = [await look(storage) for look in _CHECKS]
            if not await storage.pending_migrations():
                found += [await look(storage) for look in _WITH_TABLES]
            return [CheckResult("database", "can be reached"), *(finding for finding in found if finding is not None)]
    except (EddaError, OSError) as error:
        return [CheckResult("database", error_text(error), False, _remedy(url, error))]


def _remedy(url: str, error: Exception) -> str:
    if isinstance(error, AppError):  # a driver that is not installed: its message says how to install it
        return "do what it says, in the environment of this command, and run `edda doctor` again"
    if url.startswith("sqlite"):
        return "may this user read and write the file and its folder, and is there room on the disk?"
    return "is the server up, and are --db and its password right?"


@asynccontextmanager
async def _open(url: str) -> AsyncIterator[Storage]:
    storage = open_storage(url, pool_size=2)
    await storage.open()
    try:
        yield storage
    finally:
        await storage.close()


async def _look_at_version(storage: Storage) -> CheckResult:
    """The storage refuses to open on what is too old."""
    joint = await storage.begin()
    try:
        if joint.dialect == "sqlite":
            mode = str((await joint.fetch("PRAGMA journal_mode", {}))[0][0])
            return _sqlite_check(mode)
        return CheckResult("server", str((await joint.fetch("SELECT version()", {}))[0][0]))
    finally:
        await joint.rollback()


def _sqlite_check(mode: str) -> CheckResult:
    words = f"library {sqlite3.sqlite_version}, journal mode {mode}"
    if mode != "wal":
        return CheckResult(
            "SQLite", words, False, "put the file on a local disk: write-ahead logging does not work here"
        )
    if sqlite3.sqlite_version_info < _WAL_RESET_BUG:
        words += "; before 3.51.3 other programs that write to the file while Edda runs can damage it"
    return CheckResult("SQLite", words)


async def _look_at_connections(storage: Storage) -> CheckResult | None:
    joint = await storage.begin()
    try:
        if joint.dialect == "sqlite":
            return None
        numbers = [int((await joint.fetch(question, {}))[0][-1]) for question in _CONNECTIONS[joint.dialect]]
        return _judge_connections(*numbers)
    finally:
        await joint.rollback()


def _judge_connections(allowed: int, used: int) -> CheckResult:
    most = max_connections()
    words = f"{used} of {allowed} are in use; a process opens up to {most}, which is 6 * pool_size + 4"
    is_enough = allowed >= most
    remedy = "raise the server's max_connections, or give EddaApp a smaller pool_size"
    return CheckResult("connections", words, is_enough, "" if is_enough else remedy)


async def _look_at_cluster(storage: Storage) -> CheckResult | None:
    """A MySQL group with several primaries is refused by the storage."""
    if not storage.is_certified:
        return None
    joint = await storage.begin()
    try:
        rows = await joint.fetch(_CLUSTER, {})
    finally:
        await joint.rollback()
    status = {str(name).lower(): str(value) for name, value in rows}
    part = status.get("wsrep_cluster_status", "unknown")
    words = f"a node of a Galera cluster of {status.get('wsrep_cluster_size', '?')}, {part}"
    is_primary = part == "Primary"
    remedy = "this node takes no writes until it has rejoined the others: look at its log, or use another node"
    return CheckResult("cluster", words, is_primary, "" if is_primary else remedy)


async def _look_at_clock(storage: Storage) -> CheckResult:
    before = time.time()
    there = await storage.now() / 1e6
    difference = there - (before + time.time()) / 2
    words = f"the database's is {abs(difference):.3f} s {'ahead' if difference > 0 else 'behind'}"
    is_near = abs(difference) <= _LATE
    return CheckResult("clock", words, is_near, "" if is_near else "let NTP set the clocks of both machines")


async def _look_at_schema(storage: Storage) -> CheckResult:
    pending = await storage.pending_migrations()
    if pending:
        return CheckResult("schema", f"{', '.join(pending)} missing", False, "run `edda migrate`")
    return CheckResult("schema", "up to date")


async def _look_at_workers(storage: Storage) -> CheckResult:
    backlog, now = await storage.backlog(), await storage.now()
    running = await storage.search(RunQuery(statuses=_DRIVEN, limit=_LOOKED_AT))
    crew = await storage.list_workers()  # after the runs: an owner that is missing here has been removed
    alive = [worker for worker in crew if not worker.is_lapsed]
    words = f"{len(alive)} alive" if alive else "none is alive"
    abandoned = _count_abandoned(running, crew)
    # A worker that is alive takes over within a few seconds, and claims what is ready within a poll.
    if abandoned and not alive:
        return CheckResult("workers", f"{words}; {_plural(abandoned)} owned by a lost worker", False, _START)
    if backlog.ready and not alive:
        return CheckResult("workers", f"{words}; {_plural(backlog.ready)} ready", False, _START)
    if backlog.oldest_ready is None or now - backlog.oldest_ready < UNCLAIMED:
        return CheckResult("workers", words)
    names = sorted(await find_unclaimed(storage, now))
    ready = (
        f"{backlog.ready} runs are ready and not claimed, the oldest for {format_duration(now - backlog.oldest_ready)}"
    )
    of = f" (of {', '.join(names)})" if names else ""
    remedy = f"start a worker that has {' and '.join(names) or 'their workflows'}, or more workers if all are busy"
    return CheckResult("workers", f"{words}; {ready}{of}", False, remedy)


def _count_abandoned(running: Iterable[RunRecord], crew: Iterable[WorkerRecord]) -> int:
    """Runs of workers whose leases lapsed, and, among the newest open runs, those of workers that have no row."""
    known = {worker.info.id for worker in crew}
    lapsed = sum(worker.runs for worker in crew if worker.is_lapsed)
    return lapsed + sum(run.owner is not None and run.owner not in known for run in running)


def _plural(runs: int) -> str:
    return "1 run is" if runs == 1 else f"{runs} runs are"


async def _look_at_parked(storage: Storage) -> CheckResult:
    parked = await storage.search(RunQuery(statuses=frozenset({RunStatus.PARKED}), limit=_SHOWN))
    if not parked:
        return CheckResult("parked runs", "none")
    count = (await storage.backlog()).parked
    told = "; ".join(f"{run.run_id} of {run.workflow}: {truncate(run.reason or '', 200)}" for run in parked)
    remedy = "mend the code and start a worker with it, then `edda runs resume ID`; `edda runs list --status parked`"
    return CheckResult("parked runs", f"{max(count, len(parked))}: {told}", False, remedy)


async def _look_at_suspects(storage: Storage) -> CheckResult:
    suspects = [
        run
        for status in (RunStatus.PARKED, RunStatus.RUNNING)
        for run in await storage.search(RunQuery(statuses=frozenset({status}), limit=_LOOKED_AT))
        if run.deaths >= SUSPECT_DEATHS
    ]
    if not suspects:
        return CheckResult("process deaths", "no open run lost its process again and again")
    told = "; ".join(
        f"{run.run_id} of {run.workflow}: {run.deaths} deaths{', parked' if run.status is RunStatus.PARKED else ''}"
        for run in suspects[:_SHOWN]
    )
    runs = "run" if len(suspects) == 1 else "runs"
    parked = sum(run.status is RunStatus.PARKED for run in suspects)
    what = [f"{parked} parked"] if parked else []
    what += [f"{len(suspects) - parked} run apart from others"] if len(suspects) > parked else []
    remedy = "look into the log of the workers, and for processes killed by the kernel (out of memory, segfault)"
    return CheckResult("process deaths", f"{len(suspects)} {runs} ({', '.join(what)}): {told}", False, remedy)


async def _look_at_outbox(storage: Storage) -> CheckResult:
    dead = (await storage.backlog()).outbox_dead
    if not dead:
        return CheckResult("dead events", "none in the outbox")
    remedy = "see `edda outbox list --state dead`, then `edda outbox retry` or `edda outbox drop`"
    return CheckResult("dead events", f"{dead} in the outbox were refused by their receivers", False, remedy)


_WITH_TABLES: tuple[Callable[[Storage], Awaitable[CheckResult]], ...] = (
    _look_at_workers,
    _look_at_parked,
    _look_at_suspects,
    _look_at_outbox,
)
_CHECKS: tuple[Callable[[Storage], Awaitable[CheckResult | None]], ...] = (
    _look_at_version,
    _look_at_connections,
    _look_at_cluster,
    _look_at_clock,
    _look_at_schema,
)
