"""The showcase behind a real server on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from edda.control.controller import Controller
from edda.viewer.pages import Viewer
from edda.web import Web, WebOptions
from tests.web.fakes import FakeService


@asynccontextmanager
async def serve(controller: Controller, options: WebOptions | None = None) -> AsyncIterator[str]:
    """The address in front of `/_edda`."""
    viewer = Viewer(lambda caller: controller)
    web = Web(FakeService(), options, control=lambda: controller, pages=viewer)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(web, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        web.end_streams()
        server.should_exit = True
        await task
        listener.close()
