"""One fixture, every database: what asks for `storage` or `make_storage` runs on each of them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, settings

from edda.storage.memory.journal import MemoryDatabase
from edda.storage.memory.storage import MemoryStorage
from edda.storage.ports import StatementProbe, Storage
from tests import databases
from tests.sampling import is_sampled, sample

# Deadlines of single examples say nothing on a shared machine; the whole test has its time-out.
examples = 12 if is_sampled() else 20
settings.register_profile("ci", max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True)
settings.register_profile(
    "release",
    max_examples=20_000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

KINDS = ("memory", "sqlite", "postgres", "mysql")


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
    if server is not None:
        return server
    reason = f"no {name}: set {setting}, run one on its usual local port, or install its server binaries"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def behind_pgbouncer(database: OnServer, mode: str, pool_size: int = 5) -> str:
    """The URL of a PostgreSQL database through a PgBouncer."""
    place = databases.pgbouncer(mode, pool_size)
    if place is None:
        reason = "no pgbouncer: install the package of that name"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
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
    left_out = sample(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    # Workers begin with neighbours: those that come first are on one of them, one after the other.
    items.sort(key=lambda item: item.get_closest_marker("pair") is None)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`make test` goes through the suite in two parts: of a few files, some parts are empty."""
    options = session.config.option
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and options.markexpr and not options.lf:
        session.exitstatus = pytest.ExitCode.OK
