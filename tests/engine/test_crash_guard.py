"""Which deaths of earlier processes still count for a run that was replayed, and against which of its steps."""

from __future__ import annotations

import asyncio

import pytest

from edda import RetryPolicy, WorkflowContext, activity, sleep, workflow
from edda.core.codec import Codec
from edda.core.model import ClaimedRun, Crashes, Entry, EntryKind, RunId, RunWrite, WorkerId, WorkerInfo
from edda.engine.run.outcomes import OutcomePolicy
from edda.engine.settings import Settings
from edda.engine.worker.process_deaths import CrashGuard
from edda.workflow.activity import ActivityCall
from edda.workflow.execution import Command

from .conditions import until
from .conftest import MakeApp

RUN = RunId("run")
DEADLY = Crashes(5, 2, 4)
"""The first of them after the fourth entry."""


def entry(seq: int, kind: EntryKind = EntryKind.STEP, step: str = "other:1") -> Entry:
    return Entry(seq, kind, step, step.partition(":")[0], True, 0)


def guard(crashes: Crashes = DEADLY, *entries: Entry) -> CrashGuard:
    return CrashGuard(ClaimedRun(RUN, "order", 0, 1, b"", 0, None, 0, 0, entries, (), crashes=crashes), Settings())


def judge() -> OutcomePolicy:
    return OutcomePolicy(RUN, Codec(), RetryPolicy(), lambda: 0)


def command(id: str, needs: int, policy: RetryPolicy | None = None) -> Command:
    made = Command(EntryKind.STEP, id, id.partition(":")[0], b"", lambda _: None)
    made.after_entry, made.is_replay = needs, True
    made.call = ActivityCall(print, (), {}, is_async=False, takes_context=False, retry_policy=policy)
    return made


def by_id(*commands: Command) -> dict[str, Command]:
    return {one.id: one for one in commands}


def bundle(*entries: Entry) -> RunWrite:
    return RunWrite(RUN, 0, 1, entries)


def test_a_step_of_another_branch_makes_nothing_void() -> None:
    made, render, poll = guard(), command("render:1", 2), command("poll:1", 4)
    assert not made.see([render, poll])
    assert not made.note(bundle(entry(5, step="poll:1")), by_id(render))
    assert not made.note(bundle(entry(6, step="poll:2")), by_id(render))
    assert made
    assert made.note(bundle(entry(7, step="render:1")), {})
    assert not made


@pytest.mark.parametrize("kind", [EntryKind.CANCEL, EntryKind.TIMEOUT, EntryKind.LIMIT])
def test_what_stops_the_run_makes_all_void(kind: EntryKind) -> None:
    made, render = guard(), command("render:1", 2)
    made.see([render])
    assert made.note(bundle(entry(5, kind, "")), by_id(render))


@pytest.mark.parametrize("kind", [EntryKind.TIMER, EntryKind.EVENT, EntryKind.HEARTBEAT])
def test_timers_events_and_heartbeats_make_nothing_void(kind: EntryKind) -> None:
    made = guard()
    made.see([])
    assert not made.note(bundle(entry(5, kind, "render:1")), {})


def test_a_failed_attempt_is_an_end() -> None:
    made, render = guard(), command("render:1", 2)
    made.see([render])
    assert made.note(bundle(entry(5, EntryKind.RETRY, "render:1")), by_id(render))


def test_a_step_that_was_abandoned_holds_nothing() -> None:
    made = guard()
    made.see([command("render:1", 2)])
    assert made.note(bundle(entry(5)), {})


def test_deaths_that_a_dead_owner_could_not_clear_are_void_after_the_replay() -> None:
    assert guard(DEADLY, entry(5)).see([])
    assert guard(DEADLY, entry(5)).see([command("later:1", 5)])
    assert not guard(DEADLY, entry(5)).see([command("render:1", 4)])
    assert guard(DEADLY, entry(5, EntryKind.RETRY, "render:1")).see([command("render:1", 4)])


def test_deaths_without_any_progress_stay_whatever_is_in_flight() -> None:
    """Such as those of workflow code that kills its process."""
    assert not guard(DEADLY, entry(5, EntryKind.TIMER)).see([])
    assert not guard(DEADLY, entry(5, EntryKind.TIMER)).see([command("later:1", 5)])


def test_only_steps_that_were_in_flight_each_time_are_refused() -> None:
    made, render, later = guard(DEADLY, entry(5)), command("render:1", 2), command("later:1", 5)
    made.see([render, later])
    assert made.refused([later], judge()) is None
    error = made.refused([render, later], judge())
    assert error is not None
    assert "In flight each time: render:1 (" in str(error)
    assert "the workflow's own code" in str(error)


def test_a_step_that_counts_crashes_fails_and_the_others_go_on() -> None:
    counting = RetryPolicy(count_crashes=True, max_attempts=2)
    made, render, poll = guard(), command("render:1", 2, counting), command("poll:1", 2)
    made.see([render, poll])
    assert made.count(poll, judge()) is None
    assert made.refused([render, poll], judge()) is None, "the one that counts them has its attempts first"
    assert made.count(render, judge()) is not None
    assert made.refused([poll], judge()) is None
    assert made.note(bundle(entry(5, step="render:1")), by_id(poll)), "the deaths were those of the step that failed"


def test_deaths_before_a_step_was_issued_are_none_of_its_attempts() -> None:
    counting = RetryPolicy(count_crashes=True, max_attempts=2)
    made, render, later = guard(), command("render:1", 2), command("later:1", 5, counting)
    made.see([render, later])
    assert made.count(later, judge()) is None
    assert later.attempt == 1


async def test_deaths_are_cleared_when_the_steps_in_flight_have_ended(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, polls = asyncio.Event(), 0

    @activity
    async def render(ctx: WorkflowContext) -> None:
        await opened.wait()

    @activity
    async def poll(ctx: WorkflowContext) -> None:
        nonlocal polls
        polls += 1

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        async def watch() -> None:
            while True:
                await poll(ctx)
                await sleep(ctx, 0.01)

        watching = asyncio.create_task(watch())
        await render(ctx)
        watching.cancel()

    client = await make_app(workflows=[order], worker=False)
    run_id = RunId(await client.start(order))
    storage = client.engine.storage
    worker = WorkerInfo(WorkerId("mortal"), "test", "elsewhere", 1)
    await storage.register(worker, 3_600_000_000)
    assert len((await storage.claim(worker.id, ["order"], 10)).runs) == 1
    await storage.remove_worker(worker.id, died=True)
    cleared = 0
    app = await make_app(workflows=[order])
    clear = app.engine.storage.clear_deaths

    async def counted(run: RunId, epoch: int) -> None:
        nonlocal cleared
        cleared += 1
        await clear(run, epoch)

    monkeypatch.setattr(app.engine.storage, "clear_deaths", counted)
    await until(lambda: polls > 5, "steps of another branch ended")
    assert (await app.client.read_run(run_id)).deaths == 1
    assert cleared == 0
    opened.set()
    await app.handle(run_id).result(timeout=30)
    await until(lambda: cleared == 1, "the deaths are cleared")
