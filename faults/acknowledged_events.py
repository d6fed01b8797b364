"""What was acknowledged is kept: a server is killed right after its 202 was read, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from edda import EddaApp
from edda.cloudevents.event import make
from edda.core.states import RunStatus

from .effect_log import read_ledgers
from .event_invariants import event_violations, read_mail
from .final_state import read_remains
from .http_endpoint import Endpoint, Poster
from .invariants import violations
from .target_databases import Place
from .wait_workload import LETTER, await_letter
from .worker import PROGRAM, Orders
from .worker_fleet import Fleet

PATIENCE = 120.0
HOPELESS = 2.0
"""Seconds for those whose letters were lost on purpose."""
SOURCE = "/killer"
COUNT_WAITS = "SELECT count(*) FROM edda_wait"
COUNT_RESULTS = "SELECT count(*) FROM edda_result"


class Acknowledged(Struct, frozen=True):
    database: str
    kills: int
    lost: int
    """Events that are not in the database."""
    waiting: int
    """Runs that did not get theirs."""
    violations: tuple[str, ...]
    seconds: float

    @property
    def is_sound(self) -> bool:
        return not (self.lost or self.waiting or self.violations)

    def __str__(self) -> str:
        facts = f"kills={self.kills} lost={self.lost} waiting={self.waiting} violations={len(self.violations)}"
        return f"acknowledged {self.database} {facts} seconds={self.seconds:.0f}"


async def acknowledge(
    place: Place, folder: Path, times: int, progress: Callable[[str], None] = lambda line: None, control: str = ""
) -> Acknowledged:
    began = time.monotonic()
    await place.prepare()
    with closing(Fleet(Orders(place.url, str(folder), "s", lease=None, control=control))) as fleet:
        killer = Killer(place, fleet)
        await killer.start_runs(times)
        await killer.kill_after_each(times, progress)
        await killer.let_finish(times, HOPELESS if control else PATIENCE)
        return await _judge(place, folder, times, time.monotonic() - began)


class Killer:
    def __init__(self, place: Place, fleet: Fleet) -> None:
        self._place = place
        self._endpoint = Endpoint(fleet)

    async def start_runs(self, times: int) -> None:
        """Each waits for a letter of its own, and nothing of it is in memory when that comes."""
        async with EddaApp("client", self._place.url, workflows=PROGRAM, worker=False, auto_migrate=False) as client:
            for number in range(times):
                await client.start(await_letter, number)
        self._endpoint.launch()
        await self._until(COUNT_WAITS, times, PATIENCE)
        self._endpoint.kill()

    async def kill_after_each(self, times: int, progress: Callable[[str], None]) -> None:
        async with Poster() as poster:
            for number in range(times):
                self._endpoint.launch()
                await poster.post(make(LETTER, SOURCE, str(number), {"number": number}), self._endpoint)
                self._endpoint.kill()
                if number % 100 == 99:
                    progress(f"{number + 1} kills")

    async def let_finish(self, times: int, within: float) -> None:
        """Whoever serves next brings the letters to those who wait."""
        self._endpoint.launch()
        await self._until(COUNT_RESULTS, times, within)

    async def _until(self, count: str, expected: int, within: float) -> None:
        with closing(self._place.line()) as line:
            await line.until(count, lambda found: found >= expected, within)


async def _judge(place: Place, folder: Path, times: int, seconds: float) -> Acknowledged:
    with closing(place.line()) as line:
        remains, mail, told = await read_remains(line), await read_mail(line), read_ledgers(folder)
    told.posted |= {(SOURCE, str(number)) for number in range(times)}
    stored = {(event.source, event.id) for event in mail.log.events}
    done = sum(result.status == RunStatus.COMPLETED for result in remains.results.values())
    found = (*violations(remains, told), *event_violations(mail, remains, told))
    return Acknowledged(place.kind, times, len(told.posted - stored), times - done, found, seconds)
