"""Run the code blocks of one page: `python -m tests.docs.run_page <page>`, in an empty folder that becomes the page's.

A process of its own for each page, since workflows are registered by name for the whole process.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from .commands import KILLED, commands, is_run
from .pages import Block, blocks


class PageError(Exception):
    """The page says something that is not so."""


class Reader:
    """Does what a reader of the page would do, from its first block to its last."""

    def __init__(self, page: Path, runner: asyncio.Runner) -> None:
        self._page = page
        self._runner = runner
        self._module = ModuleType("page")
        sys.modules["page"] = self._module  # errors come back as themselves only if their class can be found
        self._printed = ""

    def read(self) -> None:
        for block in blocks(self._page):
            try:
                self._take(block)
            except BaseException as error:
                error.add_note(f"in the block at {self._page}:{block.line}")
                raise

    def _take(self, block: Block) -> None:
        if block.file is not None:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            self._printed = self._run_python(block)
        elif block.language == "bash":
            self._printed = "".join(run_command(command) for command in commands(block) if is_run(command))
        elif block.language == "output" and block.text != self._printed:
            raise PageError(f"the page shows\n{block.text}\nbut what was printed is\n{self._printed}")

    def _run_python(self, block: Block) -> str:
        source = "\n" * (block.line - 1) + block.text  # tracebacks then have the page's own line numbers
        code: Any = compile(source, str(self._page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        printed = io.StringIO()
        with redirect_stdout(printed):
            if code.co_flags & inspect.CO_COROUTINE:
                self._runner.run(eval(code, vars(self._module)))
            else:
                exec(code, vars(self._module))
        return printed.getvalue()


def run_command(command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"exec env {command}"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PATH": path},
    )
    expected = -signal.SIGKILL if command.endswith(KILLED) else 0
    if done.returncode != expected:
        raise PageError(f"{command!r} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    with asyncio.Runner() as runner:
        Reader(Path(sys.argv[1]), runner).read()
