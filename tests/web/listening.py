"""Real servers on real sockets: in this process, or in one of their own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from subprocess import PIPE, Popen
from typing import Any

import uvicorn

from edda.web import WebApp

from .servers import ROOT


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Server logs are shown only on request."""
        yield


@asynccontextmanager
async def listening(web: WebApp, **settings: Any) -> AsyncIterator[str]:
    """Its address."""
    config = uvicorn.Config(web, port=0, log_level="warning", lifespan="off", ws="none", **settings)
    server = _Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        assert not serving.done(), "it did not start"
        await asyncio.sleep(0.01)  # uvicorn reports it in a flag only
    host, port, *_ = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        web.end_streams()
        server.should_exit = True
        await _wait_for_responses(server)
        server.force_exit = True
        async with asyncio.timeout(20):
            await serving


async def _wait_for_responses(server: uvicorn.Server) -> None:
    """uvicorn itself waits for connections, also for one that a browser opens in advance and never uses."""
    tasks = server.server_state.tasks
    try:
        async with asyncio.timeout(20):
            while tasks or not server.servers or server.servers[0].is_serving():  # noqa: ASYNC110 - uvicorn has no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not answered 20 s after the streams were ended: {tasks}") from None


@contextmanager
def serving_desk(database: str) -> Iterator[str]:
    """The address of `tests.web.api_fixture` on the database of this URL."""
    command = [sys.executable, "-m", "tests.web.api_fixture", database]
    with Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "the desk did not open"
            yield url
        finally:
            process.communicate()
        assert process.returncode == 0
