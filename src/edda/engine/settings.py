"""The engine's numbers, in seconds where nothing else is said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from edda.core.model import SUSPECT_DEATHS, Crashes
from edda.core.options import explained_class
from edda.core.value_path import repr_short

DEATHS_ALONE = 2
"""So often the process must have died with this run alone in it: one death may be a coincidence."""
LEASE_HEARTBEATS = 2
"""A lease lasts for so many heartbeats at least: with fewer, a heartbeat that is late by the time of one statement
makes other workers take over a worker that is alive, and its steps run twice."""

_POSITIVE = ("lease", "heartbeat", "sweep", "orphan_sweep", "poll", "stall_limit", "call_timeout", "prune_every")
_NOT_NEGATIVE = (
    "takeover_grace",
    "linger",
    "shutdown_grace",
    "late_grace",
    "message_retention_days",
    "parked_first",
    "parked_most",
    "suspect_window",
)
_WHOLE = ("capacity", "claim_batch", "threads", "history_warning", "history_limit", "child_depth")
_LONGEST = 1e9
"""30 years of seconds: what is beyond overflows the numbers of a database or of an operating system."""


@explained_class
@dataclass(frozen=True, kw_only=True)
class Settings:
    lease: float = 15.0
    """A worker that has not renewed for so long may be taken over."""
    heartbeat: float = 3.0
    sweep: float = 2.0
    """How often lapsed leases are looked for."""
    takeover_grace: float = 5.0
    """Nobody is taken over so soon after a (re)connect: a restart of the database looks like everybody's death."""
    orphan_sweep: float = 60.0
    poll: float = 1.0
    """The safety net under every wake-up."""
    stall_limit: float = 300.0
    """After an event loop was blocked for so long by one run, the worker's other runs are given to other workers."""
    linger: float = 0.5
    """A run that is due again so soon stays in memory."""
    capacity: int = 1000
    """Runs in memory at once."""
    call_timeout: float = 5.0
    """For every call that a user awaits: after so long without an answer from the database it ends with an error."""
    claim_batch: int = 100
    threads: int = 32
    """For sync activities."""
    shutdown_grace: float = 30.0
    late_grace: float = 10.0
    """How long the end of a run waits for bodies that were given up and go on all the same."""
    message_retention_days: float = 7.0
    """Events older than this are no longer found, nor told apart from new ones with the same id."""
    run_retention_days: float | None = None
    """Runs that ended so long ago are removed; None keeps them."""
    prune_every: float = 300.0
    history_warning: int = 10_240
    """Entries of a run's history from which on it is warned of."""
    history_limit: int = 51_200
    """Entries after which a run is stopped, as if it were cancelled."""
    child_depth: int = 100
    """Children of children of children, at most."""
    parked_first: float = 30.0
    parked_most: float = 3600.0
    max_process_deaths: int | None = 5
    """A run whose process died so often, before the steps in flight had ended, is parked until it is resumed by hand;
    in two of the deaths it must have been the only run of its process. None: never."""
    suspect_window: float = 30.0
    """So long a worker runs nothing beside a run whose process died twice; longer after further deaths."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            check_number("Settings", name, getattr(self, name), above=0)
        for name in _NOT_NEGATIVE:
            check_number("Settings", name, getattr(self, name))
        for name in _WHOLE:
            check_whole("Settings", name, getattr(self, name))
        if self.run_retention_days is not None:
            check_number("Settings", "run_retention_days", self.run_retention_days, hint=", or None to keep runs")
        if self.max_process_deaths is not None:
            check_whole("Settings", "max_process_deaths", self.max_process_deaths, hint=", or None to park no run")
        if self.lease < LEASE_HEARTBEATS * self.heartbeat:
            raise ValueError(
                f"Settings(lease={self.lease!r}, heartbeat={self.heartbeat!r}): expected a lease of at least "
                f"{LEASE_HEARTBEATS} heartbeats; else a worker that is alive loses its runs to another one. Raise "
                "lease or lower heartbeat"
            )

    @property
    def self_fence(self) -> float:
        """So long after the last good heartbeat a worker starts nothing more, out of politeness."""
        return self.lease * 0.8

    def is_deadly(self, crashes: Crashes) -> bool:
        """Whether to start none of the steps that a run had in flight each time its process died."""
        most = self.max_process_deaths
        return most is not None and crashes.deaths >= most and crashes.alone >= DEATHS_ALONE

    def is_deadly_to_replay(self, crashes: Crashes) -> bool:
        """Whether even the workflow's own code is not to run: the process died although no step was started."""
        return self.is_deadly(crashes) and crashes.deaths >= 4 * (self.max_process_deaths or 1)

    def isolation(self, deaths: int) -> float:
        return min(self.suspect_window * 2.0 ** max(0, min(deaths, 16) - SUSPECT_DEATHS - 1), self.parked_most)

    def parked_rest(self, attempts: int) -> float:
        return min(self.parked_first * 2.0 ** min(attempts, 16), self.parked_most)


def check_number(owner: str, name: str, value: Any, *, above: float | None = None, hint: str = "") -> None:
    """Refuses what is no number of seconds, days and the like, or is out of range."""
    least = "of 0 or more" if above is None else f"above {above}"
    expected = f"{owner}({name}={repr_short(value)}): expected a number {least}{hint}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(expected)
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        raise ValueError(expected)
    if value > _LONGEST:
        raise ValueError(f"{expected}, and at most {_LONGEST:,.0f}")


def check_whole(owner: str, name: str, value: Any, *, least: int = 1, hint: str = "") -> None:
    """Refuses what is no count of things."""
    expected = f"{owner}({name}={repr_short(value)}): expected a whole number of {least} or more{hint}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(expected)
    if value < least:
        raise ValueError(expected)
    if value > _LONGEST:
        raise ValueError(f"{expected}, and at most {_LONGEST:,.0f}")
