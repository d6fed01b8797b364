"""The engine's settings; times are in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edda.core.model import SUSPECT_DEATHS, Crashes
from edda.core.options import explained_class
from edda.core.value_path import repr_short

DEATHS_ALONE = 2
"""How often the process must have died with this run alone in it: one death may be a coincidence."""
LEASE_HEARTBEATS = 2
"""Heartbeats per lease, at least: with fewer, a heartbeat that is late by the time of one statement lets other workers
take over a worker that is alive, and its steps run twice."""

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
_MAX = 1e9
"""30 years of seconds: more overflows the numbers of a database or of an operating system."""


@explained_class
@dataclass(frozen=True, kw_only=True)
class Settings:
    lease: float = 15.0
    """A worker that has not renewed its lease for this time may be taken over."""
    heartbeat: float = 3.0
    sweep: float = 2.0
    """Time between two searches for lapsed leases."""
    takeover_grace: float = 5.0
    """No take-over for this time after a (re)connect: after a restart of the database all leases seem lapsed."""
    orphan_sweep: float = 60.0
    poll: float = 1.0
    """Time between two polls for work, in case a notification is lost."""
    stall_limit: float = 300.0
    """After one run has blocked the event loop for this time, the worker's other runs go to other workers."""
    linger: float = 0.5
    """A run that is due again within this time stays in memory."""
    capacity: int = 1000
    """Runs in memory at once."""
    call_timeout: float = 5.0
    """For every call that a user awaits: after this time without an answer of the database it ends with an error."""
    claim_batch: int = 100
    threads: int = 32
    """For sync activities."""
    shutdown_grace: float = 30.0
    late_grace: float = 10.0
    """How long the end of a run waits for attempts that were given up and have not ended."""
    message_retention_days: float = 7.0
    """Events older than this are no longer found, nor told apart from new ones with the same id."""
    run_retention_days: float | None = None
    """Runs that ended before this time are removed; None keeps them."""
    prune_every: float = 300.0
    history_warning: int = 10_240
    """Entries of a run's history at which a warning is logged."""
    history_limit: int = 51_200
    """Entries at which a run is stopped, as by a cancel."""
    child_depth: int = 100
    """Children of children of children, at most."""
    parked_first: float = 30.0
    parked_most: float = 3600.0
    max_process_deaths: int | None = 5
    """A run whose process died this often, before the steps in flight had ended, is parked until it is resumed by hand;
    in two of the deaths it must have been the only run of its process. None: never."""
    suspect_window: float = 30.0
    """How long a worker runs nothing beside a run whose process died twice; longer after further deaths."""

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

    @cached_property
    def self_fence(self) -> float:
        """Time after the last answered heartbeat from which on a worker starts no step: its lease may lapse soon."""
        return self.lease * 0.8

    def is_deadly(self, crashes: Crashes) -> bool:
        """Whether to start none of the steps that a run had in flight each time its process died."""
        limit = self.max_process_deaths
        return limit is not None and crashes.deaths >= limit and crashes.alone >= DEATHS_ALONE

    def is_deadly_to_replay(self, crashes: Crashes) -> bool:
        """Whether even the workflow's own code is not to run: the process died although no step was started."""
        return self.is_deadly(crashes) and crashes.deaths >= 4 * (self.max_process_deaths or 1)

    def isolation(self, deaths: int) -> float:
        return min(self.suspect_window * 2.0 ** max(0, min(deaths, 16) - SUSPECT_DEATHS - 1), self.parked_most)

    def parked_rest(self, attempts: int) -> float:
        return min(self.parked_first * 2.0 ** min(attempts, 16), self.parked_most)


def check_number(owner: str, name: str, value: Any, *, above: float | None = None, hint: str = "") -> None:
    """Raises for a value that is no number, or out of range."""
    least = "of 0 or more" if above is None else f"above {above}"
    expected = f"{owner}({name}={repr_short(value)}): expected a number {least}{hint}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(expected)
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        raise ValueError(expected)
    if value > _MAX:
        raise ValueError(f"{expected}, and at most {_MAX:,.0f}")


def check_whole(owner: str, name: str, value: Any, *, least: int = 1, hint: str = "") -> None:
    """Raises for a value that is no whole number, or out of range."""
    expected = f"{owner}({name}={repr_short(value)}): expected a whole number of {least} or more{hint}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(expected)
    if value < least:
        raise ValueError(expected)
    if value > _MAX:
        raise ValueError(f"{expected}, and at most {_MAX:,.0f}")
