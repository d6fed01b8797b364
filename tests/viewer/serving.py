"""The showcase behind a real server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edda.control.controller import Controller
from edda.viewer.viewer import Viewer
from edda.web import WebApp, WebOptions
from tests.web.fakes import FakeService
from tests.web.listening import listening


@asynccontextmanager
async def serve(controller: Controller, options: WebOptions | None = None) -> AsyncIterator[str]:
    """The address in front of `/_edda`."""
    viewer = Viewer(lambda caller: controller)
    web = WebApp(FakeService(), options, control=lambda: controller, viewer=lambda: viewer)
    async with listening(web) as url:
        yield url
