"""Programs as data, drawn by chance, and the workflow that plays them.

Each piece is a thing that people write: steps with and without a way back, retries, sleeps, branches, time-outs and
children. What a run did is written down beside it, by idempotency key, where no crash of ours can lose it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct, structs

from edda import (
    RetryPolicy,
    TerminalError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    register_compensation,
    sleep,
    workflow,
)

from .effect_log import Ledger
from .workload import IMPATIENT

BRIEF = RetryPolicy(initial_interval=0.02, max_attempts=2)
LATE = "late"
NAPPED = "napped"
STARTED = "started"
CAUGHT = "caught"


class Boom(Exception):
    """What a script raises that fails by itself."""


class HopelessError(TerminalError):
    """What a step raises that is not worth another try."""


# The pieces


class StepKind(StrEnum):
    ACT = "act"
    """Nothing undoes it."""
    DEED = "deed"
    """Undone if the run fails."""
    HEAVY = "heavy"
    """The same in a thread, which nobody can interrupt."""
    PLEDGE = "pledge"
    """An act whose undo the code registers when it is done."""
    HOPELESS = "hopeless"
    EXHAUSTED = "exhausted"
    """Fails more often than its policy allows."""


UNDOABLE = (StepKind.DEED, StepKind.HEAVY, StepKind.PLEDGE)


class ChildKind(StrEnum):
    RUN = "run"
    START = "start"
    RESULT = "result"
    """Started, and waited for by its handle."""
    CHOSEN = "chosen"
    """Under an id that the code chose."""
    TWICE = "twice"
    """The same chosen id in two branches: one run."""
    DETACHED = "detached"


class Step(Struct, frozen=True, tag=True):
    kind: StepKind
    name: str
    seconds: float
    failures: int = 0
    """Attempts that fail first."""
    undo_failures: int | None = 0
    """The same of its undo; None: it fails for good."""


class Nap(Struct, frozen=True, tag=True):
    seconds: float


class Gather(Struct, frozen=True, tag=True):
    parts: tuple[Piece, ...]


class Within(Struct, frozen=True, tag=True):
    seconds: float
    part: Piece


class Try(Struct, frozen=True, tag=True):
    part: Piece


class Child(Struct, frozen=True, tag=True):
    kind: ChildKind
    script: Script


Piece = Step | Nap | Gather | Within | Try | Child


class Script(Struct, frozen=True):
    name: str
    folder: str
    """Where what it does is written down."""
    parts: tuple[Piece, ...]
    fails: bool = False
    """Raises when all its parts are done."""
    generations: int = 1
    timeout: float | None = None
    """Of the run."""
    cancel_after: float | None = None
    """Somebody outside asks it to stop, so many seconds after its start."""
    may_be_left: bool = False
    """A child that its parent may stop waiting for though the parent goes on."""

    @property
    def steps(self) -> Iterator[Step]:
        """Its own, not those of its children."""
        return (piece for part in self.parts for piece in _pieces(part) if isinstance(piece, Step))

    @property
    def pledges(self) -> set[str]:
        return {step.name for step in self.steps if step.kind is StepKind.PLEDGE}

    @property
    def may_stay_done(self) -> bool:
        """Whether something of it cannot be undone."""
        return any(step.undo_failures is None for step in self.steps if step.kind in UNDOABLE)

    @property
    def leaves(self) -> bool:
        """Whether branches may be left when its code is done: those beside one whose failure was caught."""
        return any(isinstance(piece, Try) for part in self.parts for piece in _pieces(part))

    def pack(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def unpack(cls, text: str) -> Script:
        return msgspec.json.decode(text, type=cls)


def _pieces(piece: Piece) -> Iterator[Piece]:
    yield piece
    match piece:
        case Gather(parts):
            for part in parts:
                yield from _pieces(part)
        case Within(_, part) | Try(part):
            yield from _pieces(part)


class Author:
    """Writes scripts; the same ones for the same seed."""

    def __init__(self, seed: int, folder: str) -> None:
        self._rng = Random(seed)
        self._folder = folder
        self._names = 0

    def write(self, name: str) -> Script:
        rng = self._rng
        script = self._script(name, depth=2, is_left=False)
        if rng.random() < 0.35:
            script = structs.replace(script, cancel_after=rng.uniform(0.0, 1.5))
        return script

    def _script(self, name: str, depth: int, is_left: bool) -> Script:
        rng = self._rng
        return Script(
            name,
            self._folder,
            tuple(self._piece(depth, is_left=False) for _ in range(rng.randint(1, 4))),
            fails=rng.random() < 0.35,
            generations=rng.choice((1, 1, 1, 1, 2, 3)),
            timeout=rng.choice((None, None, None, None, rng.uniform(0.1, 2.0))),
            may_be_left=is_left,
        )

    def _piece(self, depth: int, *, is_left: bool) -> Piece:
        """`is_left`: something around it may go on without it."""
        draw = self._rng.random()
        if depth == 0 or draw < 0.5:
            return self._leaf()
        if draw < 0.62:
            return Gather(tuple(self._piece(depth - 1, is_left=True) for _ in range(self._rng.randint(2, 3))))
        if draw < 0.74:
            return Within(self._rng.uniform(0.02, 0.6), self._piece(depth - 1, is_left=True))
        if draw < 0.8:
            return Try(self._piece(depth - 1, is_left=is_left))
        kind = self._rng.choice(tuple(ChildKind))
        script = self._script(self._name("child"), depth - 1, is_left)
        if kind is ChildKind.START:  # it outlives its parent, or is to be stopped with it
            script = structs.replace(script, parts=(*script.parts, Nap(self._rng.uniform(0.3, 2.0))))
        return Child(kind, script)

    def _leaf(self) -> Piece:
        rng = self._rng
        if rng.random() < 0.2:
            return Nap(rng.uniform(0.02, 0.4))
        kind = rng.choices(tuple(StepKind), weights=(20, 40, 10, 15, 3, 3))[0]
        undo_failures = rng.choices((0, 1, 2, None), weights=(80, 10, 5, 5))[0]
        return Step(kind, self._name("step"), rng.uniform(0.0, 0.15), rng.choice((0, 0, 0, 0, 1, 2)), undo_failures)

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}{self._names}"


def control_scripts(folder: str, copies: int = 3) -> Iterator[Script]:
    """Scripts that show each broken rule of `script_workers.CONTROLS` whatever is drawn at random: two steps that are
    undone in order, a step that succeeds after it was given up, a child whose parent is cancelled."""
    for copy in range(copies):
        steps = (Step(StepKind.DEED, f"first{copy}", 0.01), Step(StepKind.DEED, f"second{copy}", 0.01))
        yield Script(f"order{copy}", folder, steps, fails=True)
        late = Within(0.05, Step(StepKind.HEAVY, f"slow{copy}", 0.3))
        yield Script(f"late{copy}", folder, (late,), fails=True)
        child = Child(ChildKind.START, Script(f"child-of-cancelled{copy}", folder, (Nap(5.0),)))
        yield Script(f"cancelled{copy}", folder, (child, Nap(10.0)), cancel_after=1.5)


# What is done, and written down


@dataclass(frozen=True)
class Done:
    key: str
    token: str
    """New every time: which of several executions was it?"""


class Line(Struct, frozen=True):
    """One line of what was done."""

    what: str
    """did or undid."""
    key: str
    """Of the step whose effect it is."""
    by: str
    """Of the step that did it."""
    token: str


@cache
def _ledger(folder: str, pid: int) -> Ledger:
    """One per process: forks must not share it, nor its name."""
    return Ledger(Path(folder, f"{pid}-{time.time_ns()}.deeds"))


def _write(folder: str, line: Line) -> None:
    _ledger(folder, os.getpid()).note(line.what, line.key, line.by, line.token)


def read_lines(folder: Path) -> list[Line]:
    files = sorted(folder.glob("*.deeds"))
    return [Line(*line.split("\t")) for file in files for line in file.read_text().splitlines()]


@compensation(retry_policy=IMPATIENT)
async def take_back(ctx: WorkflowContext, folder: str, key: str, token: str, undo_failures: int | None) -> None:
    if undo_failures is None:
        raise HopelessError(f"{key} cannot be taken back")
    if ctx.attempt <= undo_failures:
        raise ConnectionError(f"attempt {ctx.attempt} of {undo_failures + 1}")
    _write(folder, Line("undid", key, ctx.idempotency_key, token))
    await asyncio.sleep(0.01)


def _do(ctx: WorkflowContext, folder: str, failures: int) -> Done:
    if ctx.attempt <= failures:
        raise ConnectionError(f"attempt {ctx.attempt} of {failures + 1}")
    done = Done(ctx.idempotency_key, secrets.token_hex(4))
    _write(folder, Line("did", done.key, done.key, done.token))
    return done


async def _do_slowly(ctx: WorkflowContext, folder: str, seconds: float, failures: int) -> Done:
    """In the middle: it can be killed, cancelled or given up before and after."""
    await asyncio.sleep(seconds / 2)
    done = _do(ctx, folder, failures)
    await asyncio.sleep(seconds / 2)
    return done


@activity(retry_policy=IMPATIENT)
async def act(ctx: WorkflowContext, folder: str, name: str, seconds: float, failures: int) -> Done:
    return await _do_slowly(ctx, folder, seconds, failures)


@activity(retry_policy=IMPATIENT)
@on_failure(take_back)
async def deed(
    ctx: WorkflowContext, folder: str, name: str, seconds: float, failures: int, undo_failures: int | None
) -> Done:
    return await _do_slowly(ctx, folder, seconds, failures)


@activity(retry_policy=IMPATIENT)
@on_failure(take_back)
def heavy(
    ctx: WorkflowContext, folder: str, name: str, seconds: float, failures: int, undo_failures: int | None
) -> Done:
    time.sleep(seconds / 2)
    done = _do(ctx, folder, failures)
    time.sleep(seconds / 2)
    return done


@activity
async def hopeless(ctx: WorkflowContext, name: str) -> None:
    raise HopelessError(name)


@activity(retry_policy=BRIEF)
async def exhausted(ctx: WorkflowContext, name: str) -> None:
    raise ConnectionError(name)


# Playing


@workflow(name="faults_script")
async def play(ctx: WorkflowContext, text: str) -> list[object]:
    script = Script.unpack(text)
    player = Player(ctx, script)
    results = [await player.play(part) for part in script.parts]
    if script.generations > 1:
        await ctx.recur(structs.replace(script, generations=script.generations - 1).pack())
    if script.fails:
        raise Boom(script.name)
    return results


class Player:
    def __init__(self, ctx: WorkflowContext, script: Script) -> None:
        self._ctx = ctx
        self._script = script

    async def play(self, piece: Piece) -> object:
        match piece:
            case Step():
                return await self._step(piece)
            case Nap():
                await sleep(self._ctx, piece.seconds)
                return NAPPED
            case Gather():
                return list(await asyncio.gather(*map(self.play, piece.parts)))
            case Within():
                return await self._within(piece)
            case Try():
                return await self._try(piece)
            case Child():
                return await self._child(piece)

    async def _step(self, step: Step) -> str:
        ctx, folder = self._ctx, self._script.folder
        match step.kind:
            case StepKind.HOPELESS:
                await hopeless(ctx, step.name)
            case StepKind.EXHAUSTED:
                await exhausted(ctx, step.name)
            case StepKind.DEED:
                await deed(ctx, folder, step.name, step.seconds, step.failures, step.undo_failures)
            case StepKind.HEAVY:
                await heavy(ctx, folder, step.name, step.seconds, step.failures, step.undo_failures)
            case _:
                done = await act(ctx, folder, step.name, step.seconds, step.failures)
                if step.kind is StepKind.PLEDGE:
                    register_compensation(ctx, take_back, folder, done.key, done.token, step.undo_failures)
        return step.name

    async def _within(self, piece: Within) -> object:
        try:
            async with asyncio.timeout(piece.seconds):
                return await self.play(piece.part)
        except TimeoutError:
            return LATE

    async def _try(self, piece: Try) -> object:
        try:
            return await self.play(piece.part)
        except Exception as error:  # what people write around what may fail
            return [CAUGHT, type(error).__name__]

    async def _child(self, child: Child) -> object:
        script, ctx = child.script, self._ctx
        text, chosen = script.pack(), f"{ctx.instance_id}-{self._script.generations}-{script.name}"
        match child.kind:
            case ChildKind.RUN:
                return await play.options(timeout=script.timeout).run(text)
            case ChildKind.DETACHED:
                return await play.options(timeout=script.timeout, detached=True).run(text)
            case ChildKind.CHOSEN:
                return await play.options(timeout=script.timeout, id=chosen).run(text)
            case ChildKind.TWICE:
                same = play.options(timeout=script.timeout, id=chosen)
                return list(await asyncio.gather(same.run(text), same.run(text)))
            case ChildKind.START:
                await play.options(timeout=script.timeout).start(text)
                return STARTED
            case ChildKind.RESULT:
                run_id = await play.options(timeout=script.timeout).start(text)
                return await play.handle(run_id).result()


SCRIPTS = (play,)
