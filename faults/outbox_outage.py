"""The receiver of the outbox is gone for a while, and runs go on sending: afterwards it has everything, in order."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from msgspec import Struct

from edda import EddaApp, WorkflowContext, send_event_transactional, workflow
from edda.core.model import OutboxState
from tests.engine.conditions import until
from tests.outbox.outbox_rows import are_over, in_order
from tests.outbox.receiver import Receiver, receiving

from .target_databases import Place

EVENTS_PER_RUN = 3
BESIDE = 2.0
"""Seconds of load before the outage, and after it."""
PATIENCE = 120.0
"""Seconds for the backlog."""
PROMPT = 5.0
"""Seconds within which an event that is new after the outage has to arrive, backlog or not."""


@workflow
async def outage_teller(ctx: WorkflowContext, number: int) -> None:
    for place in range(EVENTS_PER_RUN):
        await send_event_transactional(ctx, "outage.told", "/outage", {"run": number, "place": place})


class Outage(Struct, frozen=True):
    database: str
    seconds: float
    events: int
    arrived: int
    dead: int
    backlog: int
    """Events that waited when the receiver came back."""
    drained: float
    """Seconds it took to send them."""
    slowest_new: float
    """Seconds from the start of a run to the arrival of its last event, of runs after the outage."""
    violations: tuple[str, ...]

    def __str__(self) -> str:
        work = f"seconds={self.seconds:.0f} events={self.events} arrived={self.arrived} dead={self.dead}"
        pace = f"backlog={self.backlog} drained={self.drained:.1f}s slowest_new={self.slowest_new:.2f}s"
        return f"outage {self.database} {work} {pace} violations={len(self.violations)}"


class Load:
    """Starts so many runs a second."""

    def __init__(self, app: EddaApp, rate: float) -> None:
        self._app = app
        self._pause = 1 / rate
        self._numbers = count()
        self.started: dict[int, float] = {}

    async def go_on(self, seconds: float) -> list[int]:
        end, numbers = time.monotonic() + seconds, []
        while time.monotonic() < end:
            number = next(self._numbers)
            numbers.append(number)
            self.started[number] = time.monotonic()
            await self._app.start(outage_teller, number)
            await asyncio.sleep(self._pause)
        return numbers


class Book:
    """When each event arrived first, and in which order those of a run did."""

    def __init__(self) -> None:
        self.arrived: dict[tuple[int, int], float] = {}
        self.order: defaultdict[int, list[int]] = defaultdict(list)

    def read(self, receiver: Receiver, since: int) -> int:
        taken = receiver.taken[since:]
        for request in taken:
            data = request.event["data"]
            self.order[data["run"]].append(data["place"])
            self.arrived.setdefault((data["run"], data["place"]), time.monotonic())
        return since + len(taken)

    async def keep(self, receiver: Receiver) -> None:
        """Until it is cancelled."""
        known = 0
        while True:
            known = self.read(receiver, known)
            await asyncio.sleep(0.01)


async def endure(place: Place, seconds: float, rate: float, say: Callable[[str], None]) -> Outage:
    book = Book()
    async with receiving() as receiver:
        app = EddaApp("outage", place.url, outbox_enabled=True, broker_url=receiver.url, workflows=[outage_teller])
        async with app:
            keeping = asyncio.create_task(book.keep(receiver))
            load = Load(app, rate)
            await load.go_on(BESIDE)
            say(f"the receiver is gone for {seconds:.0f} seconds")
            await receiver.close()
            await load.go_on(seconds)
            backlog = EVENTS_PER_RUN * len(load.started) - len(book.arrived)
            say(f"it is back; {backlog} events wait for it")
            await receiver.open()
            back = time.monotonic()
            new = await load.go_on(BESIDE)
            with suppress(AssertionError):  # what is missing is counted below
                await until(lambda: are_over(app.engine.storage), "everything is sent", PATIENCE)
                await until(lambda: len(book.arrived) == EVENTS_PER_RUN * len(load.started), "and seen", PROMPT)
            drained = max(book.arrived.values()) - back
            dead = len(await app.engine.storage.find_outbox(OutboxState.DEAD, limit=1_000))
            keeping.cancel()
    return _judge(place.kind, seconds, load, book, new, backlog, drained, dead)


def _judge(
    kind: str, seconds: float, load: Load, book: Book, new: list[int], backlog: int, drained: float, dead: int
) -> Outage:
    expected = EVENTS_PER_RUN * len(load.started)
    ends = [book.arrived.get((number, EVENTS_PER_RUN - 1), float("inf")) - load.started[number] for number in new]
    slowest = max(ends)
    violations = []
    if len(book.arrived) != expected:
        violations.append(f"{expected - len(book.arrived)} of {expected} events never arrived")
    if dead:
        violations.append(f"{dead} events are dead though their receiver only was away")
    if slowest > PROMPT:
        violations.append(f"a new event came after {slowest:.1f} s: the old ones held it up")
    for number, places in book.order.items():
        if in_order(map(str, places)) != [str(one) for one in range(EVENTS_PER_RUN)]:
            violations.append(f"the events of run {number} came as {places}")
    return Outage(kind, seconds, expected, len(book.arrived), dead, backlog, drained, slowest, tuple(violations))
