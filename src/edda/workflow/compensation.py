"""Undoing what a run did, when it fails or is cancelled: the last thing first, each once.

What there is to undo is not recorded: it follows from the history, so each replay finds the same. Undoing itself is
made of ordinary steps.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from edda.core.model import Entry, EntryKind
from edda.core.value_path import truncate
from edda.errors import CompensationError, ParkedError, RetryExhaustedError

if TYPE_CHECKING:
    from .execution import Command, Execution


UNDO_PREFIX = "undo:"
"""Of the ids of the steps that undo others."""


class CompensationStep(NamedTuple):
    name: str
    run: Callable[[str], Coroutine[Any, Any, Any]]
    """Under the id it is given."""


class Compensator:
    def __init__(self) -> None:
        self._undos: list[CompensationStep] = []
        self._begun = 0
        self._owed: dict[str, Command] = {}
        """Nobody awaits them any more, but what they do, or did before a crash, has to be known."""
        self._is_needed = False
        self.begun_at: int | None = None
        """How long the history was when undoing began."""
        self.quiesce_step: str | None = None
        """The step that waits until nothing of the run is under way any more."""

    @property
    def has_begun(self) -> bool:
        return self.begun_at is not None

    @property
    def is_needed(self) -> bool:
        """Whether there may be anything to undo."""
        return self._is_needed

    def add(self, undo: CompensationStep) -> None:
        self._is_needed = True
        self._undos.append(undo)

    def track(self, command: Command) -> None:
        if command.undo is not None:
            self._is_needed = True

    def abandon(self, command: Command) -> None:
        if command.undo is not None:
            self._owed[command.id] = command

    def awaits_outcome(self, command: Command) -> bool:
        """Whether its outcome is still missing."""
        return self._owed.get(command.id) is command

    def on_outcome(self, command: Command, entry: Entry) -> None:
        """A step has its outcome."""
        if command.undo is None:
            return
        self._owed.pop(command.id, None)
        if entry.ok:
            self.add(command.undo.prepare(command.decode(entry)))
        elif command.is_uncertain:
            self._owed[command.id] = command

    def on_late_outcome(self, entry: Entry) -> None:
        """What became of a body that nobody waited for any more."""
        command = self._owed.pop(entry.step, None)
        if command is not None and entry.ok:
            self.add(command.undo.prepare(command.decode(entry)))

    async def run(self, execution: Execution, failure: BaseException) -> None:
        """Raises `CompensationError` if some of it failed for good."""
        self.begun_at = execution.length
        await self._settle_all(execution)
        failures: list[str] = []
        while self._undos:
            undo = self._undos.pop()
            self._begun += 1
            id = f"{UNDO_PREFIX}{self._begun}/{undo.name}"
            try:
                await undo.run(id)
            except ParkedError:
                raise
            except Exception as error:
                failures.append(f"{id} failed for good with {_explain(error)}")
        if failures:
            raise _failed(failures) from failure

    async def _settle_all(self, execution: Execution) -> None:
        """Until every outcome is known. Only what was lost in a crash takes another round."""
        for number in count(1):
            self.quiesce_step = f"settled:{number}"
            await execution.call(EntryKind.SETTLED, "settled", id=self.quiesce_step)
            self.quiesce_step = None
            if not self._owed:
                return
            for command in tuple(self._owed.values()):
                await _resolve_lost_step(execution, command)


async def _resolve_lost_step(execution: Execution, command: Command) -> None:
    """Its outcome was lost in a crash, so it is asked for or tried once more: else it could not be undone."""
    try:
        await execution.reissue(command)
    except ParkedError:
        raise
    except Exception:
        return  # it did not happen


def _explain(error: Exception) -> str:
    reason = error.__cause__ or error if isinstance(error, RetryExhaustedError) else error
    return truncate(f"{type(reason).__name__}: {reason}", 500)


def _failed(failures: list[str]) -> CompensationError:
    error = CompensationError(f"what was done is not all undone: {'; '.join(failures)}")
    for failure in failures:
        error.add_note(failure)
    return error
