"""`edda doctor`: checks this installation and a database, and names a remedy for each problem."""

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

from edda.control.status_text import count_of, format_duration
from edda.core.model import SUSPECT_DEATHS
from edda.core.queries import RunQuery
from edda.core.states import RunStatus
from edda.core.value_path import truncate
from edda.databases import max_connections, open_storage
from edda.engine.worker.maintenance import UNCLAIMED, find_unclaimed
from edda.errors import AppError, EddaError
from edda.storage.ports import Dialect, SharedTransaction, Storage

from .output import StyledText, as_json, line, show, show_json, single_line
from .target import EXTRAS, database_option, error_text, missing_sqlite_file, report_errors

_MIN_PYTHON = (3, 11)
_MAX_CLOCK_DIFFERENCE = 1.0
"""Seconds. Leases and timers use the clock of the database: a difference only falsifies the ages that are shown."""
_MAX_SCANNED = 200
_MAX_NAMED = 3
_EXECUTING = frozenset({RunStatus.RUNNING, RunStatus.COMPENSATING})
_START = "start a worker that has their workflows; it takes over runs when the lease of their worker has lapsed"
_WAL_RESET_BUG = (3, 51, 3)
_CONNECTIONS: dict[Dialect, tuple[str, str]] = {
    "postgresql": (
        "SELECT current_setting('max_connections')",
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'",
    ),
    "mysql": ("SELECT @@max_connections", "SHOW GLOBAL STATUS LIKE 'Threads_connected'"),
}
"""Queries for the maximum number of connections and for the current number."""
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
    """Check this installation and a database.

    Prints each problem with its remedy, and exits with 1 if there is one.
    """
    with report_errors():
        results = [*_check_install(), *asyncio.run(_check_database(url))]
    if as_json:
        show_json(results)
    else:
        for result in results:
            mark = StyledText("✔ ", "green") if result.ok else StyledText("✖ ", "red")
            show([line(mark, StyledText(f"{result.subject}: ", "bold"), single_line(result.words))])
            if result.remedy:
                show([line(f"  → {single_line(result.remedy)}")])
    sys.exit(0 if all(result.ok for result in results) else 1)


# This installation


def _check_install() -> Iterator[CheckResult]:
    required = f"{'.'.join(map(str, _MIN_PYTHON))} or newer"
    if sys.version_info >= _MIN_PYTHON:
        yield CheckResult("Python", platform.python_version())
    else:
        yield CheckResult("Python", f"{platform.python_version()}, expected {required}", False, f"install {required}")
    yield CheckResult("edda", _version("edda-framework") or "not installed as a package")
    missing = [name for name in _PACKAGES if _version(name) is None]
    if missing:
        yield CheckResult("packages", f"{', '.join(missing)} missing", False, f"run `pip install {' '.join(missing)}`")
    else:
        yield CheckResult("packages", _versions(_PACKAGES))
    yield CheckResult("extras", _versions(EXTRAS) or "none installed")


def _versions(packages: Iterable[str]) -> str:
    return ", ".join(f"{name} {found}" for name in packages if (found := _version(name)))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# The database


async def _check_database(url: str) -> list[CheckResult]:
    if (path := missing_sqlite_file(url)) is not None:
        remedy = "correct --db, or create the file with `edda migrate`"
        return [CheckResult("database", f"the file {path} does not exist", False, remedy)]
    try:
        storage = open_storage(url, pool_size=2)
        await storage.open()
        try:
            results = [await check(storage) for check in _CHECKS]
            if not await storage.pending_migrations():
                results += [await check(storage) for check in _CHECKS_WITH_TABLES]
            return [CheckResult("database", "reachable"), *(result for result in results if result is not None)]
        finally:
            await storage.close()
    except (EddaError, OSError) as error:
        return [CheckResult("database", error_text(error), False, _remedy(url, error))]


