"""asyncio in workflows: gather, TaskGroup, timeout, Queue and the rest work as written, and survive a restart."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

from edda import EddaApp, RetryPolicy, TerminalError, WorkflowContext, activity, sleep, workflow

from .conditions import until
from .conftest import MakeApp

who: ContextVar[str] = ContextVar("who", default="nobody")


@activity
async def echo(ctx: WorkflowContext, value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_gathered_activities_run_side_by_side(app: EddaApp) -> None:
    all_there = asyncio.Barrier(5)

    @activity
    async def meet(ctx: WorkflowContext, number: int) -> int:
        async with asyncio.timeout(20):
            await all_there.wait()
        return number

    @workflow
    async def five(ctx: WorkflowContext) -> list[int]:
        return [*await asyncio.gather(*(meet(ctx, number) for number in range(5)))]

    assert await app.run(five) == [0, 1, 2, 3, 4]


async def test_a_task_group_ends_with_all_its_branches(app: EddaApp) -> None:
    @workflow
    async def group(ctx: WorkflowContext) -> list[int]:
        async def branch(number: int) -> int:
            await sleep(ctx, 0.01 * number)
            return await echo(ctx, number)

        async with asyncio.TaskGroup() as tasks:
            branches = [tasks.create_task(branch(number)) for number in range(4)]
        return [task.result() for task in branches]

    assert await app.run(group) == [0, 1, 2, 3]


async def test_one_failing_branch_ends_its_task_group(app: EddaApp) -> None:
    @activity
    async def refuse(ctx: WorkflowContext) -> None:
        raise TerminalError("no")

    @workflow
    async def group(ctx: WorkflowContext) -> str:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(refuse(ctx))
                tasks.create_task(sleep(ctx, 3600))
        except* TerminalError:
            pass
        return "ended"

    assert await app.run(group) == "ended"


async def test_a_queue_between_branches_keeps_its_order(app: EddaApp) -> None:
    @workflow
    async def pipeline(ctx: WorkflowContext) -> list[int]:
        queue: asyncio.Queue[int | None] = asyncio.Queue(maxsize=2)
        taken: list[int] = []

        async def produce() -> None:
            for number in range(6):
                await queue.put(await echo(ctx, number))
                await sleep(ctx, 0.002)
            await queue.put(None)

        async def consume() -> None:
            while (item := await queue.get()) is not None:
                taken.append(await echo(ctx, item * 10))

        await asyncio.gather(produce(), consume())
        return taken

    assert await app.run(pipeline) == [0, 10, 20, 30, 40, 50]


async def test_wait_for_gives_up_on_a_slow_step_and_keeps_a_quick_one(app: EddaApp) -> None:
    @activity
    async def stuck(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    @workflow
    async def race(ctx: WorkflowContext) -> list[str]:
        found = [str(await asyncio.wait_for(echo(ctx, 1), 3600))]
        try:
            await asyncio.wait_for(stuck(ctx), 0.05)
        except TimeoutError:
            found.append("gave up")
        return found

    assert await app.run(race) == ["1", "gave up"]


async def test_the_first_of_several_waits_wins_and_the_others_are_released(app: EddaApp) -> None:
    @workflow
    async def race(ctx: WorkflowContext) -> str:
        quick = asyncio.create_task(sleep(ctx, 0.01), name="quick")
        slow = asyncio.create_task(sleep(ctx, 3600), name="slow")
        done, pending = await asyncio.wait({slow, quick}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return ",".join(task.get_name() for task in done)

    assert await app.run(race) == "quick"


async def test_results_arrive_as_they_are_completed(app: EddaApp) -> None:
    @workflow
    async def race(ctx: WorkflowContext) -> list[int]:
        async def after(seconds: float, number: int) -> int:
            await sleep(ctx, seconds)
            return number

        branches = [after(0.06, 3), after(0.01, 1), after(0.03, 2)]
        return [await done for done in asyncio.as_completed(branches)]

    assert await app.run(race) == [1, 2, 3]


async def test_a_sleep_of_asyncio_is_durable_over_a_restart(make_app: MakeApp) -> None:
    effects: list[int] = []

    @activity
    async def work(ctx: WorkflowContext) -> None:
        effects.append(1)

    @workflow
    async def nap(ctx: WorkflowContext) -> float:
        await work(ctx)
        before = ctx.now()
        await asyncio.sleep(0.5)
        return (ctx.now() - before).total_seconds()

    first = await make_app()
    run_id = await first.start(nap)
    await until(lambda: effects == [1], "it is about to sleep")
    await first.shutdown()
    second = await make_app()
    assert await second.handle(run_id).result(timeout=20) >= 0.5
    assert effects == [1]


async def test_a_timeout_of_asyncio_is_durable_over_a_restart(make_app: MakeApp) -> None:
    begun = asyncio.Event()

    @workflow
    async def impatient(ctx: WorkflowContext) -> str:
        begun.set()
        try:
            async with asyncio.timeout(0.5):
                await sleep(ctx, 3600)
        except TimeoutError:
            return "timed out"
        return "slept"

    first = await make_app()
    run_id = await first.start(impatient)
    await begun.wait()
    await first.shutdown()
    second = await make_app()
    assert await second.handle(run_id).result(timeout=20) == "timed out"


async def test_a_branch_left_over_is_cancelled_and_its_cleanup_runs(app: EddaApp) -> None:
    cleaned: list[int] = []

    @activity
    async def clean(ctx: WorkflowContext) -> None:
        cleaned.append(1)

    @workflow
    async def careless(ctx: WorkflowContext) -> str:
        async def branch() -> None:
            try:
                await sleep(ctx, 3600)
            finally:
                await clean(ctx)

        task = asyncio.create_task(branch())
        await sleep(ctx, 0.01)
        return str(task.done())

    assert await app.run(careless) == "False"
    assert cleaned == [1]


async def test_sync_activities_run_in_threads_side_by_side(app: EddaApp) -> None:
    all_there = threading.Barrier(3)

    @activity
    def meet(ctx: WorkflowContext, number: int) -> tuple[int, bool]:
        all_there.wait(20)
        return number, threading.current_thread() is threading.main_thread()

    @workflow
    async def three(ctx: WorkflowContext) -> list[tuple[int, bool]]:
        return [*await asyncio.gather(*(meet(ctx, number) for number in range(3)))]

    assert await app.run(three) == [(0, False), (1, False), (2, False)]


async def test_context_variables_flow_into_activities_and_threads(app: EddaApp) -> None:
    @activity
    async def ask(ctx: WorkflowContext) -> str:
        return who.get()

    @activity
    def ask_in_a_thread(ctx: WorkflowContext) -> str:
        return who.get()

    @workflow
    async def branches(ctx: WorkflowContext) -> list[str]:
        async def branch(name: str) -> list[str]:
            who.set(name)
            await sleep(ctx, 0.005)
            return [await ask(ctx), await ask_in_a_thread(ctx)]

        found = await asyncio.gather(branch("left"), branch("right"))
        return [name for names in found for name in names] + [who.get()]

    assert await app.run(branches) == ["left", "left", "right", "right", "nobody"]


async def test_a_sync_activity_that_raises_is_retried_like_any_other(app: EddaApp) -> None:
    @activity(retry_policy=RetryPolicy(initial_interval=0.0))
    def flaky(ctx: WorkflowContext) -> int:
        if ctx.attempt < 3:
            raise StopIteration("even this")
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await flaky(ctx)

    assert await app.run(order) == 3


async def test_a_sleep_of_no_time_ends(app: EddaApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> str:
        await sleep(ctx, 0)
        await asyncio.sleep(0)
        return "awake"

    assert await app.run(nap) == "awake"
