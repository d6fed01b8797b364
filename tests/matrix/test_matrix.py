"""Each input is given to a run in each state, on every database, and what becomes of it is the row of the table.

One test gives one input to one run of every subject. Then it holds for all of them: the outcome is the documented one;
the workers are at rest (statements and log lines are counted); each open run is driven by a worker, or waits for
something that its record names; and when it is given what it waits for, it ends as its code says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from edda import EddaApp, RunStatus
from edda.core.states import OPEN, WAITING
from edda.errors import InstanceNotFoundError
from edda.web.service import State
from edda.workflow.workflow import registry
from tests.conftest import Database

from ..engine.conditions import until, until_status
from ..engine.conftest import MORTAL, MakeApp
from . import table
from .inputs import INPUTS, Input, Refusals, Runs
from .subjects import SUBJECTS, Scene, Serves, Subject, World, every, served
from .table import AGAIN, GONE, REFUSED, SAME, rows

SETTINGS = replace(MORTAL, lease=3.0, heartbeat=0.5, sweep=0.5, parked_first=3600.0)
WINDOW = 1.0
MAX_STATEMENTS = 80
"""Of a test's workers at rest, in a window: heartbeats, sweeps and polls. A loop without a pause sends thousands."""
MAX_LINES = 3
CELLS = rows()
SUBJECT = {subject.name: subject for subject in SUBJECTS}
DEADLINES = (3.0, 8.0, 25.0)
"""Seconds until the runs' deadline: a longer one is tried if a busy machine did not bring all runs into their state."""

OTHER_ENDS = {
    ("unclaimed", "cancel"): RunStatus.CANCELLED,
    ("unclaimed", "deadline"): RunStatus.FAILED,
    ("parked", "deadline"): RunStatus.FAILED,
    ("parked_child", "deadline"): RunStatus.FAILED,
    ("cancelled", "retry"): RunStatus.COMPLETED,
}
"""Of runs that had the input before they could go on."""
FINISH = {("cancelled", "retry"): "event"}
"""The subject by which a run is finished that is in another state now."""
NAMED = WAITING | {RunStatus.PARKED, RunStatus.COMPENSATING}
"""What such a run waits for is the reason in its record."""

MakeWorld = Callable[[], Awaitable[World]]


class Statements:
    """A probe that counts."""

    def __init__(self) -> None:
        self.count = 0

    def before(self, statement: str) -> None:
        self.count += 1

    def after(self, statement: str) -> None:
        return


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("edda")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def statements() -> Statements:
    return Statements()


@pytest.fixture
def make_world(database: Database, make_app_on: MakeApp, statements: Statements) -> MakeWorld:
    async def make() -> World:
        scene = Scene()
        flows = {subject.name: subject.make(scene) for subject in SUBJECTS}
        by_name = {subject.workflow_name: subject for subject in SUBJECTS}
        workers: list[EddaApp] = []

        async def start_worker(serves: Serves) -> EddaApp:
            names = [name for name in registry.names() if name not in by_name or serves(by_name[name])]
            app = await make_app_on(
                on=database,
                storage=database.storage(statements),
                workflows=[registry.get(name) for name in names],
                settings=SETTINGS,
            )
            workers.append(app)
            return app

        client = await make_app_on(on=database, worker=False, settings=SETTINGS)
        return World(scene, client, workers, start_worker, flows)

    return make


def test_the_table_has_a_cell_for_every_state_and_input() -> None:
    assert set(CELLS) == {(subject.name, given.name) for subject in SUBJECTS for given in INPUTS}
    assert {subject.name for subject in SUBJECTS} == set(table.STATES)
    assert {given.name for given in INPUTS} == set(table.INPUTS)
    covered = {subject.status for subject in SUBJECTS}
    assert covered == set(RunStatus) - {RunStatus.RECURRED}, "`recurred` is a past generation, which gets no input"


@pytest.mark.parametrize("given", INPUTS, ids=lambda given: given.name)
async def test_an_input_in_every_state(
    given: Input, make_world: MakeWorld, statements: Statements, lines: Lines
) -> None:
    world, runs = await bring_into_states(make_world, given)
    entered = Counter(world.scene.entered)
    refusals = await given.give(world, runs)
    found = await asyncio.gather(*(describe(world, runs, given, name, refusals, entered) for name in runs))
    wrong = [one for one in found if one is not None]
    assert not wrong, "\n".join(wrong)
    await assert_at_rest(statements, lines)
    await assert_driven(world, runs)
    wrong = await finish(world, runs, given)
    assert not wrong, "\n".join(wrong)


async def bring_into_states(make_world: MakeWorld, given: Input) -> tuple[World, Runs]:
    if not given.deadline:
        world = await make_world()
        return world, await reach_all(world, "")
    for timeout in DEADLINES:
        world = await make_world()
        world.timeout = timeout
        with suppress(AssertionError):
            return world, await reach_all(world, f"{timeout:.0f}-")
        for app in world.workers:
            await app.shutdown(grace=0.0)
    pytest.fail(f"the runs did not reach their states within {timeout} seconds")


