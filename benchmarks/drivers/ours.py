"""Edda itself, through its public API, with default settings."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from edda import (
    EddaApp,
    WorkflowContext,
    activity,
    receive,
    send_event_transactional,
    sleep_until,
    subscribe,
    wait_event,
    wait_timer,
    workflow,
)

from .driver import BROKER, PATIENCE, REST_SECONDS, STATEMENTS, Mode, Probe, flag_of, until, until_told
from .ledger import line
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


@activity
async def book(ctx: WorkflowContext, number: int) -> int:
    ctx.session.add(line(number))
    return number


@activity
async def tell(ctx: WorkflowContext, number: int) -> None:
    await send_event_transactional(ctx, "bench.told", "/bench", {"number": number})


@workflow
async def run_steps(ctx: WorkflowContext, steps: int) -> int:
    for number in range(steps):
        await step(ctx, number)
    return steps


@workflow
async def book_lines(ctx: WorkflowContext, steps: int) -> int:
    for number in range(steps):
        await book(ctx, number)
    return steps


@workflow
async def tell_others(ctx: WorkflowContext, events: int) -> None:
    for number in range(events):
        await tell(ctx, number)


@workflow
async def listen(ctx: WorkflowContext, number: int, channel: str, mode: Mode) -> None:
    await subscribe(ctx, channel, mode)
    while True:
        message = await receive(ctx, channel)
        probe.hear(number, message.data["number"])


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


@workflow
async def expect(ctx: WorkflowContext, number: int, act: bool) -> None:
    await wait_event(ctx, "bench.wake", match={"number": number})
    if act:
        await mark(ctx, number)
    else:
        probe.mark(number)


@workflow
async def doze(ctx: WorkflowContext, number: int, due: float) -> None:
    await sleep_until(ctx, datetime.fromtimestamp(due, UTC))
    await mark(ctx, number)


class Tally:
    """Stands beside every statement."""

    def __init__(self) -> None:
        self.statements = 0

    def before(self, statement: str) -> None:
        self.statements += 1

    def after(self, statement: str) -> None:
        pass


class OurDriver:
    def __init__(self, url: str, *flags: str) -> None:
        self.url = url
        self.broker = flag_of(flags, BROKER)
        self.tally = Tally() if STATEMENTS in flags else None

    @property
    def statements(self) -> int | None:
        return None if self.tally is None else self.tally.statements

    async def open(self, worker: bool) -> None:
        self.app = EddaApp(
            service_name="bench",
            db_url=self.url,
            worker=worker,
            probe=self.tally,
            outbox_enabled=self.broker is not None,
            broker_url=self.broker,
        )
        await self.app.initialize()

    async def close(self) -> None:
        await self.app.shutdown()

    async def run(self, steps: int) -> None:
        await run_steps.run(steps=steps)

    async def book(self, steps: int) -> None:
        await book_lines.run(steps=steps)

    async def listen(self, number: int, channel: str, mode: Mode) -> None:
        await listen.start(number=number, channel=channel, mode=mode)

    async def publish(self, channel: str, number: int) -> None:
        await self.app.publish(channel, {"number": number})

    async def emit(self, events: int) -> None:
        await tell_others.run(events=events)

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

    async def expect(self, number: int, act: bool) -> None:
        await expect.start(number=number, act=act)

    async def send(self, number: int) -> None:
        await self.app.send_event("bench.wake", "/bench", {"number": number})

    async def doze(self, number: int, due: float) -> None:
        await doze.start(number=number, due=due)

    async def is_quiet(self) -> bool:
        return not (await self.app.find_instances(status="running", limit=1))["instances"]


if __name__ == "__main__":
    driver = OurDriver(*sys.argv[1:])
    serve(driver, probe, uvloop=True, talker=driver)