def _remedy(url: str, error: Exception) -> str:
    if isinstance(error, AppError):  # the message names the command that installs the missing driver
        return "follow the message, in the environment of this command, then run `edda doctor` again"
    if url.startswith("sqlite"):
        return "check that this user may read and write the file and its folder, and that the disk has free space"
    return "check that the server runs, and the host, the user and the password in --db"


@asynccontextmanager
async def _transaction(storage: Storage) -> AsyncIterator[SharedTransaction]:
    transaction = await storage.begin()
    try:
        yield transaction
    finally:
        await transaction.rollback()


async def _check_version(storage: Storage) -> CheckResult:
    """Only shows the version: the storage does not open on a version that is too old."""
    async with _transaction(storage) as transaction:
        if transaction.dialect != "sqlite":
            return CheckResult("server", str((await transaction.fetch("SELECT version()", {}))[0][0]))
        mode = str((await transaction.fetch("PRAGMA journal_mode", {}))[0][0])
    text = f"library {sqlite3.sqlite_version}, journal mode {mode}"
    if mode != "wal":
        remedy = "move the file to a local disk: write-ahead logging does not work where it is"
        return CheckResult("SQLite", f"{text}, expected wal", False, remedy)
    if sqlite3.sqlite_version_info < _WAL_RESET_BUG:
        text += "; before 3.51.3, other programs that write to the file while Edda runs can damage it"
    return CheckResult("SQLite", text)


async def _check_connections(storage: Storage) -> CheckResult | None:
    async with _transaction(storage) as transaction:
        if transaction.dialect == "sqlite":
            return None
        queries = _CONNECTIONS[transaction.dialect]
        allowed, used = [int((await transaction.fetch(query, {}))[0][-1]) for query in queries]
    needed = max_connections()
    text = f"{used} of {allowed} are in use; a process opens up to {needed} (6 * pool_size + 4)"
    if allowed >= needed:
        return CheckResult("connections", text)
    remedy = f"set max_connections of the server to {needed} or more, or pass a smaller pool_size to EddaApp"
    return CheckResult("connections", text, False, remedy)


async def _check_cluster(storage: Storage) -> CheckResult | None:
    """Only Galera: the storage does not open on a MySQL group with several primaries."""
    if not storage.is_certified:
        return None
    async with _transaction(storage) as transaction:
        rows = await transaction.fetch(_CLUSTER, {})
    status = {str(name).lower(): str(value) for name, value in rows}
    component = status.get("wsrep_cluster_status", "unknown")
    text = f"a node of a Galera cluster of {status.get('wsrep_cluster_size', '?')}, {component}"
    if component == "Primary":
        return CheckResult("cluster", text)
    remedy = "this node accepts no writes until it has rejoined the cluster: read its log, or use another node"
    return CheckResult("cluster", f"{text}, expected Primary", False, remedy)


async def _check_clock(storage: Storage) -> CheckResult:
    before = time.time()
    database_time = await storage.now() / 1e6
    difference = database_time - (before + time.time()) / 2
    text = f"the database is {abs(difference):.3f} s {'ahead of' if difference > 0 else 'behind'} this machine"
    if abs(difference) <= _MAX_CLOCK_DIFFERENCE:
        return CheckResult("clock", text)
    remedy = "synchronize the clocks of both machines with NTP"
    return CheckResult("clock", f"{text}, expected at most {_MAX_CLOCK_DIFFERENCE:g} s", False, remedy)


async def _check_schema(storage: Storage) -> CheckResult:
    pending = await storage.pending_migrations()
    if pending:
        return CheckResult("schema", f"not applied: {', '.join(pending)}", False, "run `edda migrate`")
    return CheckResult("schema", "up to date")


