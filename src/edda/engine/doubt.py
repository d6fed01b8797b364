"""What was asked of the database and not answered may still come into force, and what it answered may be lost again."""

from __future__ import annotations

import time

from edda.core.model import RunId


class ClaimRecheck:
    """When to look whether it did. Nobody knows how long a server that was cut off goes on with a statement, so that
    one look is not enough: it is looked at once, and then ever more rarely, for good.

    Without any sign of trouble it is looked at rarely, too: after a failover the database may say again that a run is
    ours which we had given up, and no connection need have told us of the failover."""

    def __init__(self, soonest: float, rarest: float) -> None:
        self._soonest = soonest
        self._rarest = rarest
        self._pause = soonest
        self._due = time.monotonic() + rarest

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def start(self) -> None:
        self._pause, self._due = self._soonest, 0.0

    def checked(self) -> None:
        self._due = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, self._rarest)


class Drops:
    """Runs that were dropped because another worker had written for them. They are freed for anybody to claim: at once
    the first time, then ever later. A record that no worker can write must not be tried in a tight loop."""

    LONGEST = 60.0

    def __init__(self) -> None:
        self._returns: dict[RunId, tuple[float, float]] = {}
        """Since when it may be freed, and how long it rests the next time."""

    def __contains__(self, run_id: RunId) -> bool:
        return run_id in self._returns

    def add(self, run_id: RunId) -> None:
        _, rest = self._returns.get(run_id, (0.0, 0.0))
        self._returns[run_id] = (time.monotonic() + rest, min(max(1.0, rest * 2), self.LONGEST))

    def may_return(self, run_id: RunId) -> bool:
        since, _ = self._returns.get(run_id, (0.0, 0.0))
        return time.monotonic() >= since

    def discard(self, run_id: RunId) -> None:
        self._returns.pop(run_id, None)
