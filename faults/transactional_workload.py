"""Runs whose steps write users' rows, publish, and send events, each together with its record or not at all.

What a step did is its result, so the history says which rows, messages and events there have to be.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from contextlib import suppress
from enum import StrEnum
from random import Random

from msgspec import Struct
from typing_extensions import TypedDict

from edda import (
    EddaApp,
    MessageTimeoutError,
    TerminalError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    publish,
    receive,
    send_event_transactional,
    sleep,
    subscribe,
    workflow,
)

from .ledger_table import put_by_session, put_by_transaction
from .saga_workload import is_doomed
from .workload import IMPATIENT, World

NEWS = "faults.news"
"""A channel that every listener hears all of."""
END = "the end"
REPORT, SOURCE = "faults.report", "/faults"
LIMIT = 0.3
"""Seconds that a step in a rush has for an attempt."""
LAP = 30
"""Messages after which a listener begins anew."""


class Way(StrEnum):
    """How a step writes its row."""

    SESSION = "session"
    TRANSACTION = "transaction"
    NONE = "none"


class Deed(TypedDict):
    """What a step did, besides its place."""

    token: str
    way: str
    says: bool
    sends: bool
    took: str
    """The id of a message, if there was one to be had."""
    claim: str
    """Whose the run was when the attempt began, and under which epoch."""


class TradeKind(StrEnum):
    ENTER = "enter"
    BOOK = "book"
    BOOKS = "books"
    """Several at once."""
    RUSH = "rush"
    """With a limit that it often passes."""
    CUT = "cut"
    """Given up by the workflow."""
    PICK = "pick"
    """Takes a message that nobody else gets then."""
    NAP = "nap"


class Trade(Struct, frozen=True):
    kind: TradeKind
    way: Way
    failures: int
    seconds: float
    says: bool
    sends: bool

    @property
    def arguments(self) -> tuple[str, int, float, bool, bool]:
        return self.way, self.failures, self.seconds, self.says, self.sends


def trades(run_id: str) -> tuple[Trade, ...]:
    """The same for a run whoever asks, also at its replay."""
    rng = Random(run_id)
    kinds = rng.choices(tuple(TradeKind), weights=(25, 20, 10, 15, 10, 15, 5), k=rng.randint(1, 6))
    return tuple(_trade(kind, rng) for kind in kinds)


def _trade(kind: TradeKind, rng: Random) -> Trade:
    """Of steps at the same time nobody can say which sends first."""
    way = rng.choices(tuple(Way), weights=(40, 40, 20))[0]
    is_alone = kind in {TradeKind.ENTER, TradeKind.BOOK, TradeKind.PICK}
    failures = rng.choice((0, 0, 0, 1, 2))
    return Trade(kind, way, failures, rng.uniform(0, 0.04), rng.random() < 0.4, is_alone and rng.random() < 0.5)


async def _do(
    ctx: WorkflowContext, claim: str, way: str, failures: int, says: bool, sends: bool, *, takes: bool = False
) -> Deed:
    """An attempt that fails has done all of it before."""
    token = secrets.token_hex(4)
    await _put(ctx, way, token)
    took = await _take(ctx) if takes else ""
    if says:
        await publish(ctx, NEWS, ctx.idempotency_key)
    if sends:
        await send_event_transactional(ctx, REPORT, SOURCE, {"place": ctx.idempotency_key})
    if ctx.attempt <= failures:
        raise ConnectionError(f"attempt {ctx.attempt} of {failures + 1}")
    return Deed(token=token, way=way, says=says, sends=sends, took=took, claim=claim)


async def _take(ctx: WorkflowContext) -> str:
    try:
        return (await receive(ctx, NEWS)).id
    except MessageTimeoutError:
        return ""


async def _put(ctx: WorkflowContext, way: str, item: str) -> None:
    match way:
        case Way.SESSION:
            await put_by_session(ctx.session, ctx.idempotency_key, item)
        case Way.TRANSACTION:
            await put_by_transaction(ctx, item)


@compensation(retry_policy=IMPATIENT)
async def strike_out(ctx: WorkflowContext, token: str) -> Deed:
    claim = World.witness.claim(ctx)
    await put_by_session(ctx.session, ctx.idempotency_key, f"-{token}")
    if ctx.attempt <= int(token[0], 16) % 3:
        raise ConnectionError(f"attempt {ctx.attempt}")
    return Deed(token=f"-{token}", way=Way.SESSION, says=False, sends=False, took="", claim=claim)


@activity(retry_policy=IMPATIENT)
async def enter(ctx: WorkflowContext, way: str, failures: int, seconds: float, says: bool, sends: bool) -> Deed:
    claim = World.witness.claim(ctx)
    await asyncio.sleep(seconds)
    return await _do(ctx, claim, way, failures, says, sends)


@activity(retry_policy=IMPATIENT)
@on_failure(strike_out)
async def enter_for_now(ctx: WorkflowContext, way: str, failures: int, seconds: float, says: bool, sends: bool) -> Deed:
    claim = World.witness.claim(ctx)
    await asyncio.sleep(seconds)
    return await _do(ctx, claim, way, failures, says, sends)


@activity(retry_policy=IMPATIENT)
async def pick_up(ctx: WorkflowContext, way: str, failures: int, seconds: float, says: bool, sends: bool) -> Deed:
    claim = World.witness.claim(ctx)
    await asyncio.sleep(seconds)
    return await _do(ctx, claim, way, failures, says, sends, takes=True)


@activity(retry_policy=IMPATIENT, timeout=LIMIT)
@on_failure(strike_out)
async def rush(ctx: WorkflowContext, way: str, failures: int, seconds: float, says: bool, sends: bool) -> Deed:
    """An attempt that is given up may come to a good end all the same, and then it counts."""
    claim = World.witness.claim(ctx)
    rest = LIMIT * Random(f"{ctx.idempotency_key} {ctx.attempt}").uniform(0.2, 1.6)
    try:
        await asyncio.sleep(rest)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
    return await _do(ctx, claim, way, failures, says, sends)


@workflow(name="faults_trade")
async def trade(ctx: WorkflowContext) -> None:
    for one in trades(ctx.instance_id):
        await _strike(ctx, one)
    if is_doomed(ctx.instance_id):
        raise TerminalError("ruined")


async def _strike(ctx: WorkflowContext, one: Trade) -> None:
    match one.kind:
        case TradeKind.NAP:
            await sleep(ctx, one.seconds * 10)
        case TradeKind.ENTER:
            await enter(ctx, *one.arguments)
        case TradeKind.PICK:
            await pick_up(ctx, *one.arguments)
        case TradeKind.RUSH:
            await rush(ctx, *one.arguments)
        case TradeKind.BOOKS:
            await asyncio.gather(*(enter_for_now(ctx, *one.arguments) for _ in range(3)))
        case TradeKind.CUT:
            with suppress(TimeoutError):
                async with asyncio.timeout(one.seconds / 2):
                    await enter_for_now(ctx, *one.arguments)
        case TradeKind.BOOK:
            await enter_for_now(ctx, *one.arguments)


@workflow(name="faults_listener")
async def listener(ctx: WorkflowContext) -> None:
    await subscribe(ctx, NEWS)
    for _ in range(LAP):
        if (await receive(ctx, NEWS)).data == END:
            return
    await ctx.recur()


DOING: frozenset[str] = frozenset({enter.name, enter_for_now.name, pick_up.name, rush.name, strike_out.name})
"""Steps whose result is a deed."""
UNDOABLE: frozenset[str] = frozenset({enter_for_now.name, rush.name})
TRADES = (trade, listener)


async def start_trade(app: EddaApp) -> str:
    timeout = random.uniform(0.2, 3.0) if random.random() < 0.08 else None
    return await app.start(trade.options(timeout=timeout))
