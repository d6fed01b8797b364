"""Process deaths of one run that is in memory: which of its steps may be started again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edda.core.model import NO_CRASHES, PROGRESS, ClaimedRun, EntryKind, RunWrite, last_progress
from edda.engine.run.outcome_policy import Failure, OutcomePolicy
from edda.engine.settings import Settings
from edda.errors import ProcessDiedError
from edda.workflow.execution import STOPS, Command


class CrashGuard:
    """Refuses steps that were in flight each time a process died, and counts those deaths as attempts of steps whose
    retry policy says so.

    The deaths are void when all steps have ended that were in flight at the first of them (`_held`). Steps of other
    branches of the run end beside a step that kills its process, in every life: they make nothing void."""

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
        """Tell it, after the replay, which steps earlier processes may have begun. Whether the deaths are void: an
        owner that died could not clear them any more."""
        if self._held is not None:
            return False
        claimed, since = self._claimed, self.crashes.seq or 0
        retried = {entry.step for entry in claimed.entries if entry.kind is EntryKind.RETRY and entry.seq > since}
        self._held = {one.id: one for one in begun if one.after_entry <= since and one.id not in retried}
        if self._held or last_progress(claimed.entries) <= since:
            return False
        self.crashes = NO_CRASHES
        return True

    def note(self, bundle: RunWrite, pending: Mapping[str, Command]) -> bool:
        """Whether what was committed makes the deaths void."""
        progress = [entry for entry in bundle.entries if entry.kind in PROGRESS]
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

    def refused(self, commands: Iterable[Command], judge: OutcomePolicy) -> ProcessDiedError | None:
        """Why none of these steps, which earlier processes may have begun, is started."""
        if self._failed is not None or not self._settings.is_deadly(self.crashes):
            return None
        held = [command for command in commands if self._is_held(command)]
        if not held or any(judge.counts_crashes(command.call) for command in held):
            return None
        steps = ", ".join(command.id for command in held)
        return self.error(f"{steps} (such a step kills its process, or the workflow's own code right behind it)")

    def count(self, command: Command, judge: OutcomePolicy) -> Failure | None:
        """Count the deaths as attempts; the failure if there is none left."""
        alone = self.crashes.alone
        if not alone or command.id in self._counted or not judge.counts_crashes(command.call):
            return None
        if self._failed is not None or not self._is_held(command):
            return None
        self._counted.add(command.id)
        command.attempt += alone
        died = f"the process died {alone} times while it ran {command.id} and nothing else"
        failure = judge.reject_crashed(command, command.call, ProcessDiedError(died))
        if failure is not None:
            self._failed = command.id
        return failure

    def _is_held(self, command: Command) -> bool:
        return self._held is not None and self._held.get(command.id) is command
