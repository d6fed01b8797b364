"""Edda itself, through its public API, with default settings."""

from __future__ import annotations

import sys

from edda import EddaApp, WorkflowContext, activity, wait_timer, workflow

from .driver import PATIENCE, REST_SECONDS, Probe, until, until_told
from .session import serve

probe = Probe()


@activity
async def step(ctx: WorkflowContext, number: int) -> int:
    probe.step()
    return number


@activity
async def gate(ctx: WorkflowContext, number: int) -> None:
    await probe.pass_gate(number)


@activity
async def mark(ctx: WorkflowContext, number: int) -> None:
    probe.mark(number)


@workflow
async def run_steps(ctx: WorkflowContext, steps: int) -> int:
    for number in range(steps):
        await step(ctx, number)
    return steps


@workflow
async def be_interrupted(ctx: WorkflowContext, number: int) -> None:
    await gate(ctx, number)
    await mark(ctx, number)


@workflow
async def rest(ctx: WorkflowContext, steps: int) -> None:
    probe.begin()
    for number in range(steps):
        await step(ctx, number)
    await wait_timer(ctx, duration_seconds=REST_SECONDS)
    await mark(ctx, 0)


class OurDriver:
    def __init__(self, url: str) -> None:
        self.app = EddaApp(service_name="bench", db_url=url)

    async def open(self) -> None:
        await self.app.initialize()

    async def close(self) -> None:
        await self.app.shutdown()

    async def run(self, steps: int) -> None:
        await run_steps.run(steps=steps)

    async def hold(self, number: int) -> None:
        await be_interrupted.start(number=number)

    async def suspend(self, steps: int) -> str:
        run_id = await rest.start(steps=steps)
        handle = self.app.handle(run_id)

        async def is_asleep() -> bool:
            return await handle.status() == "waiting_for_timer"

        await until(lambda: len(probe.steps) >= steps, PATIENCE)
        await until_told(is_asleep, PATIENCE)
        return run_id

    async def resume(self, run_id: str) -> None:
        """Its timer is due: whoever opens the database goes on with it."""


if __name__ == "__main__":
    serve(OurDriver(sys.argv[1]), probe, uvloop=True)
