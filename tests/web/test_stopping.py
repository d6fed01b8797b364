"""A second signal ends a process whose event loop is blocked, and children end when their parent is killed."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from unittest.mock import MagicMock

import httpx2
import pytest

from edda.cli.uvicorn_server import _Supervisor

from .servers import APP, TIMEOUT, Server, free_port, running

BLOCKING = """
import time
from edda import EddaApp, WorkflowContext, activity, workflow

@activity
async def hang(ctx: WorkflowContext) -> None:
    print("the loop is blocked", flush=True)
    time.sleep(600)

@workflow(event_handler=True, name="order.created")
async def order(ctx: WorkflowContext) -> None:
    await hang(ctx)

app = EddaApp("hanging", workflows=[order])
"""
EVENT = {
    "ce-specversion": "1.0",
    "ce-id": "1",
    "ce-source": "/me",
    "ce-type": "order.created",
    "content-type": "application/json",
}

pytestmark = pytest.mark.processes


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(TIMEOUT):
        return await process.wait()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("options", [[], ["--workers", "2"]], ids=["one process", "two processes"])
async def test_a_blocked_server_ends_at_the_second_signal(
    tmp_path: Path, options: list[str], first: signal.Signals
) -> None:
    (tmp_path / "hanging.py").write_text(BLOCKING)
    port = free_port()
    environment = {"EDDA_DB_URL": f"sqlite:///{tmp_path}/hanging.db", "PYTHONPATH": str(tmp_path)}
    command = ["-m", "edda", "serve", "hanging:app", "--port", str(port), *options]
    async with running(command, **environment) as process:
        server = Server(process, port)
        await server.hear("edda listens on")
        await send_event(server)
        await server.hear("the loop is blocked")
        process.send_signal(first)
        await asyncio.sleep(1.0)  # a drained process would have ended
        assert process.returncode is None
        process.send_signal(first)
        assert await ended(process) == 1


async def test_a_blocked_worker_ends_at_the_second_signal(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(BLOCKING)
    url = f"sqlite:///{tmp_path}/hanging.db"
    environment = {"EDDA_DB_URL": url, "PYTHONPATH": str(tmp_path)}
    async with running(["-m", "edda", "migrate", "--db", url]) as migrating:
        assert await ended(migrating) == 0
    async with running(["-m", "edda", "worker", "hanging:app"], **environment) as process:
        send = ["-m", "edda", "events", "send", "order.created", "--app", "hanging:app", "--data", "{}"]
        async with running(send, **environment) as sending:
            assert await ended(sending) == 0
        await Server(process, 0).hear("the loop is blocked")
        process.terminate()
        await asyncio.sleep(1.0)  # a drained process would have ended
        assert process.returncode is None
        process.terminate()
        assert await ended(process) == 1


async def test_processes_end_when_their_parent_is_killed() -> None:
    port = free_port()
    async with running(["-m", "edda", "serve", APP, "--port", str(port), "--workers", "2"]) as process:
        server = Server(process, port)
        for _ in range(2):
            await server.hear("started")
        process.kill()
        for _ in range(2):
            assert str(process.pid) in await server.hear("has ended, stopping process")
        for _ in range(2):
            await server.hear("drained")
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT):
            await process.stdout.read()  # up to the end: no process has it open any more


async def send_event(server: Server) -> None:
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
        async with asyncio.timeout(TIMEOUT):
            while True:
                try:
                    assert (await client.post("/events", headers=EVENT, content=b"{}")).status_code == 202
                except httpx2.TransportError:  # no process accepts connections yet
                    await asyncio.sleep(0.05)
                else:
                    return


def test_two_signals_that_the_parent_reads_at_once_kill_its_children() -> None:
    child = MagicMock()
    supervisor = _Supervisor.__new__(_Supervisor)  # its constructor would replace the signal handlers of this process
    supervisor.signal_queue, supervisor.should_exit = [signal.SIGINT, signal.SIGINT], threading.Event()
    supervisor.processes = [child]
    with pytest.raises(SystemExit):
        supervisor.handle_signals()
    child.process.kill.assert_called_once_with()
