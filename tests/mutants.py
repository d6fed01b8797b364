"""Checks that tests can fail: applies each mutant of `mutants.toml` to a copy of the tree, and runs the tests it names.

`python -m tests.mutants [NAME…]` runs the mutants whose names begin with these, or all; `NAME=` stands for one alone. A
mutant replaces one text of one source file and so takes one rule away; it is caught if a test fails. The exit code is 1
if a mutant survives, or if its old text does not occur exactly once: the source has changed, and so must the table.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
DATABASES = "memory,sqlite,postgres"
TIMEOUT = 60
"""Seconds for one test; many mutants make a test wait for something that never comes."""
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "out", ".venvs")
TESTS_FAILED = 1
"""pytest's exit code. The others mean that it could not collect the tests, or found none."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    name: str
    file: str
    """Below src/edda."""
    old: str
    new: str
    tests: Sequence[str]
    """Below tests/, those that are most likely to fail first."""
    databases: str = DATABASES
    tier: str = "test"


@dataclass(frozen=True)
class Verdict:
    is_caught: bool
    text: str


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.mutants", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    chosen = parser.parse_args(arguments)
    mutants = list(choose(chosen.names))
    if chosen.list:
        sys.stdout.writelines(f"{mutant.name}\n" for mutant in mutants)
        return 0
    with tempfile.TemporaryDirectory(prefix="edda-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        survivors = [mutant for mutant in mutants if not report(mutant, judge(mutant, tree))]
    sys.stdout.write(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants were caught\n")
    return 1 if survivors else 0


def read_table() -> Iterator[Mutant]:
    for name, row in tomllib.loads(TABLE.read_text()).items():
        yield Mutant(name=name, **row)


def choose(names: Sequence[str]) -> Iterator[Mutant]:
    known = list(read_table())
    for name in names:
        if not any(fits(mutant, name) for mutant in known):
            sys.exit(f"no mutant has a name that begins with {name!r}")
    return (mutant for mutant in known if not names or any(fits(mutant, name) for name in names))


def fits(mutant: Mutant, name: str) -> bool:
    return f"{mutant.name}=".startswith(name)


def judge(mutant: Mutant, tree: Path) -> Verdict:
    file = tree / "src" / "edda" / mutant.file
    source = file.read_text() if file.exists() else ""
    if source.count(mutant.old) != 1:
        return Verdict(False, f"the old text occurs {source.count(mutant.old)} times in {mutant.file}")
    file.write_text(source.replace(mutant.old, mutant.new))
    try:
        return run_tests(mutant, tree)
    finally:
        file.write_text(source)


def run_tests(mutant: Mutant, tree: Path) -> Verdict:
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", f"--timeout={TIMEOUT}"]
    command = [sys.executable, "-m", "pytest", *options, "--tier", mutant.tier, "--databases", mutant.databases]
    tests = [f"tests/{test}" for test in mutant.tests]
    ended = subprocess.run([*command, *tests], cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode == TESTS_FAILED and (failed := FAILURE.search(ended.stdout)):
        return Verdict(True, failed[1])
    last = ended.stdout.strip().rpartition("\n")[2]
    return Verdict(False, f"no test failed, pytest ended with {ended.returncode}: {last}")


def report(mutant: Mutant, verdict: Verdict) -> bool:
    sys.stdout.write(f"{'caught  ' if verdict.is_caught else 'SURVIVED'}  {mutant.name}: {verdict.text}\n")
    sys.stdout.flush()
    return verdict.is_caught


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
