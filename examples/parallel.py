"""Parallel branches with asyncio: gather, TaskGroup and timeouts are durable."""

from __future__ import annotations

import asyncio

from edda import EddaApp, WorkflowContext, activity, sleep, workflow


@activity
async def quote(ctx: WorkflowContext, carrier: str) -> float:
    return {"crow": 4.0, "goose": 3.5, "snail": 1.0}[carrier]


async def ask(ctx: WorkflowContext, carrier: str) -> tuple[str, float]:
    """An ordinary function of the workflow; its steps are named after it: `ask:2/quote:1`."""
    if carrier == "snail":
        await sleep(ctx, 3600)
    return carrier, await quote(ctx, carrier)


@workflow
async def cheapest(ctx: WorkflowContext, carriers: list[str], patience: float) -> tuple[str, float]:
    answers: list[tuple[str, float]] = []

    async def collect(carrier: str) -> None:
        answers.append(await ask(ctx, carrier))

    try:
        async with asyncio.timeout(patience), asyncio.TaskGroup() as group:
            for carrier in carriers:
                group.create_task(collect(carrier))
    except TimeoutError:
        ctx.logger.info("%d of %d carriers answered in time", len(answers), len(carriers))
    return min(answers, key=lambda answer: answer[1])


async def main() -> None:
    async with EddaApp("quotes", "sqlite:///quotes.db"):
        print(await cheapest.run(["crow", "goose", "snail"], patience=1.0))


if __name__ == "__main__":
    asyncio.run(main())
