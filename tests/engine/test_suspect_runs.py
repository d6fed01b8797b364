"""A worker holds other runs back only while a suspect waits in the database, and not for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.core.model import Claim, ClaimedRun, Crashes, RunId, WorkerId, WorkerInfo
from edda.engine.settings import Settings
from edda.engine.worker import process_deaths
from edda.storage.ports import Storage
from edda.workflow.workflow import Workflow

from .conditions import PATIENCE, until
from .conftest import RESTLESS, MakeApp

ENDLESS = 3_600.0
PATIENT = replace(RESTLESS, suspect_window=ENDLESS)
"""Whatever a turn of suspects holds back does not come within the time of a test."""


class Gate:
    """Runs stay in memory until it is opened."""

    def __init__(self) -> None:
        self.is_open = False
        self.ticks = 0


gate = Gate()


@activity
async def tick(ctx: WorkflowContext) -> bool:
    gate.ticks += 1
    await asyncio.sleep(0.01)
    return gate.is_open


@activity
async def work_long(ctx: WorkflowContext) -> None:
    gate.ticks += 1
    await asyncio.sleep(ENDLESS)


@activity
async def answer(ctx: WorkflowContext) -> int:
    return 42


@workflow
async def many_steps(ctx: WorkflowContext) -> None:
    while not await tick(ctx):
        pass


@workflow
async def one_long_step(ctx: WorkflowContext) -> None:
    await work_long(ctx)


@workflow
async def quick(ctx: WorkflowContext) -> int:
    return await answer(ctx)


@workflow
async def suspect(ctx: WorkflowContext) -> int:
    return await answer(ctx)


WORKFLOWS = [many_steps, one_long_step, quick, suspect]


@pytest.fixture(autouse=True)
async def opened_gate() -> AsyncIterator[None]:
    gate.is_open, gate.ticks = False, 0
    yield
    gate.is_open = True


async def results(app: EddaApp, run_ids: Sequence[str]) -> list[int]:
    return [await app.handle(run_id).result(timeout=PATIENCE) for run_id in run_ids]


async def make_suspects(storage: Storage, count: int, workflow: str = "suspect") -> None:
    for number in range(2):
        worker = WorkerInfo(WorkerId(f"mortal-{number}"), "test", "elsewhere", 1)
        await storage.register(worker, 3_600_000_000)
        assert len((await storage.claim(worker.id, [workflow], 100)).runs) == count
        await storage.remove_worker(worker.id, died=True)


@pytest.mark.parametrize("long", [many_steps, one_long_step], ids=["many steps", "one step"])
async def test_a_long_run_in_a_new_worker_shuts_nothing_out(make_app: MakeApp, long: Workflow[[], None]) -> None:
    client = await make_app(workflows=WORKFLOWS, worker=False)
    stored = [await client.start(quick) for _ in range(5)]
    app = await make_app(workflows=WORKFLOWS, settings=PATIENT)
    await app.start(long)
    begun = await app.start(quick)
    await until(lambda: gate.ticks > 0, "the long run is in memory")
    later = await app.start(quick)
    outside = await client.start(quick)
    assert await results(app, [*stored, begun, later, outside]) == [42] * 8
    assert not gate.is_open


async def test_a_worker_without_suspects_asks_for_them_once_and_then_with_each_sweep(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await make_app(workflows=WORKFLOWS, settings=replace(PATIENT, sweep=ENDLESS))
    storage, asked = app.engine.storage, []

    def count(name: str) -> None:
        call = getattr(storage, name)

        async def counted(*args: object) -> object:
            asked.append(name)
            return await call(*args)

        monkeypatch.setattr(storage, name, counted)

    count("has_suspects")
    count("claim_suspects")
    client = await make_app(workflows=WORKFLOWS, worker=False)
    for _ in range(10):
        assert await results(app, [await client.start(quick)]) == [42]
    assert len(asked) <= 2, "at the start, and by the first sweep"


async def test_a_run_that_is_started_during_a_turn_is_left_to_other_workers(make_app: MakeApp) -> None:
    """Beside other runs a death of the process would prove nothing about the suspect."""
    app = await make_app(workflows=WORKFLOWS, settings=replace(PATIENT, sweep=ENDLESS))
    worker = app.engine.worker
    assert worker is not None
    worker.claims.suspects.wait()
    run_id = await app.start(quick)
    assert run_id not in worker.live
    worker.claims.suspects.found_none()
    worker.wake()
    assert await results(app, [run_id]) == [42]


async def test_a_suspect_that_was_run_leaves_nothing_held_back(make_app: MakeApp) -> None:
    """The worker that ran it has other runs in memory then, and may not wait for them."""
    client = await make_app(workflows=WORKFLOWS, worker=False)
    ids = [await client.start(suspect) for _ in range(3)]
    await make_suspects(client.engine.storage, 3)
    app = await make_app(workflows=WORKFLOWS, settings=PATIENT)
    assert await results(app, ids) == [42] * 3
    await app.start(many_steps)
    await until(lambda: gate.ticks > 0, "the long run is in memory")
    assert await results(app, [await app.start(quick), await client.start(quick)]) == [42] * 2


async def test_a_suspect_beside_a_run_that_stays_in_memory_holds_others_for_a_bounded_time(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_deaths, "MAX_WAIT", 0.3)
    client = await make_app(workflows=WORKFLOWS, worker=False)
    ids = [await client.start(suspect) for _ in range(3)]
    await make_suspects(client.engine.storage, 3)
    app = await make_app(workflows=WORKFLOWS, settings=PATIENT)
    await app.start(one_long_step)  # in memory before the worker first looks for suspects
    assert await results(app, [*ids, await app.start(quick), await client.start(quick)]) == [42] * 5
    assert not gate.is_open


async def test_the_next_suspects_do_not_wait_for_those_whose_steps_have_ended(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on in memory with other steps, and do not leave it."""
    monkeypatch.setattr(process_deaths, "MAX_WAIT", ENDLESS)
    client = await make_app(workflows=WORKFLOWS, worker=False)
    ids = [await client.start(many_steps) for _ in range(21)]
    storage = client.engine.storage
    await make_suspects(storage, 21, many_steps.name)
    worker = WorkerInfo(WorkerId("mortal"), "test", "elsewhere", 1)
    await storage.register(worker, 3_600_000_000)
    while (await storage.claim_suspects(worker.id, [many_steps.name], 100, False)).runs:
        pass
    await storage.remove_worker(worker.id, died=True)
    app = await make_app(workflows=WORKFLOWS, settings=PATIENT)
    turns, claim_suspects = 0, app.engine.storage.claim_suspects

    async def claim_counted(*args: Any) -> Claim:
        nonlocal turns
        claim = await claim_suspects(*args)
        turns += bool(claim.runs)
        return claim

    monkeypatch.setattr(app.engine.storage, "claim_suspects", claim_counted)
    begun = await app.start(quick)

    async def are_running() -> bool:
        return all([(await client.client.read_run(run_id)).owner is not None for run_id in ids])

    await until(are_running, "all suspects are in memory")
    assert turns <= 4
    assert await results(app, [begun, await client.start(quick)]) == [42] * 2, "nothing is held back any more"
    assert not gate.is_open


