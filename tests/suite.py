"""Runs a tier of the suite (`tests/tiers.py`) in two parts: side by side, then tests of time, two files at a time.

`python -m tests.suite [--tier NAME] [pytest's options]`. A test that fails is never run again: one that fails only
beside others is mended, or gets the mark `timed` if it measures time or needs most of the machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from tests import databases
from tests.tiers import SERVERS, TIERS

TIMED = "timed"
PARTS: tuple[tuple[str, list[str]], ...] = (
    (f"not {TIMED}", ["-n", "6", "--dist", "worksteal"]),
    (TIMED, ["-n", "2", "--dist", "loadfile"]),
)
SETTINGS = {"postgres": "EDDA_TEST_POSTGRES_URL", "mysql": "EDDA_TEST_MYSQL_URL"}


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.suite", allow_abbrev=False)
    parser.add_argument("--tier", choices=tuple(TIERS), default="test")
    parser.add_argument("--databases")
    chosen, options = parser.parse_known_args(arguments)
    prepare_process()
    kinds = chosen.databases.split(",") if chosen.databases else databases_of(chosen.tier)
    share_servers(kinds)
    codes = []
    for mark, workers in PARTS:
        if mark not in TIERS[chosen.tier].without:
            places = [] if any(option.startswith("tests") for option in options) else places_of(chosen.tier, mark)
            tier = ["--tier", chosen.tier, "--databases", ",".join(kinds)]
            codes.append(run("-m", mark, *workers, *tier, *options, *places))
    return max(codes)


def places_of(tier: str, mark: str) -> Sequence[str]:
    """The folders or files with such tests: every worker collects all that it is given, which takes seconds."""
    if mark != TIMED:
        return TIERS[tier].folders
    files = sorted(Path("tests").rglob("test_*.py"), reverse=True)  # the hammers, which take longest, before the engine
    return [str(file) for file in files if f"pytest.mark.{TIMED}" in file.read_text()]


def prepare_process() -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of some hundred processes compiles everything anew
    # A shell ignores it for a program in the background, and so would the processes that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def databases_of(tier: str) -> list[str]:
    """Those of the tier; of the servers `make test` takes the first that can be had, or none."""
    kinds = list(TIERS[tier].databases)
    if tier != "test":
        return kinds
    others = [kind for kind in kinds if kind not in SERVERS]
    found = next((kind for kind in SERVERS if find(kind) is not None), None)
    if found is None and os.environ.get("CI"):
        sys.exit("neither PostgreSQL nor MariaDB can be had")
    return others if found is None else [*others, found]


def find(kind: str) -> databases.Server | None:
    return databases.postgres() if kind == "postgres" else databases.mysql()


def share_servers(kinds: Sequence[str]) -> None:
    """All workers use the server that was found or started here, not one each."""
    for kind in SERVERS:
        if kind in kinds and SETTINGS[kind] not in os.environ and (server := find(kind)) is not None:
            os.environ[SETTINGS[kind]] = server.url
    os.environ.pop("EDDA_TEST_NO_LOCAL", None)  # it concerned the search, which is over


def run(*options: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
