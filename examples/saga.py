"""A saga: each step has a compensation; if the trip fails or is cancelled, they run in reverse order."""

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
    wait_event,
    workflow,
)


@compensation
async def cancel_flight(ctx: WorkflowContext, booking: str) -> None:
    print(f"  - flight {booking} cancelled")


@activity
@on_failure(cancel_flight)
async def book_flight(ctx: WorkflowContext, city: str) -> dict[str, str]:
    print(f"  + flight to {city}")
    return {"booking": f"F-{city}"}  # the compensation gets this field by its name


@compensation
async def cancel_hotel(ctx: WorkflowContext, city: str, nights: int) -> None:
    print(f"  - hotel in {city} cancelled, {nights} nights")


@activity
@on_failure(cancel_hotel)
async def book_hotel(ctx: WorkflowContext, city: str, nights: int) -> str:
    if city == "Atlantis":
        raise TerminalError("no room above water")
    print(f"  + hotel in {city}, {nights} nights")
    return f"H-{city}"


@workflow
async def trip(ctx: WorkflowContext, city: str) -> str:
    await book_flight(ctx, city)
    await book_hotel(ctx, city, nights=3)
    await wait_event(ctx, "trip.paid", match={"city": city})
    return f"have a good time in {city}"


async def report(handle: WorkflowHandle[str]) -> None:
    try:
        print(f"  {await handle.result()}")
    except (TerminalError, WorkflowCancelledError) as error:
        print(f"  {await handle.status()}: {str(error).rpartition(': ')[2]}")


async def until_it_waits(handle: WorkflowHandle[str]) -> None:
    while await handle.status() is RunStatus.RUNNING:  # noqa: ASYNC110 - the status is in the database; there is no asyncio event for it
        await asyncio.sleep(0.01)


async def main() -> None:
    async with EddaApp("travel", "sqlite:///travel.db") as app:
        print("a trip that is paid")
        paid = trip.handle(await trip.start("Rome"))
        await app.send_event("trip.paid", source="bank", data={"city": "Rome"})
        await report(paid)

        print("a trip that fails")
        await report(trip.handle(await trip.start("Atlantis")))

        print("a trip that is cancelled while it waits")
        cancelled = trip.handle(await trip.start("Oslo"))
        await until_it_waits(cancelled)
        await cancelled.cancel("the customer has changed his mind")
        await report(cancelled)


if __name__ == "__main__":
    asyncio.run(main())
