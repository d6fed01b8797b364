"""What is old goes by itself, and never what somebody still needs."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from edda import EddaApp, WorkflowContext, activity, wait_event, workflow
from edda.core.model import RunId
from edda.engine.settings import Settings
from edda.engine.worker.maintenance import Pruner
from edda.errors import InstanceNotFoundError
from edda.testing import VirtualApp, VirtualClock

from .conditions import until
from .conftest import MakeApp
from .events import registered, result_of, send, start_waiting, stored, until_waiting_for

DAY = 86_400_000_000


async def prune(app: EddaApp, days: float, *, messages: float = 7.0, runs: float | None = None) -> int:
    """As a worker would in so many days."""
    clock = VirtualClock(await app.engine.storage.now() + int(days * DAY))
    settings = Settings(message_retention_days=messages, run_retention_days=runs)
    return await Pruner(app.engine.storage, clock, settings).prune()


async def ids(app: EddaApp) -> list[str]:
    return [event.id for event in await stored(app, "paid")]


async def test_events_go_when_they_are_old_and_not_before(app: EddaApp) -> None:
    for number in range(3):
        await send(app, "paid", number, id=str(number))
    assert await prune(app, 6.9) == 0
    assert await ids(app) == ["0", "1", "2"]
    assert await prune(app, 8) == 2
    assert await ids(app) == ["2"], "the newest stays: numbers must not be given out twice"
    assert await prune(app, 8) == 0


async def test_more_than_one_batch_of_events_goes_at_once(app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edda.engine.worker.maintenance.PRUNE_BATCH", 10)
    await asyncio.gather(*(send(app, "paid", number) for number in range(36)))
    assert await prune(app, 8) == 35
    assert len(await ids(app)) == 1


async def test_a_run_that_waits_is_not_touched_by_the_age_of_what_it_waits_for(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        return [(await wait_event(ctx, "paid", match={"n": n})).data for n in range(2)]

    run_id = await start_waiting(app, order)
    await send(app, "paid", {"n": 0})
    await until_waiting_for(app, run_id, "paid:2")
    await send(app, "other")
    assert await prune(app, 400, runs=1.0) > 0
    assert await registered(app, run_id) == ["paid:2"]
    await send(app, "paid", {"n": 1})
    assert await result_of(app, run_id) == [{"n": 0}, {"n": 1}]


async def test_an_event_in_an_unread_letter_stays_until_it_is_read(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid")).data

    first = await make_app()
    run_id = await start_waiting(first, order)
    await first.shutdown()
    door = await make_app(worker=False)
    await send(door, "paid", 7, id="7")
    await send(door, "other")
    await prune(door, 400)
    assert await ids(door) == ["7"]
    second = await make_app()
    assert await result_of(second, run_id) == 7
    await prune(second, 400)
    assert await ids(second) == []


async def test_an_event_that_was_read_does_not_come_again_while_the_run_is_open(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        return [(await wait_event(ctx, "part")).data for _ in range(3)]

    run_id = await start_waiting(app, order)
    await send(app, "part", 1)
    await until_waiting_for(app, run_id, "part:2")
    await prune(app, 7.01)  # its keys go, it is still there itself
    await send(app, "part", 2)
    await until_waiting_for(app, run_id, "part:3")
    await prune(app, 8)
    await send(app, "part", 3)
    assert await result_of(app, run_id) == [1, 2, 3]


async def test_letters_of_runs_that_are_over_go(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")

    run_id = await start_waiting(app, order)
    await send(app, "paid")
    await result_of(app, run_id)
    assert await prune(app, 6.9) == 0
    # The event is the newest and stays, but for its key; the letter goes.
    assert await prune(app, 8) == 2
    assert await prune(app, 8) == 0


async def test_runs_stay_for_ever_unless_a_time_is_set(app: EddaApp) -> None:
    @activity
    async def note(ctx: WorkflowContext) -> int:
        return 1

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await note(ctx)

    @workflow
    async def waiting(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")

    run_id = await app.start(order)
    await result_of(app, run_id)
    open_run = await start_waiting(app, waiting)
    assert await prune(app, 400) == 0
    assert await prune(app, 29, runs=30) == 0
    assert await app.handle(run_id).result() == 1
    assert await prune(app, 31, runs=30) == 1
    with pytest.raises(InstanceNotFoundError):
        await app.handle(run_id).status()
    assert await app.engine.storage.history(RunId(run_id)) == ()
    assert await registered(app, open_run) == ["paid:1"]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_worker_prunes_by_itself(kind: str, tmp_path: Path) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return 1

    url = "memory://" if kind == "memory" else f"sqlite:///{tmp_path}/old.db"
    hasty = Settings(prune_every=0.02)
    options: dict[str, Any] = {"message_retention_days": 2, "run_retention_days": 5, "settings": hasty}
    async with VirtualApp(db_url=url, auto_skip=False, **options) as app:
        await app.run(order.options(id="old"))
        await send(app, "paid", 1, id="old")
        await app.advance(timedelta(days=3))
        await send(app, "paid", 2, id="new")

        async def old_event_is_gone() -> bool:
            return await ids(app) == ["new"]

        async def old_run_is_gone() -> bool:
            return not (await app.find_instances())["instances"]

        await until(old_event_is_gone, "the old event is gone")
        assert not await old_run_is_gone()
        await app.advance(timedelta(days=3))
        await until(old_run_is_gone, "the old run is gone")
        assert await ids(app) == ["new"]
