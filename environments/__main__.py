"""`python -m environments [names]`, also `make environments`: sets each up, runs a workload, and prints a table."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from typing import NamedTuple

from tests.servers import Unavailable

from .catalogue import Environment, catalogue

COLUMNS = ("done", "runs", "events", "recovered", "log lines", "statements")
"""Figures that have a column of their own; what else a module returns stands below the table."""


def main() -> int:
    known = catalogue()
    parser = argparse.ArgumentParser("python -m environments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="only those that the test suite runs too")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in known]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    names = chosen.names or [name for name, one in known.items() if one.is_quick or not chosen.quick]
    tries = []
    for name in names:
        tries.append(_try(known[name]))
        print(" | ".join(tries[-1].row), file=sys.stderr, flush=True)
    print(_table([["environment", *COLUMNS, "seconds", "violations"], *(one.row for one in tries)]))
    for one in tries:
        for key, value in one.more.items():
            print(f"{one.row[0]}: {key}: {value}")
    return 0 if all(one.is_right for one in tries) else 1


class Try(NamedTuple):
    row: list[str]
    more: dict[str, object]
    is_right: bool


def _try(environment: Environment) -> Try:
    began = time.monotonic()
    figures: dict[str, object] = {}
    found, is_right = "0", True
    try:
        figures = environment.run()
    except Unavailable as error:
        figures, found, is_right = {"done": f"not available: {error}"}, "–", not os.environ.get("CI")
    except AssertionError as error:
        traceback.print_exc()
        found, is_right = (str(error).splitlines() or ["an assertion failed"])[0], False
    shown = [str(figures.get(column, "–")) for column in COLUMNS]
    more = {key: value for key, value in figures.items() if key not in COLUMNS}
    return Try([environment.name, *shown, f"{time.monotonic() - began:.0f}", found], more, is_right)


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
