"""Finding runs: by status, name, time and input, page by page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from edda import EddaApp, RunStatus, WorkflowContext, sleep, workflow

from .conditions import until_status


class Address(BaseModel):
    city: str
    floor: int = 0


class Customer(BaseModel):
    name: str
    address: Address


async def ids(app: EddaApp, **filters: Any) -> set[str]:
    return {instance["instance_id"] for instance in (await app.find_instances(**filters))["instances"]}


async def test_runs_are_found_by_name_and_status(app: EddaApp) -> None:
    @workflow
    async def quick(ctx: WorkflowContext) -> None: ...

    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        await sleep(ctx, 3600)

    done, waiting = await app.start(quick), await app.start(nap)
    await app.handle(done).result(timeout=20)
    await until_status(app, waiting, RunStatus.WAITING_FOR_TIMER)
    assert await ids(app) == {done, waiting}
    assert await ids(app, workflow_name="nap") == {waiting}
    assert await ids(app, status=RunStatus.COMPLETED) == {done}
    assert await ids(app, status="waiting_for_timer", workflow_name="nap") == {waiting}
    assert await ids(app, status="failed") == set()
    with pytest.raises(ValueError, match="sleepy"):
        await app.find_instances(status="sleepy")


async def test_a_found_run_is_described_in_full(app: EddaApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext, seconds: int) -> None:
        await sleep(ctx, seconds)

    run_id = await app.start(nap, 3600)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    (found,) = (await app.find_instances())["instances"]
    assert found["instance_id"] == run_id
    assert found["workflow_name"] == "nap"
    assert found["status"] == "waiting_for_timer"
    assert found["input_data"] == {"seconds": 3600}
    assert found["ended_at"] is None
    assert found["waiting_for"] is not None
    assert abs(found["started_at"] - datetime.now(UTC)) < timedelta(minutes=5)


async def test_runs_are_found_by_their_input(app: EddaApp) -> None:
    @workflow
    async def order(
        ctx: WorkflowContext, id: str, paid: bool = False, count: int = 1, customer: Customer | None = None
    ) -> None: ...

    bonn = Customer(name="Ada", address=Address(city="Bonn", floor=1))
    a = await app.start(order, "A", paid=True)
    b = await app.start(order, "B", count=0, customer=bonn)
    assert await ids(app, input_filters={"id": "A"}) == {a}
    assert await ids(app, input_filters={"paid": True}) == {a}
    assert await ids(app, input_filters={"paid": False}) == {b}
    assert await ids(app, input_filters={"paid": False, "count": 0}) == {b}
    assert await ids(app, input_filters={"paid": 1}) == set(), "True is not 1"
    assert await ids(app, input_filters={"customer.address.city": "Bonn"}) == {b}
    assert await ids(app, input_filters={"customer.address.floor": 1, "id": "B"}) == {b}
    assert await ids(app, input_filters={"customer.address.street": None}) == set()
    assert await ids(app, input_filters={"customer": None}) == {a}


async def test_runs_are_found_by_the_time_they_started(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    run_id = await app.start(order)
    (found,) = (await app.find_instances())["instances"]
    begun = found["started_at"]
    assert await ids(app, started_after=begun - timedelta(seconds=1)) == {run_id}
    assert await ids(app, started_after=begun + timedelta(seconds=1)) == set()
    assert await ids(app, started_before=begun - timedelta(seconds=1)) == set()
    with pytest.raises(ValueError, match="time zone"):
        await app.find_instances(started_after=datetime(2030, 1, 1))


async def test_pages_hold_every_run_once_and_the_newest_first(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, number: int, even: bool) -> None: ...

    started = [await app.start(order, number, number % 2 == 0) for number in range(23)]
    found: list[str] = []
    token: str | None = None
    pages = 0
    while pages == 0 or token is not None:
        page = await app.find_instances(limit=5, page_token=token)
        found += [instance["instance_id"] for instance in page["instances"]]
        token, pages = page["next_page_token"], pages + 1
        assert page["has_more"] is (token is not None)
    assert pages == 5
    assert found == started[::-1]


async def test_pages_of_a_filtered_search_hold_every_match_once(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, even: bool) -> None: ...

    started = [await app.start(order, number % 2 == 0) for number in range(15)]
    found: list[str] = []
    token: str | None = None
    while True:
        page = await app.find_instances(input_filters={"even": True}, limit=3, page_token=token)
        found += [instance["instance_id"] for instance in page["instances"]]
        token = page["next_page_token"]
        if token is None:
            break
    assert found == started[::2][::-1]


async def test_questions_that_make_no_sense_are_refused(app: EddaApp) -> None:
    questions: list[dict[str, Any]] = [{"limit": 0}, {"limit": 1001}, {"page_token": "nonsense"}]
    for question in questions:
        with pytest.raises(ValueError, match=next(iter(question))):
            await app.find_instances(**question)
