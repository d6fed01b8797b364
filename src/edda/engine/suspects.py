"""When a worker runs suspects, which are runs whose process died twice or more without progress.

A run that kills its process cannot be told from those that only shared the process with it. So suspects get turns, in
which the worker claims nothing else: those that died twice in groups, then each alone. A death in a group is shared by
few, and a death alone is the run's own. A turn ends when its runs record the end of a step or leave memory, or when its
window is over: then other runs are let in, and a later death does not count as one alone.

A worker holds other runs back only while it knows that a suspect waits in the database: it waits at most `LONGEST_WAIT`
seconds for its other runs to leave memory, then runs suspects beside those that stay. Runs that were held back get as
much time as the wait and the turn took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from edda.core.model import ClaimedRun, RunId

from .settings import Settings

GROUP = 32
"""About the square root of the capacity: n suspects take about n / 32 turns in groups, and one group's 32 alone."""
LONGEST_WAIT = 5.0
"""Seconds for which a worker claims nothing so that its other runs leave memory. Those with long steps do not."""
_SHORTEST = 1.0


class SuspectTurns:
    def __init__(self, settings: Settings) -> None:
        self.are_due = True
        """Suspects may wait in the database: a new worker looks, and then each sweep."""
        self.is_marked = False
        """The database may take a run of this worker to be alone."""
        self.others_wait = False
        """The next turn comes after runs that are no suspects."""
        self._settings = settings
        self._held: set[RunId] = set()
        self._began = 0.0
        self._ends = 0.0
        self._others_until = 0.0
        self._waits_until: float | None = None

    @property
    def is_open(self) -> bool:
        return bool(self._held)

    @property
    def is_waiting(self) -> bool:
        """For the other runs of this worker to leave memory."""
        return self._waits_until is not None

    @property
    def is_holding(self) -> bool:
        """Nothing else is to be claimed or started here."""
        return self.is_open or self.is_waiting

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def is_time_of_others(self) -> bool:
        return time.monotonic() < self._others_until

    def open(self, runs: Sequence[ClaimedRun], *, in_company: bool) -> None:
        """`in_company`: runs that are no suspects are in memory. A death is then nobody's own, and a longer window
        would only keep others out."""
        now = time.monotonic()
        self._held = {run.run_id for run in runs}
        deaths = max(run.crashes.deaths for run in runs)
        self._ends = now + (self._settings.suspect_window if in_company else self._settings.isolation(deaths))
        if self._waits_until is None:
            self._began = now
        self._waits_until = None
        self.is_marked = True

    def leave(self, run_id: RunId) -> bool:
        """A run ended a step, or left memory. Whether that ends the turn."""
        if run_id not in self._held:
            return False
        self._held.discard(run_id)
        if not self._held:
            self.close()
        return not self._held

    def close(self) -> None:
        self._held = set()
        self.others_wait = True

    def give_way(self) -> None:
        """To other runs, for as long as the last turn took, with the wait before it."""
        now = time.monotonic()
        self.others_wait = False
        self._waits_until = None
        self._others_until = now + max(now - self._began if self._began else 0.0, _SHORTEST)

    def wait(self) -> float:
        """Seconds for which to wait until nothing else is in memory; 0 when that took too long."""
        now = time.monotonic()
        if self._waits_until is None:
            self._began = now
            self._waits_until = now + min(LONGEST_WAIT, self._settings.suspect_window)
        return max(0.0, self._waits_until - now)

    def found_none(self) -> None:
        self.are_due = False
        self._waits_until = None
