"""The reference, `edda-framework` on PyPI, with default settings, on uvloop as its documentation shows."""

from __future__ import annotations

import importlib
import sys
from datetime import UTC, datetime
from typing import Any

from .driver import BROKER, Mode, Probe, flag_of
from .ledger import line
from .session import serve

# The reference's package has our name: imported as such, the checker would read ours for it.
edda: Any = importlib.import_module("edda")
probe = Probe()

EAGER = {"notify_fallback_interval": 1, "max_workflows_per_batch": 1_000}
"""For many that wake at once: by default ten are resumed per notification, and after a missed one ten in 30 s."""


async def _step(ctx: Any, number: int) -> int:
    probe.step()
    return number


async def _gate(ctx: Any, number: int) -> None:
    await probe.pass_gate(number)


async def _mark(ctx: Any, number: int) -> None:
    probe.mark(number)


async def _book(ctx: Any, number: int) -> int:
    ctx.session.add(line(number))
    return number


async def _tell(ctx: Any, number: int) -> None:
    await edda.send_event_transactional(ctx, "bench.told", "/bench", {"number": number})


step, gate, mark, book, tell = (edda.activity(body) for body in (_step, _gate, _mark, _book, _tell))


async def _run_steps(ctx: Any, steps: int) -> int:
    for number in range(steps):
        await step(ctx, number)
    return steps


async def _book_lines(ctx: Any, steps: int) -> int:
    for number in range(steps):
        await book(ctx, number)
    return steps


async def _tell_others(ctx: Any, events: int) -> None:
    for number in range(events):
        await tell(ctx, number)


async def _listen(ctx: Any, number: int, channel: str, mode: str) -> None:
    await edda.subscribe(ctx, channel, mode)
    while True:
        message = await edda.receive(ctx, channel)
        probe.hear(number, message.data["number"])


async def _be_interrupted(ctx: Any, number: int) -> None:
    await gate(ctx, number)
    await mark(ctx, number)


async def _rest(ctx: Any, steps: int) -> None:
    probe.begin()
    for number in range(steps):
        await step(ctx, number)
    await edda.wait_event(ctx, "bench.wake")
    await mark(ctx, 0)


async def _expect(ctx: Any, number: int, act: bool) -> None:
    # It has no match: a type of its own is its way to reach one run from any process.
    await edda.wait_event(ctx, f"bench.wake.{number}")
    if act:
        await mark(ctx, number)
    else:
        probe.mark(number)


async def _doze(ctx: Any, number: int, due: float) -> None:
    await edda.sleep_until(ctx, datetime.fromtimestamp(due, UTC))
    await mark(ctx, number)


run_steps, be_interrupted, rest, expect, doze = (
    edda.workflow(body) for body in (_run_steps, _be_interrupted, _rest, _expect, _doze)
)
book_lines, tell_others, listen = (edda.workflow(body) for body in (_book_lines, _tell_others, _listen))


class ReferenceDriver:
    statements: int | None = None

    def __init__(self, url: str, *flags: str) -> None:
        url = url.replace("postgresql://", "postgresql+asyncpg://")
        options = EAGER if "--eager" in flags else {}
        broker = flag_of(flags, BROKER)
        self.app = edda.EddaApp(
            service_name="bench", db_url=url, outbox_enabled=broker is not None, broker_url=broker, **options
        )

    async def open(self, worker: bool) -> None:
        """Its app is always a worker; one that only sends opens the storage alone."""
        await (self.app.initialize() if worker else self.app.storage.initialize())

    async def close(self) -> None:
        await self.app.shutdown()

    async def run(self, steps: int) -> None:
        # Its start() comes back when the workflow is done or waits.
        await run_steps.start(steps=steps)

    async def book(self, steps: int) -> None:
        await book_lines.start(steps=steps)

    async def listen(self, number: int, channel: str, mode: Mode) -> None:
        await listen.start(number=number, channel=channel, mode=mode)

    async def publish(self, channel: str, number: int) -> None:
        await edda.publish(self.app.storage, channel, {"number": number}, worker_id=self.app.worker_id)

    async def emit(self, events: int) -> None:
        await tell_others.start(events=events)

    async def hold(self, number: int) -> None:
        await be_interrupted.start(number=number)

    async def suspend(self, steps: int) -> str:
        return str(await rest.start(steps=steps))

    async def resume(self, run_id: str) -> None:
        """By hand: its own poller would come by up to 30 s later."""
        await edda.publish(self.app.storage, "bench.wake", {}, worker_id=self.app.worker_id)
        await rest.resume(run_id)

    async def expect(self, number: int, act: bool) -> None:
        await expect.start(number=number, act=act)

    async def send(self, number: int) -> None:
        await edda.publish(self.app.storage, f"bench.wake.{number}", {}, worker_id=self.app.worker_id)

    async def doze(self, number: int, due: float) -> None:
        await doze.start(number=number, due=due)

    async def is_quiet(self) -> bool:
        return not (await self.app.storage.list_instances(status_filter="running", limit=1))["instances"]


if __name__ == "__main__":
    driver = ReferenceDriver(*sys.argv[1:])
    serve(driver, probe, uvloop=True, talker=driver)
