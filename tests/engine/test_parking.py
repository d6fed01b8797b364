"""Code that cannot go on is parked with a reason: deadlocks, spinning, and real I/O in a workflow's body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from edda import EddaApp, RunStatus, WorkflowContext, activity, workflow

from .conditions import reason_of, until_status

Body = Callable[[], Awaitable[object]]


async def parked(app: EddaApp, body: Body) -> str:
    """The reason a run of this body is parked for, with a healthy run beside it."""

    @activity
    async def work(ctx: WorkflowContext) -> str:
        return "healthy"

    @workflow
    async def sick(ctx: WorkflowContext) -> None:
        await body()

    @workflow
    async def healthy(ctx: WorkflowContext) -> str:
        return await work(ctx)

    run_id = await app.start(sick)
    assert await app.run(healthy) == "healthy"
    await until_status(app, run_id, RunStatus.PARKED)
    return await reason_of(app, run_id)


async def test_branches_that_wait_for_each_other_are_a_deadlock(app: EddaApp) -> None:
    async def body() -> None:
        await asyncio.Event().wait()

    reason = await parked(app, body)
    assert reason.startswith("DeadlockError")
    assert "test_parking.py" in reason, "it says where the branch stands"


async def test_a_loop_that_waits_for_nothing_is_stopped(app: EddaApp) -> None:
    async def body() -> None:
        ready: list[str] = []
        while len(ready) == 0:  # noqa: ASYNC110 - the very mistake this test is about
            await asyncio.sleep(0)

    assert (await parked(app, body)).startswith("SpinError")


async def connect() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def use_a_thread() -> None:
    await asyncio.to_thread(print)


async def run_a_process() -> None:
    await asyncio.create_subprocess_exec("true")


async def resolve_a_name() -> None:
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)


async def swallow_it() -> None:
    try:
        await connect()
    except Exception:
        await asyncio.sleep(0)


async def fetch_as_http_clients_do() -> None:
    """They try addresses in a group of tasks and wrap what goes wrong."""
    try:
        async with asyncio.TaskGroup() as attempts:
            attempts.create_task(connect())
    except* Exception as errors:
        raise ConnectionError("all connection attempts failed") from errors


async def test_input_and_output_in_a_body_parks_the_run_and_names_the_cure(app: EddaApp) -> None:
    bodies: dict[Body, str] = {
        connect: "getaddrinfo",
        use_a_thread: "run_in_executor",
        run_a_process: "subprocess_exec",
        resolve_a_name: "getaddrinfo",
        swallow_it: "getaddrinfo",
        fetch_as_http_clients_do: "getaddrinfo",
    }
    for body, method in bodies.items():
        reason = await parked(app, body)
        assert "NotInWorkflowError" in reason
        assert method in reason or "create_connection" in reason
        assert "@activity" in reason
