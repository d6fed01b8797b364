from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import pytest

from edda.web import WebApp
from tests.conftest import new_database
from tests.engine.conftest import url_of

from .fakes import FakeService
from .listening import serving_desk

DATABASES = os.environ.get("EDDA_API_DATABASES", "sqlite").split(",")
ANSWERS = "answers of the control API"
"""Operation, and the number of responses by status."""


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def web(service: FakeService) -> WebApp:
    return WebApp(service)


@pytest.fixture(scope="session")
def desks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URL of an app with data of every kind, by kind of database."""
    with ExitStack() as stack:
        yield {kind: stack.enter_context(_open_desk(kind, tmp_path_factory.mktemp("desk"))) for kind in DATABASES}


@contextmanager
def _open_desk(kind: str, folder: Path) -> Iterator[str]:
    database = new_database(kind, folder / "desk.db", fresh=True)
    try:
        with serving_desk(url_of(database)) as url:
            yield url
    finally:
        database.drop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Requests to the control API, and the statuses of the responses."""
    ended = [report for reports in terminalreporter.stats.values() for report in reports if _is_call(report)]
    found = [value for report in ended for name, value in report.user_properties if name == ANSWERS]
    if found:
        terminalreporter.write_line(_sum_up(found))


def _is_call(report: object) -> TypeGuard[pytest.TestReport]:
    return isinstance(report, pytest.TestReport) and report.when == "call"


def _sum_up(found: list[Any]) -> str:
    answers: Counter[int] = Counter()
    for _, counted in found:
        answers.update(counted)
    shares = ", ".join(f"{status}: {count / answers.total():.1%}" for status, count in sorted(answers.items()))
    operations = len({name for name, _ in found})
    return f"control API on {', '.join(DATABASES)}: {operations} operations, {answers.total():,} answers; {shares}"
