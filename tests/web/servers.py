"""Real ASGI servers, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[2]
APP = "tests.web.program:app"
TIMEOUT = 30.0
WITHOUT_HTTPTOOLS = "import sys; sys.modules['httptools'] = None; from edda.cli import main; main()"
"""Makes uvicorn parse HTTP with h11, as in a base install."""

Command = Callable[[int], list[str]]
SERVERS: dict[str, Command] = {
    "edda": lambda port: ["-m", "edda", "serve", APP, "--port", str(port)],
    "edda-h11": lambda port: ["-c", WITHOUT_HTTPTOOLS, "serve", APP, "--port", str(port)],
    "uvicorn-h11": lambda port: ["-m", "uvicorn", APP, "--port", str(port), "--http", "h11", "--loop", "asyncio"],
    "uvicorn-httptools": lambda port: ["-m", "uvicorn", APP, "--port", str(port), "--http", "httptools"],
    "hypercorn": lambda port: ["-m", "hypercorn", APP, "--bind", f"127.0.0.1:{port}"],
    "granian": lambda port: ["-m", "granian", APP, "--interface", "asgi", "--host", "127.0.0.1", "--port", str(port)],
}


@dataclass
class Server:
    process: Process
    port: int
    output: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def hear(self, words: str) -> str:
        """The line with these words in it; earlier lines are kept in `output`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(TIMEOUT):
            while line := (await self.process.stdout.readline()).decode():
                self.output.append(line)
                if words in line:
                    return line
        raise AssertionError(f"it ended without printing {words!r}: {''.join(self.output)}")

    async def stop(self) -> int:
        """Sends SIGTERM and returns the exit code."""
        self.process.terminate()
        async with asyncio.timeout(TIMEOUT):
            return await self.process.wait()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def serving(name: str = "edda", **environment: str) -> AsyncIterator[Server]:
    port = free_port()
    async with running(SERVERS[name](port), **environment) as process:
        server = Server(process, port)
        await wait_until_ready(server)
        yield server


@asynccontextmanager
async def running(command: list[str], **environment: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stdout=PIPE, stderr=STDOUT, env=os.environ | environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), TIMEOUT)
            except TimeoutError:
                process.kill()
                raise


async def wait_until_ready(server: Server) -> None:
    async with asyncio.timeout(TIMEOUT), httpx2.AsyncClient(trust_env=False) as client:
        while True:
            try:
                if (await client.get(f"{server.url}/_edda/readyz")).status_code == 200:
                    return
            except httpx2.TransportError:
                assert server.process.returncode is None, "it did not start"
            await asyncio.sleep(0.05)  # nothing else can be awaited before the server listens


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
