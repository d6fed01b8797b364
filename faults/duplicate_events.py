"""Each event is sent several times at once to two endpoints that are killed meanwhile: it counts once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from edda.cloudevents.event import make

from .effect_log import read_ledgers
from .event_invariants import event_violations, read_mail
from .final_state import read_remains
from .http_endpoint import Endpoint, Poster
from .invariants import violations
from .target_databases import Place
from .wait_workload import BEGUN
from .worker import Orders
from .worker_fleet import Fleet

PATIENCE = 120.0
SOURCE = "/repeater"
MOST_COPIES = 5
ABREAST = 30
"""Events under way at once."""
COUNT_OPEN = "SELECT count(*) FROM edda_open_run"


class Duplicates(Struct, frozen=True):
    database: str
    events: int
    deliveries: int
    unanswered: int
    kills: int
    runs: int
    effects: int
    """Steps that ran; one whose process was killed before it was recorded ran again."""
    repeated: int
    violations: tuple[str, ...]
    seconds: float
    seed: int

    @property
    def is_sound(self) -> bool:
        return self.runs == self.effects == self.events and not self.violations

    def __str__(self) -> str:
        sent = f"events={self.events} deliveries={self.deliveries} unanswered={self.unanswered} kills={self.kills}"
        done = f"runs={self.runs} effects={self.effects} repeated={self.repeated} violations={len(self.violations)}"
        return f"duplicates {self.database} {sent} {done} seconds={self.seconds:.0f} seed={self.seed}"


class Repeater:
    def __init__(self, fleet: Fleet, events: int, seed: int) -> None:
        self._endpoints = (Endpoint(fleet), Endpoint(fleet))
        self._rng = random.Random(seed)
        self._numbers = iter(range(events))
        self.deliveries = self.kills = self.unanswered = 0

    async def send_all(self) -> None:
        for endpoint in self._endpoints:
            endpoint.launch()
        killing = asyncio.create_task(self._kill_for_ever())
        async with Poster() as poster:
            await asyncio.gather(*(self._send(poster, self._numbers) for _ in range(ABREAST)))
        killing.cancel()
        self.unanswered = poster.unanswered

    async def _send(self, poster: Poster, numbers: Iterator[int]) -> None:
        for number in numbers:
            copies = self._rng.randint(1, MOST_COPIES)
            await asyncio.gather(*(self._send_copy(poster, number, copy) for copy in range(copies)))
            self.deliveries += copies

    async def _send_copy(self, poster: Poster, number: int, copy: int) -> None:
        """Each with a body of its own: the first to come is the event."""
        event = make(BEGUN, SOURCE, str(number), {"number": number, "copy": copy})
        one, other = self._rng.sample(self._endpoints, 2)
        await poster.post(event, one, other)

    async def _kill_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.3, 1.5))
            endpoint = self._rng.choice(self._endpoints)
            endpoint.kill()
            endpoint.launch()
            self.kills += 1


async def repeat(
    place: Place, folder: Path, events: int, seed: int, progress: Callable[[str], None] = lambda line: None
) -> Duplicates:
    began = time.monotonic()
    await place.prepare()
    with closing(Fleet(Orders(place.url, str(folder), "d", lease=None))) as fleet:
        repeater = Repeater(fleet, events, seed)
        await repeater.send_all()
        progress(f"{repeater.deliveries} deliveries, {repeater.kills} kills")
        with closing(place.line()) as line:
            await line.until(COUNT_OPEN, lambda open: open == 0, PATIENCE)
        return await _judge(place, folder, repeater, events, seed, time.monotonic() - began)


async def _judge(place: Place, folder: Path, repeater: Repeater, events: int, seed: int, seconds: float) -> Duplicates:
    with closing(place.line()) as line:
        remains, mail, told = await read_remains(line), await read_mail(line), read_ledgers(folder)
    told.posted |= {(SOURCE, str(number)) for number in range(events)}
    steps = {(effect.run_id, effect.step) for effect in told.effects}
    return Duplicates(
        place.kind,
        events,
        repeater.deliveries,
        repeater.unanswered,
        repeater.kills,
        len(remains.runs),
        len(steps),
        len(told.effects) - len(steps),
        (*violations(remains, told), *event_violations(mail, remains, told)),
        seconds,
        seed,
    )
