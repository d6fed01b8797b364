"""Child workflows: they run in parallel, fail separately, and are cancelled with their parent."""

from __future__ import annotations

import asyncio

from edda import (
    EddaApp,
    RunStatus,
    TerminalError,
    WorkflowCancelledError,
    WorkflowContext,
    WorkflowHandle,
    activity,
    compensation,
    on_failure,
    sleep,
    workflow,
)


@compensation
async def unpack(ctx: WorkflowContext, item: str) -> None:
    print(f"  - {item} unpacked")


@activity
@on_failure(unpack)
async def pack(ctx: WorkflowContext, item: str) -> float:
    if item == "piano":
        raise TerminalError("a piano does not fit")
    print(f"  + {item} packed")
    return {"lute": 2.5, "flute": 0.5, "drum": 4.0}[item]


@workflow
async def parcel(ctx: WorkflowContext, item: str, seconds: float) -> float:
    weight = await pack(ctx, item)
    await sleep(ctx, seconds)  # on its way
    return weight


@workflow
async def letter(ctx: WorkflowContext, customer: str) -> str:
    await sleep(ctx, 1)
    return f"a letter for {customer}"


@workflow
async def shipment(ctx: WorkflowContext, customer: str, items: list[str], seconds: float) -> float:
    await letter.options(id=f"letter-{ctx.instance_id}", detached=True).start(customer)  # detached, and not awaited
    parcels = [parcel.options(id=f"{ctx.instance_id}-{item}").run(item, seconds) for item in items]
    weights = await asyncio.gather(*parcels, return_exceptions=True)
    return sum(weight for weight in weights if isinstance(weight, float))


async def until_it_waits(handle: WorkflowHandle[float]) -> None:
    while await handle.status() is RunStatus.RUNNING:  # noqa: ASYNC110 - the status is in the database; there is no asyncio event for it
        await asyncio.sleep(0.01)


async def main() -> None:
    async with EddaApp("shipping", "sqlite:///shipping.db"):
        print("a shipment, one parcel of which fails")
        print(f"  weight {await shipment.run('Ada', ['lute', 'piano'], 0.2)}")

        print("a shipment that is cancelled on its way")
        handle = shipment.handle(await shipment.start("Eve", ["flute"], 3600))
        await until_it_waits(handle)
        flute = parcel.handle(f"{handle.instance_id}-flute")
        await until_it_waits(flute)
        await handle.cancel("nobody is at home")
        try:
            await flute.result()
        except WorkflowCancelledError as error:
            print(f"  {error.args[0].rpartition(': ')[2]}")
        print(f"  {await letter.handle(f'letter-{handle.instance_id}').result()} is sent all the same")


if __name__ == "__main__":
    asyncio.run(main())
