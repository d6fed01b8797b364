"""One fixture, every database: what asks for `storage` or `make_storage` runs on each of them."""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, settings

from edda.engine.worker import host
from edda.storage.memory.storage import MemoryDatabase, MemoryStorage
from edda.storage.ports import StatementProbe, Storage
from tests import databases, tiers
from tests.tiers import KINDS, skip_unless_ci

CHROMIUM = "/usr/bin/chromium"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=tuple(tiers.TIERS), default=tiers.DEFAULT, help="see tests/tiers.py")
    group.addoption("--databases", help=f"instead of the tier's own, separated by commas: {', '.join(KINDS)}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once, before pytest-xdist starts its workers
        remove_stale_lock_files()
    tier = tiers.choose(config.option.tier, config.option.databases)
    # Deadlines of single examples say nothing on a shared machine; the whole test has its time-out.
    settings.register_profile(
        "tier", max_examples=tier.examples, stateful_step_count=40, deadline=None, derandomize=True
    )
    settings.register_profile(
        "release",
        max_examples=20_000,
        stateful_step_count=100,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tier"))


LOCK_FILES = "edda-worker-*"
STALE = 600.0
"""Seconds after which a lock file that no process holds is of no use to any test."""


def remove_stale_lock_files() -> None:
    """Workers of killed processes leave theirs for a day, and each worker that starts looks at all of them."""
    for file in host._shared_folder().glob(LOCK_FILES):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > STALE and host._is_unlocked(file):
                file.unlink()


@pytest.fixture(autouse=True)
def lock_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of workers that were killed in this process go with their test."""
    held: list[host.Presence] = []
    hold = host.Presence.hold

    def hold_and_remember(presence: host.Presence) -> None:
        held.append(presence)
        hold(presence)

    monkeypatch.setattr(host.Presence, "hold", hold_and_remember)
    yield
    for presence in held:
        presence.remove()


class Database(ABC):
    """One database without data; every storage made from it sees the same data, as another process would."""

    kind: str

    @abstractmethod
    def storage(self, probe: StatementProbe | None = None) -> Storage: ...

    def drop(self) -> None:
        return  # the data goes with its folder or with this process


class InMemory(Database):
    kind = "memory"

    def __init__(self) -> None:
        self.data = MemoryDatabase()

    def storage(self, probe: StatementProbe | None = None) -> Storage:
        return MemoryStorage(database=self.data, probe=probe)


class InFile(Database):
    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self.path = path

    def storage(self, probe: StatementProbe | None = None) -> Storage:
        from edda.storage.sqlite import SQLiteStorage

        # Tests end processes, never the machine: no commit has to wait for the disk.
        return SQLiteStorage(str(self.path), probe=probe, synchronous="OFF")


class OnServer(Database):
    def __init__(self, server: databases.Server, *, fresh: bool) -> None:
        self.server = server
        self.fresh = fresh
        self.url = server.create() if fresh else server.lend()

    def drop(self) -> None:
        if self.fresh:
            self.server.drop(self.url)
        else:
            self.server.give_back(self.url)

    def execute(self, statement: str) -> None:
        self.server.execute(statement, self.url)


class OnPostgres(OnServer):
    kind = "postgres"

    def storage(self, probe: StatementProbe | None = None) -> Storage:
        from edda.storage.postgres import PostgresStorage

        return PostgresStorage(self.url, pool_size=2, probe=probe)


class OnMySQL(OnServer):
    kind = "mysql"

    def storage(self, probe: StatementProbe | None = None) -> Storage:
        from edda.storage.mysql import MySQLStorage

        return MySQLStorage(self._at_next_node(), pool_size=2, probe=probe)

    def _at_next_node(self) -> str:
        if not self.server.nodes:
            return self.url
        self._turns = getattr(self, "_turns", -1) + 1
        node = urlsplit(self.server.nodes[self._turns % len(self.server.nodes)])
        return urlsplit(self.url)._replace(netloc=node.netloc).geturl()


def need(server: databases.Server | None, name: str, setting: str) -> databases.Server:
    """Skip without a server, but never silently where it counts."""
    if server is None:
        skip_unless_ci(f"no {name}: set {setting}, run one on its usual local port, or install its server binaries")
    return server


def behind_pgbouncer(database: OnServer, mode: str, pool_size: int = 5) -> str:
    """The URL of a PostgreSQL database through a PgBouncer."""
    place = databases.pgbouncer(mode, pool_size)
    if place is None:
        skip_unless_ci("no pgbouncer: install the package of that name")
    return urlsplit(database.url)._replace(netloc=place).geturl()


class MakeDatabase(Protocol):
    def __call__(self, kind: str, *, fresh: bool = False) -> Database: ...


@pytest.fixture
def make_database(tmp_path: Path) -> Iterator[MakeDatabase]:
    """Without data; `fresh` also without tables, which takes longer."""
    made: list[Database] = []

    def make(kind: str, *, fresh: bool = False) -> Database:
        made.append(new_database(kind, tmp_path / f"edda{len(made)}.db", fresh))
        return made[-1]

    yield make
    for database in made:
        database.drop()


def new_database(kind: str, path: Path, fresh: bool = False) -> Database:
    if kind not in tiers.current().databases:
        pytest.fail(f"runs without {kind} here: name it in a parameter or with @pytest.mark.databases({kind!r})")
    match kind:
        case "memory":
            return InMemory()
        case "sqlite":
            return InFile(path)
        case "postgres":
            return OnPostgres(need(databases.postgres(), "PostgreSQL", "EDDA_TEST_POSTGRES_URL"), fresh=fresh)
        case "mysql":
            return OnMySQL(need(databases.mysql(), "MariaDB or MySQL", "EDDA_TEST_MYSQL_URL"), fresh=fresh)
        case _:
            raise ValueError(kind)


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    return make_database(request.param)


class MakeStorage(Protocol):
    async def __call__(self, probe: StatementProbe | None = None) -> Storage: ...


@pytest.fixture
async def make_storage(database: Database) -> AsyncIterator[MakeStorage]:
    """Opens one more storage on the test's database, not migrated: what a second process sees."""
    made: list[Storage] = []

    async def make(probe: StatementProbe | None = None) -> Storage:
        storage = database.storage(probe)
        made.append(storage)
        await storage.open()
        return storage

    yield make
    for storage in made:
        await storage.close()


@pytest.fixture
async def storage(make_storage: MakeStorage) -> Storage:
    storage = await make_storage()
    await storage.migrate()
    return storage


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen, others = tiers.split(items)
    config.hook.pytest_deselected(items=others)
    # Each worker begins with neighbours: those that come first are on one worker, one after the other.
    items[:] = sorted(chosen, key=lambda item: item.get_closest_marker("processes") is None)


def pytest_collection_finish() -> None:
    """What was collected stays until the end: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("browser") and not Path(CHROMIUM).exists():
        skip_unless_ci(f"{CHROMIUM} is not there")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`make test` goes through the suite in two parts: of a few files, some parts are empty."""
    options = session.config.option
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and options.markexpr and not options.lf:
        session.exitstatus = pytest.ExitCode.OK
