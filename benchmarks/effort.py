"""How long to measure, and how much at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    seconds: float = 7.0
    recovery_cap: float = 120.0
    replay_cap: float = 30.0
    """No longer history is tried once writing one took this long."""
    replay_limit: int = 10_000
    waits: int = 1_000
    wakes: int = 40
    wake_cap: float = 120.0
    crowd_limit: int = 100_000
    idle_seconds: float = 20.0
    timer_limit: int = 2_000
    lone_timers: int = 10
    message_limit: int = 10_000


QUICK = Effort(
    seconds=2.0,
    recovery_cap=40.0,
    replay_cap=5.0,
    replay_limit=1_000,
    waits=300,
    wakes=20,
    wake_cap=40.0,
    crowd_limit=2_000,
    idle_seconds=5.0,
    timer_limit=500,
    lone_timers=3,
    message_limit=2_000,
)
