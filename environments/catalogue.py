"""Which environments there are: every module of this package with a function `run`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

Run = Callable[[], dict[str, object]]


class Environment(NamedTuple):
    name: str
    run: Run
    is_quick: bool


def catalogue() -> dict[str, Environment]:
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if not file.stem.startswith("__") and file.stem != "catalogue":
            module = import_module(f"{__package__}.{file.stem}")
            if (run := getattr(module, "run", None)) is not None:
                found[file.stem] = Environment(file.stem, run, getattr(module, "QUICK", False))
    return found
