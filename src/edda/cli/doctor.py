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

from edda.cli.answering import as_json
from edda.cli.complaints import in_one_line, tell
from edda.cli.extras import EXTRAS
from edda.cli.target import database_option, missing_file
from edda.cli.terminal import Span, flat, line, show, show_json
from edda.databases import most_connections, open_storage
from edda.errors import EddaError
from edda.storage.ports import Dialect, Storage

_OLDEST_PYTHON = (3, 11)
_LATE = 1.0
"""Seconds that clocks may differ: leases and timers go by the database's, only what people are shown goes wrong."""
_WAL_RESET_BUG = (3, 51, 3)
_CONNECTIONS: dict[Dialect, tuple[str, str]] = {
    "postgresql": (
        "SELECT current_setting('max_connections')",
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'",
    ),
    "mysql": ("SELECT @@max_connections", "SHOW GLOBAL STATUS LIKE 'Threads_connected'"),
}
"""How many there may be, and how many there are."""
_PACKAGES = ("msgspec", "pydantic", "click", "uvicorn", "httpx2", "jinja2")


class Finding(Struct, frozen=True):
    subject: str
    words: str
    ok: bool = True
    remedy: str = ""


@click.command()
@database_option
@as_json
def doctor(url: str, as_json: bool) -> None:
    """Say what is wrong with the database and with what is installed, and what to do; exit 1 if anything is."""
    with in_one_line():
        findings = [*_look_here(), *asyncio.run(_look_there(url))]
    if as_json:
        show_json(findings)
    else:
        for finding in findings:
            _show(finding)
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


def _show(finding: Finding) -> None:
    mark = Span("✔ ", "green") if finding.ok else Span("✖ ", "red")
    show([line(mark, Span(f"{finding.subject}: ", "bold"), flat(finding.words))])
    if finding.remedy:
        show([line(f"  → {flat(finding.remedy)}")])


# Here


def _look_here() -> Iterator[Finding]:
    wanted = ".".join(map(str, _OLDEST_PYTHON))
    is_new = sys.version_info >= _OLDEST_PYTHON
    yield Finding("Python", platform.python_version(), is_new, "" if is_new else f"install {wanted} or newer")
    yield Finding("edda", _version("edda-framework") or "not installed as a package")
    missing = [name for name in _PACKAGES if _version(name) is None]
    remedy = f"pip install {' '.join(missing)}" if missing else ""
    yield Finding("packages", _versions(_PACKAGES), not missing, remedy)
    yield Finding("extras", _versions(EXTRAS) or "none")


def _versions(packages: Iterable[str]) -> str:
    return ", ".join(f"{name} {found}" for name in packages if (found := _version(name)))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# There


async def _look_there(url: str) -> list[Finding]:
    if (path := missing_file(url)) is not None:
        return [Finding("database", f"there is no file {path}", False, "give the right --db, or run `edda migrate`")]
    try:
        async with _open(url) as storage:
            found = [await look(storage) for look in _LOOKS]
            return [Finding("database", "can be reached"), *(finding for finding in found if finding is not None)]
    except (EddaError, OSError) as error:
        return [Finding("database", tell(error), False, "is the server up, and are --db and its password right?")]


@asynccontextmanager
async def _open(url: str) -> AsyncIterator[Storage]:
    storage = open_storage(url, pool_size=2)
    await storage.open()
    try:
        yield storage
    finally:
        await storage.close()


async def _look_at_version(storage: Storage) -> Finding:
    """The storage refuses to open on what is too old."""
    joint = await storage.begin()
    try:
        if joint.dialect == "sqlite":
            mode = str((await joint.fetch("PRAGMA journal_mode", {}))[0][0])
            return _judge_sqlite(mode)
        return Finding("server", str((await joint.fetch("SELECT version()", {}))[0][0]))
    finally:
        await joint.rollback()


def _judge_sqlite(mode: str) -> Finding:
    words = f"library {sqlite3.sqlite_version}, journal mode {mode}"
    if mode != "wal":
        return Finding("SQLite", words, False, "put the file on a local disk: write-ahead logging does not work here")
    if sqlite3.sqlite_version_info < _WAL_RESET_BUG:
        words += "; before 3.51.3 other programs that write to the file while Edda runs can damage it"
    return Finding("SQLite", words)


async def _look_at_connections(storage: Storage) -> Finding | None:
    joint = await storage.begin()
    try:
        if joint.dialect == "sqlite":
            return None
        numbers = [int((await joint.fetch(question, {}))[0][-1]) for question in _CONNECTIONS[joint.dialect]]
        return _judge_connections(*numbers)
    finally:
        await joint.rollback()


def _judge_connections(allowed: int, used: int) -> Finding:
    most = most_connections()
    words = f"{used} of {allowed} are in use; a process opens up to {most}, which is 6 * pool_size + 4"
    is_enough = allowed >= most
    remedy = "raise the server's max_connections, or give EddaApp a smaller pool_size"
    return Finding("connections", words, is_enough, "" if is_enough else remedy)


async def _look_at_clock(storage: Storage) -> Finding:
    before = time.time()
    there = await storage.now() / 1e6
    difference = there - (before + time.time()) / 2
    words = f"the database's is {abs(difference):.3f} s {'ahead' if difference > 0 else 'behind'}"
    is_near = abs(difference) <= _LATE
    return Finding("clock", words, is_near, "" if is_near else "let NTP set the clocks of both machines")


async def _look_at_schema(storage: Storage) -> Finding:
    pending = await storage.pending_migrations()
    if pending:
        return Finding("schema", f"{', '.join(pending)} missing", False, "run `edda migrate`")
    return Finding("schema", "up to date")


_LOOKS: tuple[Callable[[Storage], Awaitable[Finding | None]], ...] = (
    _look_at_version,
    _look_at_connections,
    _look_at_clock,
    _look_at_schema,
)
