"""Starting and stopping with the server, alone and inside other applications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from edda.web import State, WebApp

from .calls import Message, ask
from .fakes import FakeService


@pytest.fixture
def service() -> FakeService:
    return FakeService(State.STOPPED)


async def live(web: WebApp) -> list[str]:
    """Runs one lifespan and returns the messages of the application."""
    said: list[str] = []
    orders = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Message:
        return orders.pop(0)

    async def send(message: Message) -> None:
        said.append(message["type"].removeprefix("lifespan.") + message.get("message", ""))

    async with asyncio.timeout(20):
        await web({"type": "lifespan"}, receive, send)
    return said


async def test_the_app_starts_and_stops_with_its_server(web: WebApp, service: FakeService) -> None:
    assert await live(web) == ["startup.complete", "shutdown.complete"]
    assert service.lives == ["initialize", "shutdown"]


async def test_a_failed_start_is_reported_to_the_server(
    web: WebApp, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    service.error = RuntimeError("no database")
    assert await live(web) == ["startup.failedno database"]
    assert "no database" in caplog.text


async def test_a_failed_shutdown_is_reported_to_the_server(web: WebApp, service: FakeService) -> None:
    service.error_after_start = RuntimeError("stuck")
    assert await live(web) == ["startup.complete", "shutdown.failedstuck"]


def mounted_in_starlette(web: WebApp, path: str) -> Starlette:
    return Starlette(routes=[Mount(path, app=web)], lifespan=web.lifespan)


def mounted_in_fastapi(web: WebApp, path: str) -> FastAPI:
    app = FastAPI(lifespan=web.lifespan)
    app.mount(path, web)
    return app


MountIn = Callable[[WebApp, str], Starlette]


@pytest.mark.parametrize("mount", [mounted_in_starlette, mounted_in_fastapi])
@pytest.mark.parametrize("path", ["", "/edda", "/deep/in/here"])
async def test_it_can_be_mounted_anywhere(web: WebApp, service: FakeService, mount: MountIn, path: str) -> None:
    host = mount(web, path)
    async with host.router.lifespan_context(host):
        assert service.lives == ["initialize"]
        for below in ("/events", "/a/b", "/"):
            assert (await ask(host, path=path + below)).status == 202
        assert (await ask(host, path=f"{path}/cancel/run", body=b"")).status == 202
        assert (await ask(host, path=f"{path}/_edda/readyz", method="GET")).status == 200
        assert (await ask(host, path=f"{path}/_edda/other", method="GET")).status == 404
    assert service.lives == ["initialize", "shutdown"]
    assert service.cancelled == [("run", "cancelled")]


async def test_it_can_be_mounted_behind_a_proxy_that_strips_the_prefix(web: WebApp) -> None:
    host = FastAPI(lifespan=web.lifespan)
    host.mount("/edda", web)
    async with host.router.lifespan_context(host):
        assert (await ask(host, path="/edda/_edda/livez", method="GET", root_path="/api")).status == 200
        assert (await ask(host, path="/api/edda/_edda/livez", method="GET", root_path="/api")).status == 200


async def test_its_lifespan_can_be_part_of_another(web: WebApp, service: FakeService) -> None:
    @asynccontextmanager
    async def lifespan(host: Starlette) -> AsyncIterator[None]:
        service.lives.append("before")
        async with web.lifespan(host):
            yield
        service.lives.append("after")

    host = Starlette(routes=[Mount("/edda", app=web)], lifespan=lifespan)
    async with host.router.lifespan_context(host):
        assert (await ask(host, path="/edda/events")).status == 202
    assert service.lives == ["before", "initialize", "shutdown", "after"]


async def test_a_mounted_app_whose_host_never_started_it_says_so(web: WebApp, caplog: pytest.LogCaptureFixture) -> None:
    host = Starlette(routes=[Mount("/edda", app=web)])
    async with host.router.lifespan_context(host):
        reply = await ask(host, path="/edda/events")
    assert reply.status == 503
    assert "lifespan=app.lifespan" in reply.json["error"]
    assert "await app.initialize()" in caplog.text


async def test_it_stops_when_what_it_is_mounted_in_fails(web: WebApp, service: FakeService) -> None:
    with pytest.raises(RuntimeError, match="host"):
        async with web.lifespan():
            raise RuntimeError("host")
    assert service.lives == ["initialize", "shutdown"]


async def test_a_scope_that_is_not_known_is_an_error(web: WebApp) -> None:
    with pytest.raises(ValueError, match="'mqtt'"):
        await ask(web, scope_type="mqtt")
