"""A worker process with runs that kill it and runs that do not, on the database of its one argument."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine

from edda import EddaApp, RetryPolicy, WorkflowContext, activity, sleep, workflow
from edda.engine.settings import Settings

SETTINGS = Settings(
    lease=30.0, sweep=0.1, takeover_grace=0.0, linger=0.0, poll=0.1, shutdown_grace=0.1, suspect_window=5.0
)


@activity
async def work_long(ctx: WorkflowContext, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@activity
async def die(ctx: WorkflowContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@activity(retry_policy=RetryPolicy(max_attempts=2, count_crashes=True))
async def die_twice(ctx: WorkflowContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@workflow
async def innocent(ctx: WorkflowContext, seconds: float) -> int:
    return await work_long(ctx, seconds)


@workflow
async def killer(ctx: WorkflowContext) -> None:
    await die(ctx)


@workflow
async def noisy_killer(ctx: WorkflowContext) -> None:
    """Timers are recorded beside the step that kills, in every life."""

    async def tick() -> None:
        for _ in range(1_000):
            await sleep(ctx, 0.01)

    async def die_later() -> None:
        await work_long(ctx, 0.0)
        await die_soon(ctx)

    await asyncio.gather(tick(), die_later())


@activity
async def die_soon(ctx: WorkflowContext) -> None:
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


@activity
async def poll(ctx: WorkflowContext) -> None: ...


@activity(retry_policy=RetryPolicy(max_attempts=2, count_crashes=True))
async def die_soon_twice(ctx: WorkflowContext) -> None:
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


async def poll_beside(ctx: WorkflowContext, step: Coroutine[object, object, None]) -> None:
    """Steps of another branch end beside the step that kills, in every life."""

    async def watch() -> None:
        while True:
            await poll(ctx)
            await sleep(ctx, 0.02)

    watching = asyncio.create_task(watch())
    try:
        await step
    finally:
        watching.cancel()


@workflow
async def polled_killer(ctx: WorkflowContext) -> None:
    await poll(ctx)
    await poll_beside(ctx, die_soon(ctx))


@workflow
async def polled_counted_killer(ctx: WorkflowContext) -> str:
    try:
        await poll_beside(ctx, die_soon_twice(ctx))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "alive"


@workflow
async def counted_killer(ctx: WorkflowContext) -> str:
    try:
        await die_twice(ctx)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "alive"


async def main(url: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    app = EddaApp("killer", url, settings=SETTINGS)
    await app.initialize()
    print("ready", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await app.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
