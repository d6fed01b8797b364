"""Runs that do what has to be undone if they fail, that start others and wait for them, and that begin anew.

What is undone is told by its token, which is new with every execution of a step.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from enum import StrEnum
from random import Random
from typing import Any, TypedDict

from msgspec import Struct

from edda import (
    TerminalError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    register_compensation,
    sleep,
    workflow,
)
from edda.errors import WorkflowError
from edda.workflow.workflow import BoundWorkflow, Workflow

from .wait_workload import TYPES, vigil
from .workload import IMPATIENT, World, digest, effect, errand, recurrences

MOST_DEPTH = 2
LOST = "lost"
"""The token of a child that did not complete."""
RECALLED = "recalled"
"""Why a run was cancelled by the one that started it."""
LIMIT = 0.06
"""Seconds that a step in a hurry has."""


class Bankrupt(TerminalError):
    """What a venture fails with that was bound to fail."""


class DealKind(StrEnum):
    BOOK = "book"
    """A step with an undo."""
    BOOKS = "books"
    """Several of them at once."""
    PLEDGE = "pledge"
    """An undo that was registered by hand."""
    HURRY = "hurry"
    """A step with an undo and a time limit."""
    CUT = "cut"
    """A step with an undo that may be given up while it runs."""
    CHILD = "child"
    CROWD = "crowd"
    """Several children at once."""
    SEND = "send"
    """A child that is started, mostly looked at, and waited for."""
    RECALL = "recall"
    """A child that is started, cancelled, and waited for."""
    BRIEF = "brief"
    """A child that is given up after a while, and therefore cancelled."""
    LEAVE = "leave"
    """A child that nobody waits for; it ends with its parent."""
    DETACH = "detach"
    """A child that nobody waits for, and that goes on whatever becomes of its parent."""
    SHARED = "shared"
    """A run that others start and wait for too."""
    NAP = "nap"


_CHANCES = dict(zip(DealKind, (14, 10, 8, 8, 10, 10, 6, 8, 5, 8, 5, 4, 10, 6), strict=True))


class Deal(Struct, frozen=True):
    kind: DealKind
    seconds: float
    width: int
    limit: float | None
    """Of the whole child, in seconds."""


def deals(run_id: str, generation: int) -> tuple[Deal, ...]:
    """The same for a generation whoever asks, also at its replay."""
    rng = Random(f"{run_id}/{generation}")
    kinds = rng.choices(tuple(_CHANCES), weights=tuple(_CHANCES.values()), k=rng.randint(1, 4))
    return tuple(_deal(kind, rng) for kind in kinds)


def _deal(kind: DealKind, rng: Random) -> Deal:
    seconds = rng.uniform(0.05, 0.6) if kind in (DealKind.BRIEF, DealKind.NAP) else rng.uniform(0.0, 0.2)
    return Deal(kind, seconds, rng.randint(1, 3), rng.uniform(0.1, 1.5) if rng.random() < 0.15 else None)


def is_doomed(run_id: str) -> bool:
    return Random(f"{run_id} is doomed").random() < 0.35


def is_hopeless(token: str) -> bool:
    """Whether it cannot be undone."""
    return token.startswith("0")


@compensation(retry_policy=IMPATIENT)
async def unbook(ctx: WorkflowContext, token: str) -> str:
    """Some only after a few attempts, a few never."""
    World.witness.effect(ctx, token, None)
    if is_hopeless(token):
        raise TerminalError(f"{token} stands")
    if ctx.attempt <= int(token[1], 16) % 3:
        raise ConnectionError(f"attempt {ctx.attempt}")
    await asyncio.sleep(int(token[2], 16) / 500)
    return token


class Booking(TypedDict):
    token: str


@activity
@on_failure(unbook)
async def book(ctx: WorkflowContext, link: str, seconds: float) -> Booking:
    World.witness.effect(ctx, link, None)
    await asyncio.sleep(seconds)
    return Booking(token=secrets.token_hex(4))


@activity(retry_policy=IMPATIENT, timeout=LIMIT)
@on_failure(unbook)
async def hurry(ctx: WorkflowContext, link: str) -> Booking:
    """An attempt that is given up may come to a good end all the same, and then it counts."""
    World.witness.effect(ctx, link, None)
    seconds = LIMIT * Random(f"{ctx.idempotency_key} {ctx.attempt}").uniform(0.2, 1.8)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds / 2)
    return Booking(token=secrets.token_hex(4))


@activity
async def pledge(ctx: WorkflowContext, link: str, seconds: float) -> str:
    World.witness.effect(ctx, link, None)
    await asyncio.sleep(seconds)
    return secrets.token_hex(4)


@activity
async def ruin(ctx: WorkflowContext, link: str, seconds: float) -> str:
    World.witness.effect(ctx, link, None)
    await asyncio.sleep(seconds)
    raise Bankrupt(ctx.instance_id)


@activity
async def farewell(ctx: WorkflowContext, link: str) -> str:
    """The last of a generation: when it is recorded, nothing of that one will ever be undone."""
    World.witness.effect(ctx, link, None)
    return secrets.token_hex(4)


UNDOABLE = frozenset({book.name, hurry.name})


@workflow(name="faults_venture")
async def venture(ctx: WorkflowContext, shared: str, depth: int = 0, generation: int = 0, past: str = "") -> str:
    """`shared` is the id of a run that others wait for too, `past` what the generations before were given."""
    trader = Trader(ctx, shared, depth, past)
    for deal in deals(ctx.instance_id, generation):
        await trader.strike(deal)
    if generation < recurrences(ctx.instance_id):
        await trader.take_leave()
        await ctx.recur(shared, depth, generation + 1, trader.link)
    if is_doomed(ctx.instance_id):
        await trader.fail()
    return trader.link


class Trader:
    """Strikes one deal after the other, and notes what it is told."""

    def __init__(self, ctx: WorkflowContext, shared: str, depth: int, past: str) -> None:
        self._ctx = ctx
        self._shared = shared
        self._depth = depth
        self._tokens = [past]

    @property
    def link(self) -> str:
        return digest(self._tokens)

    async def strike(self, deal: Deal) -> None:
        match deal.kind:
            case DealKind.NAP:
                await sleep(self._ctx, deal.seconds)
            case DealKind.BOOK | DealKind.BOOKS | DealKind.PLEDGE | DealKind.HURRY | DealKind.CUT:
                await self._act(deal)
            case DealKind.SHARED:
                await self._hear(errand.options(id=self._shared).run())
            case DealKind.LEAVE | DealKind.DETACH:
                await self._start(deal)
            case _:
                await self._tend(deal)

    async def take_leave(self) -> None:
        self._tokens.append(await farewell(self._ctx, self.link))

    async def fail(self) -> None:
        """While other steps are under way."""
        await asyncio.gather(self._book(0.02), self._book(0.2), ruin(self._ctx, self.link, 0.05))

    # Steps

    async def _act(self, deal: Deal) -> None:
        match deal.kind:
            case DealKind.BOOK:
                await self._book(deal.seconds)
            case DealKind.BOOKS:
                await asyncio.gather(*(self._book(deal.seconds / (n + 1)) for n in range(deal.width + 1)))
            case DealKind.PLEDGE:
                token = await pledge(self._ctx, self.link, deal.seconds)
                register_compensation(self._ctx, unbook, token)
                self._tokens.append(token)
            case DealKind.HURRY:
                self._tokens.append((await hurry(self._ctx, self.link))["token"])
            case DealKind.CUT:
                with suppress(TimeoutError):
                    async with asyncio.timeout(deal.seconds / 2):
                        await self._book(deal.seconds)

    async def _book(self, seconds: float) -> None:
        self._tokens.append((await book(self._ctx, self.link, seconds))["token"])

    # Other runs

    async def _tend(self, deal: Deal) -> None:
        child, arguments = self._child(deal)
        match deal.kind:
            case DealKind.CROWD:
                crowd = (self._hear(_options(child, deal).run(*arguments)) for _ in range(deal.width + 1))
                await asyncio.gather(*crowd)
            case DealKind.BRIEF:
                with suppress(TimeoutError):
                    async with asyncio.timeout(deal.seconds):
                        await self._hear(_options(child, deal).run(*arguments))
            case DealKind.SEND | DealKind.RECALL:
                await self._follow(deal, child)
            case _:
                await self._hear(_options(child, deal).run(*arguments))

    async def _follow(self, deal: Deal, child: Workflow[..., str]) -> None:
        handle = child.handle(await self._start(deal))
        if deal.kind is DealKind.RECALL:
            self._tokens.append(str(await handle.cancel(RECALLED)))
        elif deal.width < 3:
            self._tokens.append(str(await handle.status()))
            self._tokens.append(await effect(self._ctx, self.link, deal.seconds))
        await self._hear(handle.result())

    async def _start(self, deal: Deal) -> str:
        child, arguments = self._child(deal)
        run_id = await _options(child, deal).start(*arguments)
        self._tokens.append(run_id)
        return run_id

    async def _hear(self, result: Any) -> None:
        try:
            self._tokens.append(await result)
        except WorkflowError:
            self._tokens.append(LOST)

    def _child(self, deal: Deal) -> tuple[Workflow[..., str], tuple[Any, ...]]:
        match deal.width:
            case 1 if self._depth < MOST_DEPTH:
                return venture, (self._shared, self._depth + 1)
            case 2:
                return vigil, (TYPES[int(deal.seconds * 1000) % len(TYPES)],)
            case _:
                return errand, ()


def _options(child: Workflow[..., str], deal: Deal) -> BoundWorkflow[..., str]:
    return child.options(timeout=deal.limit, detached=deal.kind is DealKind.DETACH)


VENTURES = (venture,)
