"""What a workflow sees is the same live and after a replay: values, types and order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, TypedDict
from uuid import UUID

import pytest
from pydantic import BaseModel

from edda import EddaApp, WorkflowContext, activity, wait_event, workflow

from .events import REPLAY, run_with_replay


class Colour(Enum):
    RED = "red"


class Rank(IntEnum):
    FIRST = 1


class Address(BaseModel):
    city: str


class Customer(BaseModel):
    name: str
    born: date
    address: Address | None = None


@dataclass(frozen=True)
class Line:
    item: str
    price: Decimal
    tags: frozenset[str] = frozenset()


class Totals(TypedDict):
    net: Decimal
    count: int


CASES: dict[str, tuple[Any, Any]] = {
    "model": (Customer, Customer(name="Ada", born=date(1815, 12, 10), address=Address(city="London"))),
    "models": (list[Customer], [Customer(name="Ada", born=date(1815, 12, 10))]),
    "dataclass": (Line, Line("pen", Decimal("1.10"), frozenset({"a", "b"}))),
    "typed dict": (Totals, Totals(net=Decimal("3.50"), count=2)),
    "enum": (Colour, Colour.RED),
    "integer enum": (dict[str, Rank], {"place": Rank.FIRST}),
    "datetime": (datetime, datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)),
    "naive datetime": (datetime, datetime(2030, 1, 2)),
    "timedelta": (timedelta, timedelta(days=3, microseconds=1)),
    "decimal": (Decimal, Decimal("0.10")),
    "uuid": (UUID, UUID("12345678-1234-5678-1234-567812345678")),
    "bytes": (bytes, b"\x00\xff"),
    "tuple": (tuple[int, str], (1, "two")),
    "open tuple": (tuple[Line, ...], (Line("pen", Decimal(1)), Line("ink", Decimal(2)))),
    "set": (set[int], {1, 2, 3}),
    "integer keys": (dict[int, str], {1: "one", 2: "two"}),
    "tuple keys": (dict[tuple[int, int], str], {(1, 2): "spot"}),
    "union": (Address | Line, Line("pen", Decimal(1))),
    "optional": (Address | None, None),
    "large integer": (int, 2**80),
    "float": (float, 0.1 + 0.2),
    "text": (str, "naïve 🙂 \x00"),
    "nested": (dict[str, list[tuple[Colour, Line]]], {"all": [(Colour.RED, Line("pen", Decimal(1)))]}),
    "unannotated set": (Any, {"a": {1, 2}, "b": (1, [2])}),
    "unannotated moment": (Any, [datetime(2030, 1, 2, tzinfo=UTC), Decimal("1.0"), b"x"]),
}


def producer(value: Any, annotation: Any) -> Callable[..., Any]:
    async def produce(ctx: WorkflowContext) -> Any:
        return value

    produce.__annotations__["return"] = annotation
    return produce


async def test_a_run_sees_the_same_values_live_and_after_a_replay(app: EddaApp) -> None:
    """Every case in one run, so that all of them are replayed together."""
    produce = {name: activity(name=name)(producer(value, kind)) for name, (kind, value) in CASES.items()}
    seen: list[dict[str, Any]] = []

    @workflow
    async def collect(ctx: WorkflowContext) -> None:
        seen.append({name: await one(ctx) for name, one in produce.items()})
        await wait_event(ctx, REPLAY)

    await run_with_replay(app, collect)
    expected = {name: value for name, (_, value) in CASES.items()}
    assert len(seen) >= 2, "it was replayed"
    for found in seen:
        assert found == expected
        assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in expected.items()}
        assert repr(found["unannotated set"]) == repr(expected["unannotated set"])


async def test_arguments_and_results_of_a_run_keep_their_types(app: EddaApp) -> None:
    seen: list[tuple[Any, ...]] = []

    @workflow
    async def order(
        ctx: WorkflowContext, customer: Customer, lines: list[Line], counts: dict[int, int], when: datetime
    ) -> dict[Colour, list[Line]]:
        seen.append((customer, lines, counts, when))
        await wait_event(ctx, REPLAY)
        return {Colour.RED: lines}

    given = (
        Customer(name="Ada", born=date(1815, 12, 10)),
        [Line("pen", Decimal("1.10"))],
        {1: 2},
        datetime(2030, 1, 2, tzinfo=UTC),
    )
    assert await run_with_replay(app, order, *given) == {Colour.RED: given[1]}
    assert len(seen) >= 2
    assert set(map(repr, seen)) == {repr(given)}


async def test_the_first_run_gets_the_stored_value_and_not_the_object_itself(app: EddaApp) -> None:
    """What the code does to a value an activity keeps must not be seen by one and not by the other."""
    kept: list[int] = [1]

    @activity
    async def get(ctx: WorkflowContext) -> list[int]:
        return kept

    @workflow
    async def change(ctx: WorkflowContext) -> list[int]:
        mine = await get(ctx)
        mine.append(2)
        return mine

    assert await app.run(change) == [1, 2]
    assert kept == [1]


async def test_a_workflow_result_that_cannot_be_stored_fails_the_run(app: EddaApp) -> None:
    @workflow
    async def careless(ctx: WorkflowContext) -> object:
        return {"connection": object()}

    with pytest.raises(ValueError, match=r"the result of careless.*connection"):
        await app.run(careless)


async def test_contexts_flow_into_activities_and_are_not_mixed_up(app: EddaApp) -> None:
    @activity
    async def where(ctx: WorkflowContext) -> tuple[str, str]:
        await asyncio.sleep(0)
        return ctx.instance_id, ctx.workflow_name

    @workflow
    async def ask(ctx: WorkflowContext) -> tuple[str, str]:
        return await where(ctx)

    ids = await asyncio.gather(*(app.start(ask) for _ in range(5)))
    for run_id in ids:
        assert tuple(await app.handle(run_id).result(timeout=20)) == (run_id, "ask")
