"""What the bench asks of a system, and what the bodies of its steps report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

REST_SECONDS = 3.0
"""How long a workflow of the replay scenario sleeps: long enough to end its process meanwhile."""

PATIENCE = 600.0
"""Seconds for writing a long history."""

Mode = Literal["competing", "broadcast"]

BROKER = "--broker="
"""Begins the flag that says where the outbox delivers to."""
LEDGER = "--ledger"
"""There will be lines to book."""
STATEMENTS = "--statements"
"""They are to be counted, which costs time."""


class Probe:
    """Seen from inside bodies. Some systems run those on threads: appending to a list is safe from any."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.bodies: list[float] = []
        self.held: set[int] = set()
        self.marks: dict[int, float] = {}
        self.dates: dict[int, float] = {}
        self.heard: dict[tuple[int, int], float] = {}
        self.gate_closed = False

    def begin(self) -> None:
        """First line of a workflow's code, also when it is replayed."""
        self.bodies.append(time.monotonic())

    def step(self) -> None:
        self.steps.append(time.monotonic())

    async def pass_gate(self, number: int) -> None:
        """The step in which the first worker is killed; the second worker's gate is open."""
        self.held.add(number)
        if self.gate_closed:
            await asyncio.Event().wait()

    def mark(self, number: int) -> None:
        """The last step of a workflow that was interrupted, waiting or asleep."""
        self.dates[number] = time.time()
        self.marks[number] = time.monotonic()

    def hear(self, listener: int, number: int) -> None:
        """A message, in a workflow's own code: on replay it is the same one again."""
        self.heard.setdefault((listener, number), time.monotonic())


class Driver(Protocol):
    @property
    def statements(self) -> int | None:
        """Sent to the database so far; None: it does not tell."""
        ...

    async def open(self, worker: bool) -> None:
        """Without `worker` it only has to send events, and must run nothing."""
        ...

    async def close(self) -> None: ...

    async def run(self, steps: int) -> None:
        """One workflow of trivial steps, from its start to its result."""
        ...

    async def book(self, steps: int) -> None:
        """The same, and each step adds a line to the ledger, in one transaction with its own record."""
        ...

    async def hold(self, number: int) -> None:
        """Start a workflow of two steps: the gate and the mark."""
        ...

    async def suspend(self, steps: int) -> str:
        """Start a workflow of trivial steps, a wait and mark 0; returns its id when it waits."""
        ...

    async def resume(self, run_id: str) -> None:
        """Wake it in a fresh process, if the system does not do so by itself."""
        ...

    async def expect(self, number: int, act: bool) -> None:
        """Start a workflow that waits for an event of its own and marks that it came: in a step if it is to act."""
        ...

    async def send(self, number: int) -> None:
        """The event of that workflow, from any process."""
        ...

    async def doze(self, number: int, due: float) -> None:
        """Start a workflow that sleeps until a moment of the wall clock, then marks in a step."""
        ...

    async def is_quiet(self) -> bool:
        """Whether all workflows wait or have ended."""
        ...


class Talker(Protocol):
    """Of the systems that have channels and an outbox."""

    async def listen(self, number: int, channel: str, mode: Mode) -> None:
        """Start a workflow that receives from a channel for ever."""
        ...

    async def publish(self, channel: str, number: int) -> None:
        """From outside of any workflow."""
        ...

    async def emit(self, events: int) -> None:
        """One workflow of steps that each put an event into the outbox, from its start to its result."""
        ...


def flag_of(flags: Sequence[str], beginning: str) -> str | None:
    return next((flag.removeprefix(beginning) for flag in flags if flag.startswith(beginning)), None)


async def until(fact: Callable[[], bool], timeout: float) -> bool:
    """Look every few milliseconds; what is timed is noted by the bodies, not here."""

    async def look() -> bool:
        return fact()

    return await until_told(look, timeout)


async def until_told(ask: Callable[[], Awaitable[bool]], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not await ask():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True


async def until_still(count: Callable[[], int], wanted: int, stall: float) -> None:
    """Until there are as many, or there has been no new one for so long."""
    known, since = count(), time.monotonic()
    while known < wanted and time.monotonic() < since + stall:
        await asyncio.sleep(0.005)
        if (now := count()) != known:
            known, since = now, time.monotonic()
