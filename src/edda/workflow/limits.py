"""How long an attempt of an activity may take, and how many of its bodies may run at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

Seconds = float | timedelta


@dataclass(frozen=True)
class Limits:
    """Times in seconds; None: no limit."""

    timeout: float | None = None
    heartbeat_timeout: float | None = None
    max_concurrent: int | None = None


UNLIMITED = Limits()


def limits_of(
    name: str, timeout: Seconds | None, heartbeat_timeout: Seconds | None, max_concurrent: int | None
) -> Limits:
    """What `@activity` was given; `name` is for the errors."""
    if timeout is heartbeat_timeout is max_concurrent is None:
        return UNLIMITED
    return Limits(
        _seconds(name, "timeout", timeout),
        _seconds(name, "heartbeat_timeout", heartbeat_timeout),
        _count(name, max_concurrent),
    )


def _seconds(name: str, option: str, given: Seconds | None) -> float | None:
    if given is None:
        return None
    value = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"activity {name}: {option} must be seconds or a timedelta, more than 0, not {given!r}")
    return float(value)


def _count(name: str, given: int | None) -> int | None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ValueError(f"activity {name}: max_concurrent must be a whole number, at least 1, not {given!r}")
    return given