async def test_after_the_turn_of_a_run_that_died_alone_the_others_are_run_together(make_app: MakeApp) -> None:
    client = await make_app(workflows=WORKFLOWS, worker=False)
    storage = client.engine.storage
    ids = [await client.start(one_long_step) for _ in range(13)]
    await make_suspects(storage, 13, one_long_step.name)
    killer = await client.start(suspect)
    await make_suspects(storage, 1)
    for number in range(2):
        worker = WorkerInfo(WorkerId(f"alone-{number}"), "test", "elsewhere", 1)
        await storage.register(worker, 3_600_000_000)
        assert len((await storage.claim_suspects(worker.id, ["suspect"], 100, True)).runs) == 1
        await storage.remove_worker(worker.id, died=True)
    app = await make_app(workflows=WORKFLOWS, settings=PATIENT)
    assert await results(app, [killer]) == [42]
    await until(lambda: gate.ticks == 13, "all others are in their steps, which do not end")
    assert all([(await client.client.read_run(run_id)).owner is not None for run_id in ids])


def _turns(window: float) -> process_deaths.SuspectTurns:
    return process_deaths.SuspectTurns(Settings(suspect_window=window))


def test_waiting_for_memory_is_bounded_whatever_the_window_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    turns = _turns(ENDLESS)
    assert turns.wait() == process_deaths.MAX_WAIT
    assert turns.holding_since == now
    now += process_deaths.MAX_WAIT
    assert turns.wait() == 0
    assert _turns(0.5).wait() == 0.5


def claimed(deaths: int) -> ClaimedRun:
    return ClaimedRun(RunId("run"), "suspect", 0, 1, b"", 0, None, 0, 0, (), (), crashes=Crashes(deaths, 0, 0))


def test_a_turn_in_company_is_not_prolonged_and_others_get_as_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    turns = _turns(30.0)
    turns.open([claimed(6)], [RunId("run")])
    assert turns.left == 240.0
    turns = _turns(30.0)
    turns.wait()
    now += 5.0
    turns.open([claimed(6)], [RunId("run"), RunId("other")])
    assert turns.left == 30.0
    now += 30.0
    turns.close()
    assert turns.has_held_long
    turns.give_way()
    now += 34.9
    assert turns.is_time_of_others, "the wait and the turn took 35 s"
    now += 0.2
    assert not turns.is_time_of_others