async def reach_all(world: World, prefix: str) -> Runs:
    runs = {subject.name: f"{prefix}{subject.name}" for subject in SUBJECTS}
    begun = time.monotonic()
    await world.start_worker(lambda subject: served(subject) and not subject.is_orphan)
    parked = [subject for subject in SUBJECTS if subject.status is RunStatus.PARKED]
    for subject in parked:
        await world.start(subject, runs[subject.name])
    for subject in parked:
        await subject.reach(world, runs[subject.name])
    await world.worker.shutdown(grace=0.0)
    world.scene.changed.update(subject.workflow_name for subject in parked)
    (orphan,) = (subject for subject in SUBJECTS if subject.is_orphan)
    doomed = await world.start_worker(lambda subject: subject is orphan)
    await world.start(orphan, runs[orphan.name])
    await orphan.reach(world, runs[orphan.name])
    await world.start_worker(served)
    others = [subject for subject in SUBJECTS if subject not in parked and subject is not orphan]
    for subject in others:
        await world.start(subject, runs[subject.name])
    for subject in others:
        await subject.reach(world, runs[subject.name])
    for subject in parked:
        await until_status(world.client, runs[subject.name], RunStatus.PARKED)
    for subject in SUBJECTS:
        if subject.ends is not None:
            assert await status_of(world, runs[subject.name]) is subject.status, subject.name
    doomed.kill()
    assert world.timeout is None or time.monotonic() - begun < world.timeout - 0.5
    return runs


async def status_of(world: World, run_id: str) -> RunStatus | None:
    try:
        return await world.client.handle(run_id).status()
    except InstanceNotFoundError:
        return None


async def describe(
    world: World, runs: Runs, given: Input, name: str, refusals: Refusals, entered: Counter[str]
) -> str | None:
    """What is wrong with the run of a subject after the input; None if it is as the table says."""
    cell, run_id, subject = CELLS[name, given.name], runs[name], SUBJECT[name]
    expected = expected_status(cell, subject)

    async def is_reached() -> bool:
        is_again = cell != AGAIN or world.scene.entered[run_id] > entered[run_id]
        return is_again and await status_of(world, run_id) is expected

    if (name in refusals) is not (cell == REFUSED):
        return f"{name} × {given.name}: {refusals.get(name, 'no error')}, the table says {cell}"
    try:
        await until(is_reached, "", within=20.0)
    except AssertionError:
        found = await status_of(world, run_id)
        return f"{name} × {given.name}: {found}, begun {world.scene.entered[run_id]} times; the table says {cell}"
    return None


def expected_status(cell: str, subject: Subject) -> RunStatus | None:
    if cell == GONE or (subject.ends is None and cell == REFUSED):
        return None
    if cell in (SAME, AGAIN, REFUSED):
        return subject.status
    return SUBJECT[cell].status if cell in SUBJECT else RunStatus(cell)


async def assert_at_rest(statements: Statements, lines: Lines) -> None:
    """What follows from the input happens within the time a busy machine needs; then nothing goes on."""

    async def is_quiet() -> bool:
        before, logged = statements.count, len(lines.texts)
        await asyncio.sleep(WINDOW)
        counts.append((statements.count - before, len(lines.texts) - logged))
        return counts[-1][0] <= MAX_STATEMENTS and counts[-1][1] <= MAX_LINES

    counts: list[tuple[int, int]] = []
    try:
        await until(is_quiet, "", within=6.0)
    except AssertionError:
        pytest.fail(f"statements and log lines per second: {counts}; the last lines: {lines.texts[-5:]}")


async def assert_driven(world: World, runs: Runs) -> None:
    async def are_driven() -> bool:
        lost[:] = await undriven(world, runs)
        return not lost

    lost: list[str] = []
    try:
        await until(are_driven, "", within=20.0)  # the lease of a dead worker has to lapse first
    except AssertionError:
        pytest.fail(f"no worker drives these runs, and they wait for nothing that has a name: {lost}")


async def undriven(world: World, runs: Runs) -> list[str]:
    """Open runs that no worker drives and whose record does not say what they wait for."""
    found = []
    for name, run_id in runs.items():
        if await status_of(world, run_id) in OPEN and not await is_looked_after(world, run_id):
            found.append(f"{name}: {await world.record(run_id)}")
    return found


async def is_looked_after(world: World, run_id: str) -> bool:
    record = await world.record(run_id)
    if record.owner is not None:
        workers = [app.engine.worker for app in world.workers if app.state is State.STARTED]
        return any(
            worker is not None and worker.info.id == record.owner and run_id in worker.live for worker in workers
        )
    if record.status in NAMED:
        return record.reason is not None
    return record.status is RunStatus.RUNNING and record.workflow in ("matrix_delayed", "matrix_unclaimed")


async def finish(world: World, runs: Runs, given: Input) -> list[str]:
    """With the right code, and given what it waits for, each run that is open ends as its code says."""
    is_open = {name for name, run_id in runs.items() if await status_of(world, run_id) in OPEN}
    world.scene.changed.clear()
    await world.start_worker(every)
    for name in is_open:
        await SUBJECT[FINISH.get((name, given.name), name)].finish(world, runs[name])
    ends = await asyncio.gather(*(describe_end(world, given, name, runs[name]) for name in is_open))
    return [one for one in ends if one is not None]


async def describe_end(world: World, given: Input, name: str, run_id: str) -> str | None:
    expected = OTHER_ENDS.get((name, given.name), SUBJECT[name].ends)
    assert expected is not None
    try:
        await until_status(world.client, run_id, expected)
    except AssertionError:
        found = await world.record(run_id)
        return f"{name} after {given.name}: {found.status} ({found.reason}), expected {expected}"
    return None
