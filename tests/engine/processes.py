"""Other processes: real interpreters that run one of our programs, and die when they are told to."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from .conditions import PATIENCE

ROOT = Path(__file__).parents[2]


class Process:
    """Says what it has done, one line at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def hear(self, line: str) -> None:
        """Wait until it says this line; everything it said before is skipped."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while (said := await self._process.stdout.readline()) != f"{line}\n".encode():
                assert said, f"the process ended before it said {line!r}"

    @property
    def pid(self) -> int:
        return self._process.pid

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def died(self) -> None:
        """However long that takes."""
        await self._process.wait()

    def stop(self) -> None:
        """Ask it to drain."""
        self._process.terminate()

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self._process.wait()


@asynccontextmanager
async def program(name: str, *arguments: object, hang: bool = False) -> AsyncIterator[Process]:
    """With `hang` its activities say "working" and never return: it is there to be killed."""
    command = [sys.executable, "-m", f"tests.engine.programs.{name}", *map(str, arguments)]
    environment = os.environ | ({"EDDA_TEST_HANG": "1"} if hang else {})
    started = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE, env=environment)
    process = Process(started)
    try:
        yield process
    finally:
        await process.kill()
