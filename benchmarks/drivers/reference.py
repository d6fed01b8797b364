"""The reference, `edda-framework` on PyPI, with default settings, on uvloop as its documentation shows."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .driver import Probe
from .session import serve

# The reference's package has our name: imported as such, the checker would read ours for it.
edda: Any = importlib.import_module("edda")
probe = Probe()


async def _step(ctx: Any, number: int) -> int:
    probe.step()
    return number


async def _gate(ctx: Any, number: int) -> None:
    await probe.pass_gate(number)


async def _mark(ctx: Any, number: int) -> None:
    probe.mark(number)


step, gate, mark = (edda.activity(body) for body in (_step, _gate, _mark))


async def _run_steps(ctx: Any, steps: int) -> int:
    for number in range(steps):
        await step(ctx, number)
    return steps


async def _be_interrupted(ctx: Any, number: int) -> None:
    await gate(ctx, number)
    await mark(ctx, number)


async def _rest(ctx: Any, steps: int) -> None:
    probe.begin()
    for number in range(steps):
        await step(ctx, number)
    await edda.wait_event(ctx, "bench.wake")
    await mark(ctx, 0)


run_steps, be_interrupted, rest = (edda.workflow(body) for body in (_run_steps, _be_interrupted, _rest))


class ReferenceDriver:
    def __init__(self, url: str) -> None:
        url = url.replace("postgresql://", "postgresql+asyncpg://")
        self.app = edda.EddaApp(service_name="bench", db_url=url)

    async def open(self) -> None:
        await self.app.initialize()

    async def close(self) -> None:
        await self.app.shutdown()

    async def run(self, steps: int) -> None:
        # Its start() comes back when the workflow is done or waits.
        await run_steps.start(steps=steps)

    async def hold(self, number: int) -> None:
        await be_interrupted.start(number=number)

    async def suspend(self, steps: int) -> str:
        return str(await rest.start(steps=steps))

    async def resume(self, run_id: str) -> None:
        """By hand: its own poller would come by up to 30 s later."""
        await edda.publish(self.app.storage, "bench.wake", {}, worker_id=self.app.worker_id)
        await rest.resume(run_id)


if __name__ == "__main__":
    serve(ReferenceDriver(sys.argv[1]), probe, uvloop=True)
