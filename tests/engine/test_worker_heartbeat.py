"""What the thread of the heartbeat reports to its worker."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

import pytest

from edda.core.model import RunId, WorkerId
from edda.engine.worker.heartbeat import Heartbeat
from edda.errors import StorageUnavailableError
from edda.storage.ports import Workers

from .conditions import until
from .conftest import MORTAL

WORKER = WorkerId("w1")


class Database:
    """Answers each heartbeat with the time, or as it is told to; None is the answer to a worker without a row."""

    def __init__(self) -> None:
        self.answers: deque[int | BaseException | None] = deque()

    async def open_heartbeat(self) -> Database:
        return self

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        answer = self.answers.popleft() if self.answers else time.time_ns() // 1_000
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        return 0

    async def close(self) -> None: ...


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_heartbeat(self, database_now: int, sent: float, received: float) -> None:
        self.heard.append("answered")

    def on_heartbeat_failed(self, error: Exception) -> None:
        self.heard.append("failed")

    def on_taken_over(self) -> None:
        self.heard.append("taken over")

    def clock_jumped(self) -> None:
        self.heard.append("clock jumped")

    def runs_handed_over(self) -> None:
        self.heard.append("handed over")


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def heartbeat(database: Database, listener: Listener) -> AsyncIterator[Heartbeat]:
    heartbeat = Heartbeat(cast(Workers, database), WORKER, MORTAL, listener)
    yield heartbeat
    await heartbeat.stop()


async def test_a_worker_without_a_row_is_told_that_it_was_taken_over(
    heartbeat: Heartbeat, database: Database, listener: Listener
) -> None:
    database.answers.append(None)
    heartbeat.start()
    await until(lambda: listener.heard == ["taken over"], "the worker was told")


async def test_the_end_of_the_thread_is_told(heartbeat: Heartbeat, database: Database, listener: Listener) -> None:
    """Without heartbeats the lease lapses, and the worker would notice only when it is taken over."""
    database.answers.append(SystemExit("no memory for another thread"))
    heartbeat.start()
    await until(lambda: listener.heard == ["taken over"], "the worker was told")
    await until(lambda: heartbeat.has_died, "the thread has ended")


async def test_a_database_that_does_not_answer_is_asked_again(
    heartbeat: Heartbeat, database: Database, listener: Listener
) -> None:
    database.answers += [StorageUnavailableError("away"), StorageUnavailableError("away")]
    heartbeat.start()
    await until(lambda: "answered" in listener.heard, "a heartbeat is answered")
    assert listener.heard[:2] == ["failed", "answered"], "the first of several failures is told"


async def test_a_clock_that_was_set_is_told(heartbeat: Heartbeat, database: Database, listener: Listener) -> None:
    now = time.time_ns() // 1_000
    database.answers += [now, now - 60_000_000]
    heartbeat.start()
    await until(lambda: "clock jumped" in listener.heard, "the worker was told")
    assert not heartbeat.may_take_over
