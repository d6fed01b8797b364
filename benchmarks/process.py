"""The bench's end of the pipe: a driver process, asked one thing at a time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from .databases import Database
from .figures import Opened
from .systems import System

ROOT = Path(__file__).parents[1]
CLOSING_SECONDS = 20.0
LONGEST_ANSWER = 1 << 20
Record = TypeVar("Record")


class DriverError(Exception):
    """A driver said no, said nothing in time, or died."""


class DriverProcess:
    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.process = process
        self.log = log

    async def ask(self, answer: type[Record], op: str, *, within: float = 120.0, **args: Any) -> Record:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, "args": args}).encode() + b"\n")
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), within)
        except TimeoutError:
            raise DriverError(f"{op}: no answer within {within:.0f} s") from None
        if not line:
            raise DriverError(f"{op}: the driver died\n{self.last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            raise DriverError(f"{op}: {reply['error']}")
        return answer(**reply["result"])

    def last_words(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-2000:]

    def kill(self) -> None:
        """The whole group, as the machine's death would."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), CLOSING_SECONDS)
        except TimeoutError:
            self.kill()


@asynccontextmanager
async def start_module(python: Path, module: str, *args: str) -> AsyncIterator[DriverProcess]:
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            python,
            *("-m", f"benchmarks.drivers.{module}", *args),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=LONGEST_ANSWER,
            # Ctrl-C is for the bench, which then ends its drivers itself.
            start_new_session=True,
        )
        driver = DriverProcess(process, log)
        try:
            yield driver
            await driver.close()
        finally:
            driver.kill()
            await process.wait()


def start(system: System, url: str, *flags: str) -> AbstractAsyncContextManager[DriverProcess]:
    return start_module(system.python, system.name, url, *flags)


@asynccontextmanager
async def opened(system: System, database: Database, *flags: str, worker: bool = True) -> AsyncIterator[DriverProcess]:
    """Without `worker` it sends, and runs nothing itself."""
    async with start(system, database.url, *flags) as driver:
        await driver.ask(Opened, "open", worker=worker)
        yield driver


async def migrate(system: System, database: Database) -> None:
    """Open once and close, so that creating the tables is in no figure."""
    async with opened(system, database):
        pass
