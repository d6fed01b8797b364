"""The database's clock is set while workers live: nothing stands still, and no live worker is taken over."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from edda import EddaApp, RunStatus
from edda.core.model import MICROSECONDS, WorkerId
from edda.engine.client import CLOCK_AGE
from edda.engine.clock import DatabaseClock
from edda.engine.settings import Settings
from edda.engine.worker.heartbeat import Heartbeat
from edda.storage.memory.storage import MemoryHeartbeat, MemoryStorage
from tests.databases import PostgresServer
from tests.servers import Unavailable, start_postgres
from tests.tiers import skip_unless_ci

from .conditions import until, until_status
from .processes import Process, program
from .programs import clock as clock_program

HOUR = 3600.0


class Monotonic:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def monotonic() -> Monotonic:
    return Monotonic()


@pytest.fixture
def estimate(monotonic: Monotonic) -> DatabaseClock:
    return DatabaseClock(monotonic)


def tell(estimate: DatabaseClock, monotonic: Monotonic, database: float, *, took: float = 0.01) -> None:
    """The database answers with its time, in the middle of the round trip."""
    sent = monotonic.now
    monotonic.now += took
    estimate.observe(int((database + took / 2) * MICROSECONDS), sent, monotonic.now)


def seconds(estimate: DatabaseClock) -> float:
    return estimate.now() / MICROSECONDS


def test_the_estimate_is_a_lower_bound(estimate: DatabaseClock, monotonic: Monotonic) -> None:
    tell(estimate, monotonic, 5000.0, took=1.0)
    assert 5000.0 <= seconds(estimate) <= 5001.0
    monotonic.now += 10
    assert 5010.0 <= seconds(estimate) <= 5011.0


def test_a_slow_answer_does_not_turn_the_estimate_back(estimate: DatabaseClock, monotonic: Monotonic) -> None:
    tell(estimate, monotonic, 5000.0)
    before = seconds(estimate)
    sent = monotonic.now
    monotonic.now += 20.0
    estimate.observe(int(5000.1 * MICROSECONDS), sent, monotonic.now)  # read at once, and received late
    assert seconds(estimate) >= before + 20.0 - 0.1


@pytest.mark.parametrize("jump", [-HOUR, -10.0, -1.0, 1.0, HOUR])
def test_the_estimate_follows_a_clock_that_was_set(estimate: DatabaseClock, monotonic: Monotonic, jump: float) -> None:
    for number in range(10):
        tell(estimate, monotonic, 5000.0 + number)
        monotonic.now += 1
    seconds(estimate)
    tell(estimate, monotonic, 5010.0 + jump)
    assert abs(seconds(estimate) - (5010.0 + jump)) < 0.5


class SetBeforeFirstHeartbeat(MemoryStorage):
    """The database's clock is set after the worker has registered, and before its heartbeat has a connection."""

    def __init__(self, jump: float) -> None:
        self._offset = 0
        self._jump = int(jump * MICROSECONDS)
        super().__init__(now=lambda: time.time_ns() // 1000 + self._offset)

    async def open_heartbeat(self) -> MemoryHeartbeat:
        self._offset = self._jump
        return await super().open_heartbeat()


@pytest.mark.parametrize("jump", [-HOUR, HOUR], ids=["back", "forward"])
async def test_a_clock_that_is_set_before_the_first_heartbeat_is_noticed(
    jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    app = EddaApp("clocks", "memory://", storage=SetBeforeFirstHeartbeat(jump), settings=clock_program.SETTINGS)
    async with app:
        await until(lambda: "clock was set by" in caplog.text, "the worker has noticed")


class Deaf:
    """A listener that does nothing."""

    def on_heartbeat(self, database_now: int, sent: float, received: float) -> None: ...

    def on_heartbeat_failed(self, error: Exception) -> None: ...

    def on_taken_over(self) -> None: ...

    def clock_jumped(self) -> None: ...

    def runs_handed_over(self) -> None: ...


@pytest.mark.parametrize("jump", [-HOUR, -5.0, 5.0, HOUR])
async def test_no_worker_is_taken_over_after_a_jump_while_it_may_start_steps(monotonic: Monotonic, jump: float) -> None:
    """Both had their last answer just before the jump; one has no connection since, the other goes on."""
    settings = Settings(lease=15.0, heartbeat=3.0, takeover_grace=5.0)
    cut_off, other = (Heartbeat(MemoryStorage(), WorkerId(f"w{n}"), settings, Deaf(), monotonic) for n in (1, 2))
    before, offset = monotonic.now, 0.0
    started_steps, could_take_over = [], []
    while monotonic.now < before + 40.0:
        elapsed = monotonic.now - before
        if elapsed % settings.heartbeat == 0:
            offset = jump if elapsed > 21.0 else 0.0
            for heartbeat in (cut_off, other) if elapsed <= 21.0 else (other,):
                now = int((5000.0 + elapsed + offset) * MICROSECONDS)
                heartbeat.see_clock(now, monotonic.now, monotonic.now)
                heartbeat.sent_at = monotonic.now
        if elapsed > 21.0 + settings.heartbeat:
            started_steps.append(cut_off.lease_is_safe)
            could_take_over.append(other.may_take_over)
        monotonic.now += 0.5
    assert not [both for both in zip(started_steps, could_take_over, strict=True) if all(both)]
    assert started_steps[0]
    assert could_take_over[-1]


# Real clocks


class FakeTime:
    """The time of a process that was started with `environment`, moved while it runs."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "time"
        self.set(0.0)

    def set(self, seconds: float) -> None:
        fresh = self.file.with_suffix(f".{secrets.token_hex(4)}")
        fresh.write_text(f"{seconds:+.0f}s\n")
        fresh.chmod(0o644)
        fresh.rename(self.file)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def library() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


class Place:
    """A database whose clock can be set, and a worker on it in a process of its own."""

    def __init__(self, url: str, time: FakeTime, log: Path) -> None:
        self.url = url
        self.time = time
        self.log = log

    def worker(self, log: Path | None = None) -> AbstractAsyncContextManager[Process]:
        return program("clock", self.url, log or self.log, self.time.file)


@pytest.fixture(scope="module")
def postgres() -> Iterator[tuple[PostgresServer, FakeTime]]:
    # Not in pytest's folder: the server runs as another user, and every pytest that starts makes that folder private.
    with TemporaryDirectory(prefix="edda-time-") as folder:
        Path(folder).chmod(0o755)
        time = FakeTime(Path(folder))
        try:
            yield PostgresServer(start_postgres(PostgresServer.answers, environment=time.environment)), time
        except Unavailable as reason:
            skip_unless_ci(str(reason))


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    log = tmp_path / "log"
    if request.param == "sqlite":
        time = FakeTime(tmp_path)
        yield Place(f"sqlite:///{tmp_path}/edda.db", time, log)
    else:
        if library() is None:
            skip_unless_ci("needs libfaketime (Debian: faketime)")
        server, time = request.getfixturevalue("postgres")
        time.set(0.0)
        url = server.create()
        yield Place(url, time, log)
        time.set(0.0)
        server.drop(url)


@pytest.fixture
async def looker(place: Place) -> AsyncIterator[EddaApp]:
    storage = clock_program.storage_of(place.url, str(place.time.file))
    app = EddaApp("looker", place.url, worker=False, workflows=clock_program.WORKFLOWS, storage=storage)
    async with app:
        yield app


async def finish(app: EddaApp) -> None:
    run = await app.start(clock_program.short)
    assert await app.handle(run).result(timeout=30) == "done"


@pytest.mark.timed
@pytest.mark.parametrize("jump", [-HOUR, HOUR], ids=["back", "forward"])
async def test_a_live_worker_goes_on_after_the_clock_was_set(place: Place, looker: EddaApp, jump: float) -> None:
    async with place.worker() as worker:
        await worker.hear("serving")
        await finish(looker)
        run = await looker.start(clock_program.long, 50)
        place.time.set(jump)
        times = await looker.handle(run).result(timeout=30)
        assert times == sorted(times)  # a run's own time never goes back
        await until(lambda: "clock was set" in place.log.read_text(), "the worker has noticed")
        await asyncio.sleep(CLOCK_AGE)  # a process without a worker notices then
        await finish(looker)
        assert "took over" not in place.log.read_text()
        assert "lost its lease" not in place.log.read_text()


@pytest.mark.timed
async def test_what_is_ready_before_the_clock_is_set_back_is_not_late(place: Place, looker: EddaApp) -> None:
    """Nobody is there when it is set: the next worker finds runs that are due in an hour."""
    async with place.worker() as worker:
        await worker.hear("serving")
        await finish(looker)
    place.time.set(HOUR)
    async with place.worker() as worker:
        await worker.hear("serving")
        run = await looker.start(clock_program.asleep, 7200.0)  # keeps an hour of the future in the database
        await until_status(looker, run, RunStatus.WAITING_FOR_TIMER)
        await worker.kill()
    place.time.set(0.0)
    await asyncio.sleep(CLOCK_AGE)
    async with place.worker() as worker:  # the dead one's lease ends in an hour
        await worker.hear("serving")
        await finish(looker)
        assert await looker.handle(run).status() is RunStatus.WAITING_FOR_TIMER


@pytest.mark.timed
async def test_two_workers_outlive_a_clock_that_is_set_forward(place: Place, looker: EddaApp, tmp_path: Path) -> None:
    logs = [tmp_path / "one", tmp_path / "two"]
    async with place.worker(logs[0]) as one, place.worker(logs[1]) as two:
        await one.hear("serving")
        await two.hear("serving")
        await finish(looker)
        place.time.set(HOUR)
        await until(lambda: all("clock was set" in log.read_text() for log in logs), "both have noticed")
        await asyncio.sleep(CLOCK_AGE)
        await finish(looker)
        await asyncio.sleep(1.0)  # ten sweeps
        assert not [log for log in logs if "took over" in log.read_text() or "lost its lease" in log.read_text()]
