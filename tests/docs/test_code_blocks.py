"""Whatever the documentation shows is run: a page whose code does not work is a failing test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .commands import commands, is_run, problem_with
from .pages import DOCS, ROOT, Block, blocks, name, pages

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITH_TESTS_OF_THEIR_OWN = frozenset(
    {
        *(path for path in EXAMPLES if path.name.startswith("demo")),  # test_demo.py
        ROOT / "examples" / "event_waiting_workflow.py",  # test_event_waiting_example.py
        *(ROOT / "examples" / f"{one}.py" for one in ("saga", "children", "recurring", "channels")),  # test_examples.py
        DOCS / "how-to" / "nats.md",  # test_nats_page.py
        DOCS / "tutorial" / "waiting-for-events.md",  # test_event_waiting_page.py
    }
)
"""Run there, because they need more than to be run."""

_CODE = re.compile(r"^(import|from|async|await|def|class|@)\b", re.MULTILINE)
"""A drawing may stand in a block without a language; Python may not."""


def run_in(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "EDDA_DB_URL"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def has_code(page: Path) -> bool:
    return any(block.language in {"python", "bash"} for block in blocks(page))


@pytest.mark.parametrize("page", sorted(set(filter(has_code, pages())) - WITH_TESTS_OF_THEIR_OWN), ids=name)
def test_the_code_on_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    done = run_in(tmp_path, "-m", "tests.docs.run_page", page)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", sorted(set(EXAMPLES) - WITH_TESTS_OF_THEIR_OWN), ids=name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    done = run_in(tmp_path, example)
    assert done.returncode == 0, done.stderr


def test_every_command_on_the_pages_exists() -> None:
    problems = []
    for page in pages():
        for block in blocks(page):
            problems += [f"{name(page)}:{block.line}: {problem}" for problem in problems_in(block)]
    assert not problems, "\n".join(problems)


def problems_in(block: Block) -> list[str]:
    if block.language != "bash":
        return []
    found = [problem_with(command) for command in commands(block) if not is_run(command)]
    return [problem for problem in found if problem is not None]


def test_no_code_escapes_because_its_block_does_not_say_what_it_is() -> None:
    known = {"python", "bash", "output", "text", "toml", "sql", "mermaid"}
    found = [(page, block) for page in pages() for block in blocks(page) if block.language not in known]
    escaped = [f"{name(page)}:{block.line}" for page, block in found if block.language or _CODE.search(block.text)]
    assert not escaped, f"no language, or one that nobody checks: {escaped}"


def test_the_program_in_the_readme_is_the_quickstart() -> None:
    program = (ROOT / "examples" / "quickstart.py").read_text()
    assert program in [block.text for block in blocks(ROOT / "README.md")]
