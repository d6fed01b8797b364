"""The systems under test and how each of them is run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from . import venvs


@dataclass(frozen=True)
class System:
    name: str
    label: str
    distribution: str
    """Whose version is reported."""
    requirements: tuple[str, ...] = ()
    """Of a venv of its own; none: the interpreter that runs the bench."""
    standby: frozenset[str] = frozenset()
    """Databases on which a second, running worker takes over; elsewhere one is started right after the kill."""
    replay_sizes: tuple[int, ...] = ()
    """Steps in the histories to replay; smaller where writing them takes minutes."""
    wake_flags: tuple[str, ...] = ()
    """For its driver, where workflows wait for events or timers."""
    senders: frozenset[str] = frozenset()
    """Databases on which another process may send events."""
    crowds: tuple[int, ...] = ()
    """Workflows that only wait, one crowd after the other; smaller where the process would not hold them."""
    timers: int = 0
    """Due at one instant; fewer where setting them takes minutes."""
    timer_lead: float = 0.0
    """Seconds in which they can all be set."""
    messages: int = 0
    """Through a channel, and out of the outbox; fewer where that takes minutes."""
    talks_in_flight: int = 100
    """Messages that are being published at once, or workflows that send."""

    @property
    def python(self) -> Path:
        return venvs.python_of(self.name) if self.requirements else Path(sys.executable)

    @property
    def is_raw(self) -> bool:
        return self.name == "raw"


OURS = System(
    "ours",
    "Edda",
    "edda-framework",
    standby=frozenset({"postgresql", "sqlite"}),
    replay_sizes=(1, 1_000, 2_000, 5_000, 10_000),
    senders=frozenset({"postgresql", "sqlite"}),
    crowds=(10_000, 90_000),
    timers=2_000,
    timer_lead=10.0,
    messages=10_000,
)
REFERENCE = System(
    "reference",
    "reference",
    "edda-framework",
    requirements=("edda-framework[postgresql]==0.16.2", "uvloop"),
    # It does not support two processes on one SQLite file.
    standby=frozenset({"postgresql"}),
    replay_sizes=(1, 250, 500, 1_000),
    wake_flags=("--eager",),
    senders=frozenset({"postgresql"}),
    timers=200,
    timer_lead=60.0,
    messages=40,
)
# Without its separate recovery service a worker recovers only what its own executor id left behind, when it starts.
DBOS = System(
    "dbos",
    "DBOS",
    "dbos",
    requirements=("dbos",),
    replay_sizes=(1, 250, 500, 1_000, 2_000),
    senders=frozenset({"postgresql", "sqlite"}),
    crowds=(10_000,),
    timers=2_000,
    timer_lead=60.0,
)
RAW = System("raw", "raw commits", "asyncpg")

SYSTEMS = {system.name: system for system in (OURS, REFERENCE, DBOS, RAW)}
