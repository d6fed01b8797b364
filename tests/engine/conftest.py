"""Apps on every database: what asks for `make_app` runs on each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from edda import EddaApp
from edda.engine.settings import Settings
from edda.workflow.workflow import registry
from tests.conftest import Database, InFile, MakeDatabase, OnServer

RESTLESS = Settings(linger=0.0, sweep=0.1, takeover_grace=0.0, call_timeout=30.0)
"""Every wait leaves memory at once, so that every wait is also a replay."""

MORTAL = Settings(lease=1.5, heartbeat=0.3, sweep=0.1, takeover_grace=0.0, linger=0.0, call_timeout=30.0)
"""A crashed worker's runs go on soon."""


def url_of(database: Database) -> str:
    if isinstance(database, InFile):
        return f"sqlite:///{database.path}"
    return database.url if isinstance(database, OnServer) else "memory://"


@pytest.fixture
def database_url(database: Database) -> str:
    return url_of(database)


@pytest.fixture(params=("sqlite", "postgres", "mysql"))
def shared_database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    """One that several processes can use."""
    return make_database(request.param)


class MakeApp(Protocol):
    async def __call__(self, *, on: Database | None = None, **options: Any) -> EddaApp: ...


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test's apps know the workflows that this test defines."""
    monkeypatch.setattr(registry, "_workflows", {})


@pytest.fixture
async def make_app_on() -> AsyncIterator[MakeApp]:
    """Started apps on the database that `on` says; several on one database are several processes to each other."""
    made: list[EddaApp] = []

    async def make(*, on: Database | None = None, **options: Any) -> EddaApp:
        assert on is not None
        options.setdefault("settings", RESTLESS)
        storage = options.pop("storage", None) or on.storage()
        app = EddaApp(options.pop("service_name", "test"), url_of(on), storage=storage, **options)
        made.append(app)
        await app.initialize()
        return app

    yield make
    for app in made:
        await app.shutdown(grace=0.0)


@pytest.fixture
def make_app(database: Database, make_app_on: MakeApp) -> MakeApp:
    async def make(*, on: Database | None = None, **options: Any) -> EddaApp:
        return await make_app_on(on=on or database, **options)

    return make


@pytest.fixture
async def app(make_app: MakeApp) -> EddaApp:
    return await make_app()


@pytest.fixture
def other_database(database: Database, make_database: MakeDatabase) -> Database:
    """A second one of the same kind."""
    return make_database(database.kind)
