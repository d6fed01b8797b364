"""What is run under fire: workflows whose effects leave a trace, and whose results can be told from their history."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Protocol

from msgspec import Struct

from edda import RetryPolicy, WorkflowContext, activity, sleep, workflow

LEASE = 0.6
IMPATIENT = RetryPolicy(initial_interval=0.03, max_interval=0.1, max_attempts=None, max_duration=None)


class Witness(Protocol):
    """Writes down that an activity begins, where no crash of ours can lose it."""

    def effect(self, ctx: WorkflowContext, link: str, not_before: datetime | None) -> None: ...

    def claim(self, ctx: WorkflowContext) -> str:
        """Under which it begins."""
        ...


class _Nobody:
    _MISSING = "no witness: a process that runs this workload says who writes its ledger"

    def effect(self, ctx: WorkflowContext, link: str, not_before: datetime | None) -> None:
        raise AssertionError(self._MISSING)

    def claim(self, ctx: WorkflowContext) -> str:
        raise AssertionError(self._MISSING)


class World:
    """Of this process."""

    witness: Witness = _Nobody()


class PartKind(StrEnum):
    STEP = "step"
    LONG = "long"
    """A step that takes longer than the lease."""
    NAP = "nap"
    """A durable timer; the run leaves memory."""
    FORK = "fork"
    """Several branches at once."""
    STUBBORN = "stubborn"
    """A step that fails a few times first."""


class Part(Struct, frozen=True):
    kind: PartKind
    seconds: float
    width: int


def plan(run_id: str) -> tuple[Part, ...]:
    """The same for a run whoever asks, also at its replay."""
    rng = Random(run_id)
    kinds = rng.choices(tuple(PartKind), weights=(50, 2, 18, 15, 15), k=rng.randint(1, 7))
    return tuple(Part(kind, _seconds(kind, rng), rng.randint(1, 3)) for kind in kinds)


def _seconds(kind: PartKind, rng: Random) -> float:
    match kind:
        case PartKind.LONG:
            return LEASE * rng.uniform(1.2, 2.0)
        case PartKind.NAP:
            return rng.uniform(0.03, 0.5)
        case _:
            return rng.uniform(0, 0.04)


def recurrences(run_id: str) -> int:
    """How often a run begins anew, if its workflow does."""
    return Random(f"{run_id} begins anew").choices((0, 1, 2, 3), weights=(50, 25, 15, 10))[0]


def digest(tokens: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(sorted(tokens)).encode()).hexdigest()[:16]


@activity
async def effect(ctx: WorkflowContext, link: str, seconds: float, not_before: datetime | None = None) -> str:
    """The token is new every time, so a run's result tells which of several executions was recorded."""
    World.witness.effect(ctx, link, not_before)
    await asyncio.sleep(seconds)
    return secrets.token_hex(4)


@activity(retry_policy=IMPATIENT)
async def stubborn(ctx: WorkflowContext, link: str, failures: int) -> str:
    World.witness.effect(ctx, link, None)
    if ctx.attempt <= failures:
        raise ConnectionError(f"attempt {ctx.attempt} of {failures + 1}")
    return secrets.token_hex(4)


@workflow(name="faults_errand")
async def errand(ctx: WorkflowContext) -> str:
    """Each part is told the digest of all that came before: an effect that ran ahead of its history betrays itself."""
    tokens: list[str] = []
    for part in plan(ctx.instance_id):
        tokens += await _carry_out(ctx, part, digest(tokens))
    return digest(tokens)


async def _carry_out(ctx: WorkflowContext, part: Part, link: str) -> list[str]:
    match part.kind:
        case PartKind.NAP:
            due = ctx.now() + timedelta(seconds=part.seconds)
            await sleep(ctx, part.seconds)
            return [await effect(ctx, link, 0.0, due)]
        case PartKind.FORK:
            return await asyncio.gather(*(effect(ctx, link, part.seconds * n) for n in range(part.width + 1)))
        case PartKind.STUBBORN:
            return [await stubborn(ctx, link, part.width)]
        case _:
            return [await effect(ctx, link, part.seconds)]


# For the tests that stop a run where they want it


@activity
async def pass_gate(ctx: WorkflowContext, gate: str) -> str:
    """Goes on when the file is there."""
    World.witness.effect(ctx, gate, None)
    while True:
        if await asyncio.to_thread(Path(gate).exists):
            return secrets.token_hex(4)
        await asyncio.sleep(0.02)


@workflow(name="faults_gated")
async def gated(ctx: WorkflowContext, gate: str) -> str:
    first = await effect(ctx, "", 0.0)
    second = await pass_gate(ctx, gate)
    return digest([first, second, await effect(ctx, "", 0.0)])


@workflow(name="faults_long")
async def long(ctx: WorkflowContext, seconds: float) -> str:
    return digest([await effect(ctx, "", seconds)])


WORKFLOWS = (errand, gated, long)
