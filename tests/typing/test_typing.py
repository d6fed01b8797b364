"""A type checker finds a user's wrong calls, and knows every result's type."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("shop.py.txt")
"""Not a .py file: the project's own type check would stumble over its errors."""

SAID = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): (?P<kind>error|note): (?P<text>.*?)(?:  \[(?P<code>[\w-]+)\])?$")
REVEALED = re.compile(r'Revealed type is "(.*)"')
MODULES = re.compile(r"\b[\w.]+\.(?=\w)")
Finding = tuple[int, str]


def expected(mark: str) -> Iterator[Finding]:
    for number, line in enumerate(PROGRAM.read_text().splitlines(), start=1):
        if found := re.search(rf"  # {mark}: (.*)$", line):
            yield number, found[1]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[re.Match[str]]:
    folder = tmp_path_factory.mktemp("user")
    program = folder / "shop.py"
    program.write_text(PROGRAM.read_text())
    options = ["--strict", "--no-error-summary", "--config-file=", f"--cache-dir={folder / 'cache'}"]
    # In a process of its own: what mypy leaves in memory would slow down every later garbage collection.
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(program)], capture_output=True, text=True, check=False
    )
    assert checked.stderr == ""
    found = [SAID.match(line) for line in checked.stdout.splitlines()]
    return [match for match in found if match is not None and Path(match["file"]).name == program.name]


def test_wrong_calls_are_errors_and_right_ones_are_none(findings: list[re.Match[str]]) -> None:
    errors = sorted({(int(match["line"]), match["code"] or "") for match in findings if match["kind"] == "error"})
    assert errors == sorted(expected("E"))


def test_results_have_the_types_that_were_declared(findings: list[re.Match[str]]) -> None:
    notes = [(int(match["line"]), REVEALED.search(match["text"])) for match in findings]
    revealed = {(line, MODULES.sub("", found[1])) for line, found in notes if found is not None}
    assert sorted(revealed) == sorted(expected("R"))


def test_the_package_says_that_it_is_typed() -> None:
    package = Path(sys.modules["edda"].__file__ or "").parent
    assert (package / "py.typed").exists()
