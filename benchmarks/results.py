"""Medians over rounds, and the file that keeps every figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from .figures import Figures, Sample
from .machine import Machine

Kind = TypeVar("Kind", bound=Figures)


@dataclass(frozen=True)
class Results:
    machine: Machine
    samples: Sequence[Sample]

    def of(self, scenario: str, system: str, database: str) -> list[Sample]:
        wanted = (scenario, system, database)
        return [each for each in self.samples if (each.scenario, each.system, each.database) == wanted]

    def figures(self, kind: type[Kind], scenario: str, system: str, database: str) -> list[Kind]:
        found = (sample.figures for sample in self.of(scenario, system, database))
        return [figures for figures in found if isinstance(figures, kind)]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def median(figures: Iterable[Kind], value: Callable[[Kind], float | None]) -> float | None:
    known = [number for each in figures if (number := value(each)) is not None]
    return statistics.median(known) if known else None
