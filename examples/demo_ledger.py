"""The ledger: a file that is independent of Edda, with one line for each execution of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

LEDGER = "EDDA_DEMO_LEDGER"
PROCESS = "EDDA_DEMO_PROCESS"


@dataclass(frozen=True)
class Line:
    step: str
    process: int
    key: str


def note(step: str, key: str) -> None:
    """Append one line in one write call: O_APPEND keeps concurrent lines whole, and a later crash loses nothing."""
    line = Line(step, int(os.environ[PROCESS]), key)
    descriptor = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{json.dumps(asdict(line))}\n".encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Line]:
    return [Line(**json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Kill:
    """A process that was killed, and the steps that the database held after its death."""

    process: int
    recorded: frozenset[str]

    def repeated(self, lines: Iterable[Line]) -> set[str]:
        """Steps that ran again although they were recorded: there must be none."""
        return {line.step for line in lines if line.process > self.process and line.step in self.recorded}

    def in_flight(self, lines: Iterable[Line]) -> set[str]:
        """Steps that had begun and were not recorded: their progress is unknown, so they run again."""
        return {line.step for line in lines if line.process == self.process and line.step not in self.recorded}


@dataclass(frozen=True)
class Audit:
    """Compares the ledger with the history."""

    lines: list[Line]
    kills: list[Kill]
    recorded: list[str]
    """The steps of the history, in its order."""

    def runs(self, step: str) -> list[Line]:
        return [line for line in self.lines if line.step == step]

    def killed_in(self, step: str) -> list[int]:
        return [kill.process for kill in self.kills if step in kill.in_flight(self.lines)]

    @property
    def in_flight(self) -> int:
        return sum(len(kill.in_flight(self.lines)) for kill in self.kills)

    def faults(self) -> list[str]:
        """Every violation of the guarantee; empty if there is none."""
        repeated = {step for kill in self.kills for step in kill.repeated(self.lines)}
        found = [f"{step} ran again after it was recorded" for step in sorted(repeated)]
        found += [f"{step} is recorded twice" for step in set(self.recorded) if self.recorded.count(step) > 1]
        for step in sorted({*self.recorded, *(line.step for line in self.lines)}):
            found += self._faults_of(step)
        return found

    def _faults_of(self, step: str) -> list[str]:
        runs, allowed = self.runs(step), 1 + len(self.killed_in(step))
        found = []
        if len(runs) != allowed:
            found.append(f"{step} ran {len(runs)} times, expected {allowed}")
        if step not in self.recorded:
            found.append(f"{step} ran and is not recorded")
        if len({line.key for line in runs}) > 1:
            found.append(f"{step} had another idempotency key the second time")
        return found
