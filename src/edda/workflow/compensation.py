"""Runs the compensations of a run that fails or is cancelled, in reverse order of the completed steps.

The list of compensations is not stored: every replay builds it again from the outcomes in the history. A compensation
is an ordinary step with an id `undo:<number>/<name>`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from edda.core.model import Entry, EntryKind
from edda.core.value_path import truncate
from edda.errors import CompensationError, ParkedError, RetryExhaustedError

if TYPE_CHECKING:
    from .execution import Command, Execution


UNDO_PREFIX = "undo:"
"""Of the ids of compensation steps."""


class CompensationStep(NamedTuple):
    name: str
    run: Callable[[str], Coroutine[Any, Any, Any]]
    """Calls the compensation as a step with the given id."""


class Compensator(Struct, eq=False):
    """Collects compensations while steps succeed; `run` calls them after the workflow's function has failed.

    A step with a compensation that was cancelled, or that failed by a time-out, may have taken effect. Its outcome is
    unresolved: before the first compensation `run` waits for its attempt, or reissues the step after a crash.
    """

    is_needed: bool = False
    """Whether a compensation is registered, or a step with one was issued."""
    begun_at: int | None = None
    """The length of the history when compensation began."""
    quiesce_step: str | None = None
    """The pending step that the engine completes when no attempt or child of the run is active."""
    _undos: list[CompensationStep] = []
    _unresolved: dict[str, Any] = {}
    """The commands, by their id."""

    @property
    def has_begun(self) -> bool:
        return self.begun_at is not None

    def add(self, undo: CompensationStep) -> None:
        self.is_needed = True
        self._undos.append(undo)

    def abandon(self, command: Command) -> None:
        """A pending step with a compensation was cancelled."""
        self._unresolved[command.id] = command

    def awaits_outcome(self, command: Command) -> bool:
        return self._unresolved.get(command.id) is command

    def on_outcome(self, command: Command, entry: Entry) -> None:
        """The outcome of a pending step with a compensation was recorded."""
        self._unresolved.pop(command.id, None)
        if entry.ok:
            self.add(command.undo.prepare(command.decode(entry)))
        elif command.is_uncertain:
            self._unresolved[command.id] = command

    def on_late_outcome(self, entry: Entry) -> None:
        """The outcome of a cancelled step was recorded."""
        command = self._unresolved.pop(entry.step, None)
        if command is not None and entry.ok:
            self.add(command.undo.prepare(command.decode(entry)))

    async def run(self, execution: Execution, failure: BaseException) -> None:
        """Call all compensations; raises `CompensationError` if one of them failed on its last attempt."""
        self.begun_at = execution.length
        await self._resolve_outcomes(execution)
        failures, number = list[str](), 0
        while self._undos:
            undo, number = self._undos.pop(), number + 1
            id = f"{UNDO_PREFIX}{number}/{undo.name}"
            try:
                await undo.run(id)
            except ParkedError:
                raise
            except Exception as error:
                reason = error.__cause__ or error if isinstance(error, RetryExhaustedError) else error
                text = truncate(f"{type(reason).__name__}: {reason}", 500)
                failures.append(f"{id} failed for good with {text}")
        if failures:
            incomplete = CompensationError(f"not all effects were compensated: {'; '.join(failures)}")
            for text in failures:
                incomplete.add_note(text)
            raise incomplete from failure

    async def _resolve_outcomes(self, execution: Execution) -> None:
        """Wait until no attempt is active, then reissue steps whose attempt was lost in a crash, until none is left."""
        for number in count(1):
            self.quiesce_step = f"settled:{number}"
            await execution.call(EntryKind.SETTLED, "settled", id=self.quiesce_step)
            self.quiesce_step = None
            if not self._unresolved:
                return
            for command in tuple(self._unresolved.values()):
                try:
                    await execution.reissue(command)
                except ParkedError:
                    raise
                except Exception:  # noqa: S110 - it took no effect, so there is nothing to compensate
                    pass
