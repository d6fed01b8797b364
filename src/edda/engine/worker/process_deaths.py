"""Process deaths: which steps of such a run may be started again, and when a worker runs suspects, which are runs whose
process died twice or more without progress.

After a death it is unknown which of the process's runs killed it. So suspects get turns, in which the worker claims no
other run. The storage divides the runs of a dead worker into groups (`suspect_groups`), and divides a group again when
its process dies, until a run is alone: further deaths are its own. A turn ends when the deaths of its runs are void or
they left memory, or when its window is over, and the next turn follows at once. Runs of earlier turns that stay in
memory get one death at most, which does not make them suspects; the next process runs suspects first. After the turn of
a run that died alone again and again, the remaining suspects are run together.

A worker holds other runs back only while it knows that the database has a suspect: it waits at most `MAX_WAIT` seconds
for its other runs to leave memory, then runs suspects beside those that stay. Once turns and waits have held other runs
back for `suspect_window`, these get as much time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from edda.core.model import NO_CRASHES, PROGRESS, ClaimedRun, EntryKind, RunId, RunWrite, last_progress
from edda.engine.run.outcomes import Failure, OutcomePolicy
from edda.engine.settings import DEATHS_ALONE, Settings
from edda.errors import ProcessDiedError
from edda.workflow.execution import STOPS, Command

MAX_WAIT = 5.0
"""Seconds for which a worker claims nothing so that its other runs leave memory. Those with long steps do not."""
_MIN_TIME_OF_OTHERS = 1.0


class CrashGuard:
    """Of one run in memory: refuses steps that were in flight each time a process died, and counts those deaths as
    attempts of steps whose retry policy counts crashes.

    The deaths are void when all steps have ended that were in flight at the first of them (`_held`). Steps of other
    branches do not count: they end beside a step that kills its process, in every process."""

    def __init__(self, claimed: ClaimedRun, settings: Settings) -> None:
        self.crashes = claimed.crashes
        self._claimed = claimed
        self._settings = settings
        self._counted: set[str] = set()
        self._held: dict[str, Command] | None = None
        """By id; None before the replay has shown them."""
        self._failed: str | None = None
        """The step that failed for these deaths."""

    def __bool__(self) -> bool:
        return self.crashes.deaths > 0

    def see(self, begun: Iterable[Command]) -> bool:
        """Called once after the replay, with the steps that earlier processes may have started. Whether the deaths are
        void: an owner that died could not clear them any more."""
        if self._held is not None:
            return False
        claimed, since = self._claimed, self.crashes.seq or 0
        retried = {entry.step for entry in claimed.entries if entry.kind is EntryKind.RETRY and entry.seq > since}
        self._held = {one.id: one for one in begun if one.after_entry <= since and one.id not in retried}
        if self._held or last_progress(claimed.entries) <= since:
            return False
        self.crashes = NO_CRASHES
        return True

    def note(self, write: RunWrite, pending: Mapping[str, Command]) -> bool:
        """Whether these committed entries make the deaths void."""
        progress = [entry for entry in write.entries if entry.kind in PROGRESS]
        if not progress or (self._held is None and not any(entry.kind in STOPS for entry in progress)):
            return False
        ended = {entry.step for entry in progress}
        held = self._held or {}
        self._held = {id: one for id, one in held.items() if id not in ended and pending.get(id) is one}
        is_void = not self._held or self._failed in ended or any(entry.kind in STOPS for entry in progress)
        if is_void:
            self.crashes = NO_CRASHES
        return is_void

    def error(self, in_flight: str) -> ProcessDiedError:
        deaths, alone = self.crashes.deaths, self.crashes.alone
        return ProcessDiedError(
            f"{deaths} processes died while they ran this run, {alone} of them without any other run. In flight each "
            f"time: {in_flight}. It is not started again until the run is resumed: mend the code, or raise the memory "
            f"limit, then `edda runs resume {self._claimed.run_id}`"
        )

    def refused(self, commands: Iterable[Command], policy: OutcomePolicy) -> ProcessDiedError | None:
        """Why none of these steps, which earlier processes may have started, is started."""
        if self._failed is not None or not self._settings.is_deadly(self.crashes):
            return None
        held = [command for command in commands if self._is_held(command)]
        if not held or any(policy.counts_crashes(command) for command in held):
            return None
        steps = ", ".join(command.id for command in held)
        return self.error(f"{steps} (such a step kills its process, or the workflow's own code right behind it)")

    def count(self, command: Command, policy: OutcomePolicy) -> Failure | None:
        """Count the deaths as attempts; the failure if there is none left."""
        alone = self.crashes.alone
        if not alone or command.id in self._counted or not policy.counts_crashes(command):
            return None
        if self._failed is not None or not self._is_held(command):
            return None
        self._counted.add(command.id)
        command.attempt += alone
        died = f"the process died {alone} times while it ran {command.id} and nothing else"
        failure = policy.reject_crashed(command, ProcessDiedError(died))
        if failure is not None:
            self._failed = command.id
        return failure

    def _is_held(self, command: Command) -> bool:
        return self._held is not None and self._held.get(command.id) is command


class SuspectTurns:
    def __init__(self, settings: Settings) -> None:
        self.are_due = True
        """The database may have suspects: a new worker asks, and then each sweep."""
        self.has_found_killer = False
        """A run that died alone again and again was parked here, or has ended its step: the other suspects have most
        probably only shared its process, and are run together."""
        self.is_marked = False
        """The database may count a run of this worker as alone in its process."""
        self.holding_since: float | None = None
        """Since when no other run is claimed or started here."""
        self._settings = settings
        self._held: set[RunId] = set()
        self._killer: RunId | None = None
        self._beside: set[RunId] = set()
        """In memory when the last turn began: suspects, and runs that did not leave in time. No turn waits for them."""
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
    def left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def has_held_long(self) -> bool:
        """Other runs come before the next turn."""
        return self.holding_since is not None and time.monotonic() - self.holding_since >= self._settings.suspect_window

    @property
    def is_time_of_others(self) -> bool:
        return time.monotonic() < self._others_until

    def must_wait_for(self, live: Collection[RunId]) -> bool:
        """Whether some of these runs, which are in memory, may still leave it before the next turn."""
        return not self._beside.issuperset(live)

    def open(self, runs: Sequence[ClaimedRun], live: Collection[RunId]) -> None:
        """`live`: all runs in memory. Beside other runs a death proves nothing, and a longer window would only hold
        those back."""
        now = time.monotonic()
        self._held = {run.run_id for run in runs}
        self._killer = next((run.run_id for run in runs if run.crashes.alone >= DEATHS_ALONE), None)
        self._beside = {*live, *self._held}
        in_company = len(self._beside) > len(self._held)
        deaths = max(run.crashes.deaths for run in runs)
        self._ends = now + (self._settings.suspect_window if in_company else self._settings.isolation(deaths))
        if self.holding_since is None:
            self.holding_since = now
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
        held_for = 0.0 if self.holding_since is None else now - self.holding_since
        self._others_until = now + max(held_for, _MIN_TIME_OF_OTHERS)
        self.holding_since = self._waits_until = None

    def wait(self) -> float:
        """Seconds for which to wait until nothing else is in memory; 0 when that took too long."""
        now = time.monotonic()
        if self.holding_since is None:
            self.holding_since = now
        if self._waits_until is None:
            self._waits_until = now + min(MAX_WAIT, self._settings.suspect_window)
        return max(0.0, self._waits_until - now)

    def found_none(self) -> None:
        self.are_due = self.has_found_killer = False
        self.holding_since = self._waits_until = None
