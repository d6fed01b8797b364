"""Runs commands in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edda import EddaApp
from tests.web.servers import Server

ROOT = Path(__file__).parents[2]
APP = "tests.cli.shop:app"
PATIENCE = 60.0


async def make_tables(url: str) -> None:
    """As `edda migrate` does, without the price of a process."""
    await EddaApp(db_url=url, worker=False).migrate()


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@dataclass
class Shell:
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = ROOT

    async def run(self, *arguments: str, stdin: str = "") -> Said:
        process = await self._start(arguments)
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate(stdin.encode())
        said = Said(process.returncode or 0, out.decode(), err.decode())
        assert "Traceback" not in said.err, said.err
        return said

    async def do(self, *arguments: str) -> str:
        """What has to succeed."""
        said = await self.run(*arguments)
        assert said.code == 0, f"edda {' '.join(arguments)}: {said}"
        return said.out.strip()

    async def read(self, *arguments: str) -> Any:
        return json.loads(await self.do(*arguments, "--json"))

    @asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[Server]:
        process = await self._start(arguments, merged=True)
        try:
            yield Server(process, 0)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    async def _start(self, arguments: tuple[str, ...], *, merged: bool = False) -> Process:
        """`python -m edda` puts the folder it runs in on the path, so that the app is found."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "edda",
            *arguments,
            cwd=self.folder,
            stdin=PIPE,
            stdout=PIPE,
            stderr=asyncio.subprocess.STDOUT if merged else PIPE,
            env=os.environ | self.environment,
        )
