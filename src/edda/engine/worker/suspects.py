"""When a worker runs suspects, which are runs whose process died twice or more without progress.

A run that kills its process cannot be told from those that only shared the process with it. So suspects get turns, in
which the worker claims nothing else. The storage divides those that died together into groups (`suspect_groups`), and a
group that dies is divided again, until a run is alone: its next deaths are its own. A turn ends when the deaths of its
runs are void or they left memory, or when its window is over, and the next turn follows at once. Runs of earlier turns
that go on beside it get a death at most, which makes no suspect of them; the next process runs suspects first. After
the turn of a run that died alone again and again, those that are left are run together.

A worker holds other runs back only while it knows that a suspect waits in the database: it waits at most `LONGEST_WAIT`
seconds for its other runs to leave memory, then runs suspects beside those that stay. Once turns and waits have held
other runs back for `suspect_window`, these get as much time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from edda.core.model import ClaimedRun, RunId
from edda.engine.settings import DEATHS_ALONE, Settings

LONGEST_WAIT = 5.0
"""Seconds for which a worker claims nothing so that its other runs leave memory. Those with long steps do not."""
_SHORTEST = 1.0


class SuspectTurns:
    def __init__(self, settings: Settings) -> None:
        self.are_due = True
        """Suspects may wait in the database: a new worker looks, and then each sweep."""
        self.has_found_killer = False
        """A run that died alone again and again was parked here, or has ended its step: the suspects that are left
        have most probably only shared its process, and are run together."""
        self.is_marked = False
        """The database may take a run of this worker to be alone."""
        self._settings = settings
        self._held: set[RunId] = set()
        self._killer: RunId | None = None
        self._beside: set[RunId] = set()
        """In memory when the last turn began: suspects, and runs that did not leave in time. No turn waits for them."""
        self._began: float | None = None
        """Since when other runs are held back."""
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
        return self._began is not None

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def has_held_long(self) -> bool:
        """Other runs come before the next turn."""
        return self._began is not None and time.monotonic() - self._began >= self._settings.suspect_window

    @property
    def is_time_of_others(self) -> bool:
        return time.monotonic() < self._others_until

    def must_wait_for(self, live: Collection[RunId]) -> bool:
        """Whether some of these runs, which are in memory, may still leave it before the next turn."""
        return not self._beside.issuperset(live)

    def open(self, runs: Sequence[ClaimedRun], live: Collection[RunId]) -> None:
        """`live`: all runs in memory. In company a death is nobody's own, and a longer window would only keep others
        out."""
        now = time.monotonic()
        self._held = {run.run_id for run in runs}
        self._killer = next((run.run_id for run in runs if run.crashes.alone >= DEATHS_ALONE), None)
        self._beside = {*live, *self._held}
        in_company = len(self._beside) > len(self._held)
        deaths = max(run.crashes.deaths for run in runs)
        self._ends = now + (self._settings.suspect_window if in_company else self._settings.isolation(deaths))
        if self._began is None:
            self._began = now
        self._waits_until = None
        self.is_marked = True

    def leave(self, run_id: RunId) -> bool:
        """The deaths of a run are void, or it left memory. Whether that ends the turn."""
        if run_id not in self._held:
            return False
        self._held.discard(run_id)
        self.has_found_killer = self.has_found_killer or run_id == self._killer
        return not self._held

    def close(self) -> None:
        self._held = set()

    def give_way(self) -> None:
        """To other runs, for as long as they were held back."""
        now = time.monotonic()
        self._others_until = now + max(now - self._began if self._began is not None else 0.0, _SHORTEST)
        self._began = self._waits_until = None

    def wait(self) -> float:
        """Seconds for which to wait until nothing else is in memory; 0 when that took too long."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if self._waits_until is None:
            self._waits_until = now + min(LONGEST_WAIT, self._settings.suspect_window)
        return max(0.0, self._waits_until - now)

    def found_none(self) -> None:
        self.are_due = self.has_found_killer = False
        self._began = self._waits_until = None
