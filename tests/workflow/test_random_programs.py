"""Random programs, crashed after every entry and dropped at every idle point, go as if nothing had happened.

Any number of them, on any Python: `python -m tests.workflow.test_random_programs --programs 5000 --seed 0`.
With `--record FILE` the histories are kept, with `--replay FILE` those of another Python are gone through.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edda.workflow import loop as workflow_loop
from edda.workflow.compensation import CompensationStep, Compensator
from edda.workflow.execution import Execution
from edda.workflow.loop import WorkflowLoop, WorkflowTask

from .programs import Account, Difference, Examiner, Stage, write_program

PROGRAMS = 300
BLOCK = 50
ENOUGH = 60
"""Programs within which the loss of any protective rule shows; most show within ten."""

Recorded = dict[int, Account]


@pytest.mark.parametrize("first", range(0, PROGRAMS, BLOCK))
def test_a_disturbed_run_goes_exactly_as_an_undisturbed_one(first: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # programs fail on purpose
    examiner = Examiner()
    for seed in range(first, first + BLOCK):
        difference = examiner.examine(seed)
        assert difference is None, str(difference)
    assert not workflow_loop._stuck


# The power of the test: without a rule of the loop, a difference is found


def hash_tasks_by_address(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkflowTask, "__hash__", object.__hash__)


def hash_gathers_by_address(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("asyncio.tasks._GatheringFuture.__hash__", object.__hash__)


def start_as_completed_in_any_order(patch: pytest.MonkeyPatch) -> None:
    original = inspect.getclosurevars(asyncio.as_completed).nonlocals["original"]
    patch.setattr(asyncio, "as_completed", original)


def replay_two_entries_per_idle(patch: pytest.MonkeyPatch) -> None:
    apply = Execution._apply

    def apply_with_the_next(self: Execution, entry: Any) -> None:
        apply(self, entry)
        rest = self._history[self.length :]
        if rest and rest[0].step in self.pending:
            apply(self, rest[0])

    patch.setattr(Execution, "_apply", apply_with_the_next)


def skip_the_number_of_a_short_cut(patch: pytest.MonkeyPatch) -> None:
    take = Execution._take_next_entry

    def take_without_number(self: Execution, command: Any) -> Any:
        taken = take(self, command)
        self.loop.last_number -= taken is not None
        return taken

    patch.setattr(Execution, "_take_next_entry", take_without_number)


def take_the_time_from_the_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkflowLoop, "time", lambda self: time.perf_counter())


def count_task_names_for_the_whole_process(patch: pytest.MonkeyPatch) -> None:
    create_task, numbers = WorkflowLoop.create_task, itertools.count()

    def create_named(self: WorkflowLoop, coro: Any, *, name: str | None = None, **options: Any) -> WorkflowTask:
        return create_task(self, coro, name=name or f"Task-{next(numbers)}", **options)

    patch.setattr(WorkflowLoop, "create_task", create_named)


def undo_the_first_first(patch: pytest.MonkeyPatch) -> None:
    def add(self: Compensator, undo: CompensationStep) -> None:
        self.is_needed = True
        self._undos.insert(0, undo)

    patch.setattr(Compensator, "add", add)


def forget_what_comes_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Compensator, "on_late_outcome", lambda self, entry: None)


def forget_unawaited_commands(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Compensator, "abandon", lambda self, command: None)


def take_short_cuts_without_a_way_back(patch: pytest.MonkeyPatch) -> None:
    take = Execution._take_next_entry

    def take_without_undo(self: Execution, command: Any) -> Any:
        undos = list(self.compensator._undos)
        taken = take(self, command)
        self.compensator._undos[:] = undos
        return taken

    patch.setattr(Execution, "_take_next_entry", take_without_undo)


def cancel_what_is_being_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Execution, "cancel", lambda self, message: self._root.cancel(message))


MUTATIONS = [
    hash_tasks_by_address,
    hash_gathers_by_address,
    start_as_completed_in_any_order,
    replay_two_entries_per_idle,
    skip_the_number_of_a_short_cut,
    take_the_time_from_the_clock,
    count_task_names_for_the_whole_process,
    undo_the_first_first,
    forget_what_comes_late,
    forget_unawaited_commands,
    take_short_cuts_without_a_way_back,
    cancel_what_is_being_undone,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_rule_taken_away_is_seen(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    mutate(monkeypatch)
    examiner = Examiner()
    assert any(examiner.examine(seed) for seed in range(ENOUGH))


# The command


class Command:
    def __init__(self, programs: int, seed: int) -> None:
        self.seeds = range(seed, seed + programs)
        self.examiner = Examiner()
        self.unraisable: list[str] = []
        self.began = time.monotonic()

    def watch(self) -> None:
        """Output that Python would only print counts as a difference."""
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("error")
        sys.unraisablehook = lambda unraisable: self.unraisable.append(repr(unraisable.exc_value))

    def examine(self) -> int:
        for seed in self.seeds:
            difference = self.examiner.examine(seed)
            if difference is not None:
                return self._close(difference)
            if (seed + 1) % 100 == 0:
                print(f"\r{self._progress()}", end="", file=sys.stderr, flush=True)
        return self._close(None)

    def record(self, path: Path) -> int:
        recorded: Recorded = {seed: Stage(write_program(seed)).play() for seed in self.seeds}
        path.write_bytes(msgspec.json.encode(recorded))
        print(f"recorded programs={len(recorded)} python={_python()}")
        return 0

    def replay(self, path: Path) -> int:
        recorded = msgspec.json.decode(path.read_bytes(), type=Recorded)
        found = {seed: self.examiner.replay(seed, account) for seed, account in recorded.items()}
        differing = [difference for difference in found.values() if difference is not None]
        for difference in differing:
            print(difference)
        print(f"replayed programs={len(recorded)} differences={len(differing)} python={_python()}")
        return 1 if differing else 0

    def _progress(self) -> str:
        tally = self.examiner.tally
        return f"{tally.programs}/{len(self.seeds)} programs, {time.monotonic() - self.began:.0f} s"

    def _close(self, difference: Difference | None) -> int:
        tally = self.examiner.tally
        faults = len(self.unraisable) + len(workflow_loop._stuck)
        print(
            f"\nprograms={tally.programs} entries={tally.entries} crashes={tally.crashes} drops={tally.drops} "
            f"differences={int(difference is not None)} faults={faults} seed={self.seeds.start} "
            f"python={_python()} seconds={time.monotonic() - self.began:.0f}"
        )
        for line in ([difference] if difference else []) + self.unraisable[:3]:
            print(line)
        return 1 if difference or faults else 0


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--replay", type=Path)
    options = parser.parse_args()
    command = Command(options.programs, options.seed)
    command.watch()
    if options.record:
        return command.record(options.record)
    return command.replay(options.replay) if options.replay else command.examine()


if __name__ == "__main__":
    sys.exit(main())
