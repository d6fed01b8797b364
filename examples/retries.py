"""Retries: which failures are retried, which end the step immediately, and how the workflow handles them."""

from __future__ import annotations

import asyncio

from edda import EddaApp, RetryExhaustedError, RetryPolicy, TerminalError, WorkflowContext, activity, workflow

PATIENT = RetryPolicy(initial_interval=0.05, backoff_coefficient=2.0, max_attempts=4)


@activity(retry_policy=PATIENT)
async def charge(ctx: WorkflowContext, card: str) -> str:
    if card == "stolen":
        raise TerminalError("the card is blocked")  # never retried
    if card == "slow" and ctx.attempt < 3:
        raise ConnectionError("the bank does not answer")
    if card == "dead":
        raise ConnectionError("the bank does not answer")
    return f"{card}: paid at attempt {ctx.attempt}"


@workflow
async def pay(ctx: WorkflowContext, card: str) -> str:
    try:
        return await charge(ctx, card)
    except TerminalError as error:
        return f"{card}: refused, {error}"
    except RetryExhaustedError as error:
        return f"{card}: given up after {error.__cause__!r}"


async def main() -> None:
    async with EddaApp("bank", "sqlite:///bank.db"):
        for card in ("good", "slow", "stolen", "dead"):
            print(await pay.run(card))


if __name__ == "__main__":
    asyncio.run(main())
