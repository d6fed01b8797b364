"""The commands in the pages' bash blocks: which are run, and whether the others exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click

from edda.cli import main

from .pages import ROOT, Block

KILLED = "# Killed"
"""Ends the line of a command that has to die of SIGKILL."""

ELSEWHERE = frozenset({"cd", "createdb", "curl", "docker", "export", "git", "gunicorn", "kill", "pip", "uvicorn"})
"""Commands that are not ours to check."""


def commands(block: Block) -> Iterator[str]:
    command = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        if command or (line.strip() and not line.lstrip().startswith("#")):
            command += f"{line}\n"
            if is_whole(command):
                yield command.strip()
                command = ""


def is_whole(command: str) -> bool:
    """Not if it ends within quotation marks."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def words(command: str) -> list[str]:
    """Without comments and without the variables set for this one command."""
    found = shlex.split(command, comments=True)
    while found and re.match(r"^[A-Z_]+=", found[0]):
        found.pop(0)
    return found


def is_run(command: str) -> bool:
    """Whether it does something with the page's own files and ends by itself."""
    match words(command):
        case ["python", file, *_]:
            return file.endswith(".py") and not file.startswith("examples/")
        case ["pytest", *_] | ["edda", "migrate", *_]:
            return True
    return False


def problem_with(command: str) -> str | None:
    """What is wrong with a command that is not run."""
    match words(command):
        case ["make", target, *_]:
            return None if target in make_targets() else f"the Makefile has no target {target!r}"
        case ["edda", *rest]:
            return _problem_with_edda(rest)
        case ["python", "-m", "asyncio" | "tests.docs.states_page"]:
            return None
        case [".venv/bin/ruff" | ".venv/bin/mypy" | ".venv/bin/python" | ".venv/bin/lint-imports", *_]:
            return None
        case ["python", file, *_]:
            return None if (ROOT / file).exists() else f"there is no file {file}"
        case [first, *_]:
            return None if first in ELSEWHERE else f"nobody knows the command {first!r}"
    return "an empty command"


def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _problem_with_edda(rest: list[str]) -> str | None:
    assert isinstance(main, click.Group)
    if not rest or rest[0].startswith("-"):
        return None
    command: click.Command = main
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name, *rest = rest
        if name not in command.commands:
            return f"edda has no command {name!r}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    unknown = [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]
    return f"edda {command.name} has no option {', '.join(unknown)}" if unknown else None
