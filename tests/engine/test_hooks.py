"""Hooks: all of them are called, after the commit, once; one that raises harms nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edda import EddaApp, RetryPolicy, RunStatus, TerminalError, WorkflowContext, activity, sleep, workflow
from edda.core.model import RunId

from .conditions import until, until_status
from .conftest import MakeApp


class Diary:
    """Writes down every call, and what another client of the database could see at that moment."""

    def __init__(self, observer: EddaApp | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.seen: list[tuple[str, int, RunStatus]] = []
        self._observer = observer

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]

    def __getattr__(self, hook: str) -> Any:
        if not hook.startswith("on_"):
            raise AttributeError(hook)

        async def note(instance_id: str, *facts: Any) -> None:
            if self._observer is not None:
                storage = self._observer.engine.storage
                record = await storage.get(RunId(instance_id))
                assert record is not None, f"{hook} was told before the run was stored"
                self.seen.append((hook, len(await storage.history(RunId(instance_id))), record.status))
            self.calls.append((hook, *facts))

        return note


@activity
async def charge(ctx: WorkflowContext, amount: int) -> int:
    return amount


async def test_a_run_that_completes_tells_of_its_start_its_steps_and_its_end(make_app: MakeApp) -> None:
    diary: Any = Diary()

    @workflow
    async def order(ctx: WorkflowContext, amount: int) -> int:
        return await charge(ctx, amount)

    app = await make_app(hooks=diary)
    await app.run(order, 3)
    await app.shutdown()
    assert diary.calls == [
        ("on_workflow_start", "order", {"amount": 3}),
        ("on_activity_start", "charge:1", "charge", False),
        ("on_activity_complete", "charge:1", "charge", 3, False),
        ("on_workflow_complete", "order", 3),
    ]


async def test_replayed_steps_are_told_as_such_and_nothing_else_again(make_app: MakeApp) -> None:
    diary: Any = Diary()

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        paid = await charge(ctx, 1)
        await sleep(ctx, 0.02)
        return paid

    app = await make_app(hooks=diary)
    await app.run(order)
    await app.shutdown()
    assert diary.named("on_activity_start") == [
        ("on_activity_start", "charge:1", "charge", False),
        ("on_activity_start", "charge:1", "charge", True),
    ]
    assert [call[-1] for call in diary.named("on_activity_complete")] == [False, True]
    assert len(diary.named("on_workflow_start")) == 1
    assert len(diary.named("on_workflow_complete")) == 1


async def test_failures_and_retries_are_told(make_app: MakeApp) -> None:
    diary: Any = Diary()

    @activity(retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=2))
    async def fail(ctx: WorkflowContext) -> None:
        raise ValueError(f"attempt {ctx.attempt}")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await fail(ctx)

    app = await make_app(hooks=diary)
    with pytest.raises(Exception, match="failed 2 times"):
        await app.run(order)
    await app.shutdown()
    ((_, retried, _, error, attempt, delay),) = diary.named("on_activity_retry")
    assert (retried, str(error), attempt, delay) == ("fail:1", "attempt 1", 1, 0.0)
    assert len(diary.named("on_activity_failed")) == 1
    ((_, name, failure),) = diary.named("on_workflow_failed")
    assert name == "order"
    assert "failed 2 times" in str(failure)


async def test_a_cancelled_run_is_told(make_app: MakeApp) -> None:
    diary: Any = Diary()

    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        await sleep(ctx, 3600)

    app = await make_app(hooks=diary)
    run_id = await app.start(nap)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    await app.cancel(run_id)
    await until_status(app, run_id, RunStatus.CANCELLED)
    await until(lambda: bool(diary.named("on_workflow_cancelled")), "the hook is told")
    assert diary.named("on_workflow_cancelled") == [("on_workflow_cancelled", "nap")]


async def test_a_start_stored_for_others_is_told_by_whoever_runs_it(make_app: MakeApp) -> None:
    diary: Any = Diary()

    @workflow
    async def order(ctx: WorkflowContext, amount: int) -> int:
        return amount

    app = await make_app(hooks=diary)
    await app.run(order.options(id="chosen"), 4)
    await app.shutdown()
    assert diary.named("on_workflow_start") == [("on_workflow_start", "order", {"amount": 4})]


async def test_hooks_are_told_after_the_commit(make_app: MakeApp) -> None:
    diary: Any = Diary(observer=await make_app(worker=False))

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await charge(ctx, await charge(ctx, 1))

    app = await make_app(hooks=diary)
    await app.run(order)
    await app.shutdown()
    told: dict[str, list[tuple[int, RunStatus]]] = {}
    for hook, entries, status in diary.seen:
        told.setdefault(hook, []).append((entries, status))
    assert [entries >= n for n, (entries, _) in enumerate(told["on_activity_complete"], start=1)] == [True, True]
    assert told["on_workflow_complete"] == [(2, RunStatus.COMPLETED)]


class Broken:
    def __getattr__(self, hook: str) -> Any:
        async def fail(*_: Any) -> None:
            raise RuntimeError(f"{hook} is broken")

        return fail


async def test_hooks_that_raise_harm_nothing(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = Broken()

    @activity
    async def refuse(ctx: WorkflowContext) -> None:
        raise TerminalError("no")

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        with pytest.raises(TerminalError):
            await refuse(ctx)
        await sleep(ctx, 0.01)
        return await charge(ctx, 2)

    app = await make_app(hooks=broken)
    assert await app.run(order) == 2
    await app.shutdown()
    assert "a hook raised" in caplog.text


async def test_a_hook_that_hangs_does_not_hold_up_the_runs(make_app: MakeApp) -> None:
    class Hanging(Broken):
        def __getattr__(self, hook: str) -> Any:
            async def hang(*_: Any) -> None:
                await asyncio.Event().wait()

            return hang

    hanging: Any = Hanging()

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await charge(ctx, 2)

    app = await make_app(hooks=hanging)
    assert await asyncio.gather(*(app.run(order) for _ in range(3))) == [2, 2, 2]
    app.kill()  # a shutdown would give the hooks their grace
