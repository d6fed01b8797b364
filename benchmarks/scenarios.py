"""The scenarios, and who takes part in which of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .databases import MYSQL, POSTGRES, SQLITE, Database
from .effort import Effort
from .figures import Figures
from .measures.idle import idling
from .measures.posts import posting
from .measures.recovery import recovery
from .measures.replay import replay
from .measures.steps import booking, latency, throughput
from .measures.talks import talking
from .measures.timers import punctuality
from .measures.wakes import waking
from .systems import DBOS, OURS, RAW, REFERENCE, System

Measure = Callable[[System, Database, Effort], Awaitable[Figures]]

COMPLETE = (OURS, REFERENCE, DBOS)


@dataclass(frozen=True)
class Scenario:
    key: str
    title: str
    measure: Measure
    rounds: int | None = None
    """None: as many as asked for."""
    systems: tuple[System, ...] = COMPLETE
    databases: tuple[str, ...] = (POSTGRES, SQLITE)
    without: frozenset[tuple[System, str]] = frozenset()

    def takes(self, system: System, database: str) -> bool:
        """The peers are set up for the databases that both of them have."""
        if (system, database) in self.without:
            return False
        return system in self.systems and database in self.databases and (database != MYSQL or system is OURS)


SCENARIOS = {
    scenario.key: scenario
    for scenario in (
        Scenario("A", "throughput: five steps, 100 workflows in flight", throughput, systems=(*COMPLETE, RAW)),
        Scenario("B", "latency: one step after the other, one workflow at a time", latency, systems=(*COMPLETE, RAW)),
        Scenario("C", "waking: waiting workflows, each sent its own event", waking),
        Scenario(
            "D",
            "idling: workflows that only wait",
            idling,
            rounds=1,
            systems=(OURS, DBOS),
            databases=(POSTGRES, SQLITE, MYSQL),
        ),
        Scenario("E", "timers: due at one instant, and one at a time", punctuality, rounds=1),
        Scenario("F", "recovery after kill -9 of a worker with 50 workflows in mid-step", recovery, rounds=1),
        Scenario("G", "replay of a long history in a fresh process", replay, rounds=1),
        # The reference answers before anything is stored, so its figures would be of something else.
        Scenario("I", "HTTP: events posted, each stored before its answer", posting, systems=(OURS, RAW)),
        # DBOS has neither channels nor an outbox.
        Scenario("J", "talking: competing and broadcast channels, the outbox", talking, systems=(OURS, REFERENCE)),
        Scenario(
            "K",
            "booking: five steps with a row through the ORM each, 100 workflows in flight",
            booking,
            without=frozenset({(DBOS, SQLITE)}),
        ),
    )
}