async def _check_workers(storage: Storage) -> CheckResult:
    backlog, now = await storage.backlog(), await storage.now()
    running = await storage.search(RunQuery(statuses=_EXECUTING, limit=_MAX_SCANNED))
    workers = await storage.list_workers()  # read after the runs: an owner without a row was removed
    alive = [worker for worker in workers if not worker.is_lapsed]
    text = f"{len(alive)} alive" if alive else "none alive"
    known = {worker.info.id for worker in workers}
    # Runs of workers whose lease has lapsed and, among the newest open runs, those of workers without a row.
    abandoned = sum(worker.runs for worker in workers if worker.is_lapsed)
    abandoned += sum(run.owner is not None and run.owner not in known for run in running)
    # A live worker takes over runs within seconds, and claims ready runs within `Settings.poll`.
    if abandoned and not alive:
        return CheckResult("workers", f"{text}; {_runs_are(abandoned)} owned by a lost worker", False, _START)
    if backlog.ready and not alive:
        return CheckResult("workers", f"{text}; {_runs_are(backlog.ready)} ready", False, _START)
    if backlog.oldest_ready is None or now - backlog.oldest_ready < UNCLAIMED:
        return CheckResult("workers", text if alive else f"{text}, and no run needs one")
    names = sorted(await find_unclaimed(storage, now))
    age = format_duration(now - backlog.oldest_ready)
    ready = f"{_runs_are(backlog.ready)} ready and not claimed, the oldest for {age}"
    workflows = f" (workflows: {', '.join(names)})" if names else ""
    remedy = f"start a worker that has {' and '.join(names) or 'their workflows'}, or more workers if all are busy"
    return CheckResult("workers", f"{text}; {ready}{workflows}", False, remedy)


def _runs_are(runs: int) -> str:
    return "1 run is" if runs == 1 else f"{runs} runs are"


async def _check_parked(storage: Storage) -> CheckResult:
    parked = await storage.search(RunQuery(statuses=frozenset({RunStatus.PARKED}), limit=_MAX_NAMED))
    if not parked:
        return CheckResult("parked runs", "none")
    count = (await storage.backlog()).parked
    named = "; ".join(f"{run.run_id} of {run.workflow}: {truncate(run.reason or '', 200)}" for run in parked)
    remedy = (
        "fix the code and start a worker with it, then run `edda runs resume ID`; "
        "`edda runs list --status parked` lists all"
    )
    total = f"{count}, such as" if count > len(parked) else f"{len(parked)}:"
    return CheckResult("parked runs", f"{total} {named}", False, remedy)


async def _check_suspects(storage: Storage) -> CheckResult:
    suspects = [
        run
        for status in (RunStatus.PARKED, RunStatus.RUNNING)
        for run in await storage.search(RunQuery(statuses=frozenset({status}), limit=_MAX_SCANNED))
        if run.deaths >= SUSPECT_DEATHS
    ]
    if not suspects:
        return CheckResult("process deaths", "no open run has lost its process repeatedly")
    named = "; ".join(
        f"{run.run_id} of {run.workflow}: {run.deaths} deaths{', parked' if run.status is RunStatus.PARKED else ''}"
        for run in suspects[:_MAX_NAMED]
    )
    parked = sum(run.status is RunStatus.PARKED for run in suspects)
    text = f"{count_of(len(suspects), 'open run')} lost the process repeatedly, {parked} of them parked: {named}"
    remedy = "read the logs of the workers, and look for processes that the kernel killed (out of memory, segfault)"
    return CheckResult("process deaths", text, False, remedy)


async def _check_outbox(storage: Storage) -> CheckResult:
    dead = (await storage.backlog()).outbox_dead
    if not dead:
        return CheckResult("dead events", "none in the outbox")
    remedy = "list them with `edda outbox list --state dead`, then run `edda outbox retry` or `edda outbox drop`"
    return CheckResult("dead events", f"{dead} in the outbox, rejected by the receiver", False, remedy)


_CHECKS_WITH_TABLES: tuple[Callable[[Storage], Awaitable[CheckResult]], ...] = (
    _check_workers,
    _check_parked,
    _check_suspects,
    _check_outbox,
)
_CHECKS: tuple[Callable[[Storage], Awaitable[CheckResult | None]], ...] = (
    _check_version,
    _check_connections,
    _check_cluster,
    _check_clock,
    _check_schema,
)
