"""`edda serve`."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from hashlib import sha256
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

from edda.cli import main
from edda.web import WebOptions, find_tokens

from .calls import EVENT
from .servers import APP, TIMEOUT, Server, free_port, running, serving

HEADERS = {name: value for name, value in EVENT.items() if name != "host"}
SECRET = sha256(b"shop").hexdigest()  # part of test names, which must be equal in every xdist worker


async def test_it_prints_where_it_listens_and_how_to_send_an_event() -> None:
    async with running(["-m", "edda", "serve", APP, "--port", "0"]) as process:
        server = Server(process, 0)
        address = (await server.hear("edda listens on")).split()[-1]
        command = (await server.hear("curl")).partition(": ")[2]
        assert address in command
        curl = await asyncio.create_subprocess_exec(*shlex.split(command), "-s", stdout=asyncio.subprocess.PIPE)
        said, _ = await curl.communicate()
        assert said == b'{"status":"accepted"}'


async def test_sigterm_lets_a_request_finish_and_drains_the_app(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with (
        serving(EDDA_TEST_GATE=str(gate)) as server,
        httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client,
        asyncio.TaskGroup() as group,
    ):
        slow = group.create_task(client.post("/events", headers=HEADERS | {"ce-type": "slow"}, content=b"{}"))
        await server.hear("storing")
        server.process.terminate()
        await closed(server)
        await asyncio.to_thread(gate.write_bytes, b"")
        assert (await slow).status_code == 202
        await server.hear("drained")
        async with asyncio.timeout(TIMEOUT):
            assert await server.process.wait() == 0


async def closed(server: Server) -> None:
    """Returns when the port is closed."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            try:
                _, writer = await server.connect()
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.01)


async def test_no_server_reveals_its_software() -> None:
    async with serving() as server, httpx2.AsyncClient(base_url=server.url, trust_env=False) as client:
        assert "server" not in (await client.get("/_edda/livez")).headers


async def test_several_processes_serve_one_address() -> None:
    async with running(["-m", "edda", "serve", APP, "--port", "0", "--workers", "2"]) as process:
        server = Server(process, 0)
        await server.hear("started")
        address = (await server.hear("edda listens on")).split()[-1]
        async with httpx2.AsyncClient(base_url=address, trust_env=False) as client:
            assert (await client.post("/events", headers=HEADERS, content=b"{}")).status_code == 202
        await server.hear("started")
        process.terminate()
        for _ in range(2):
            await server.hear("drained")
        async with asyncio.timeout(TIMEOUT):
            assert await process.wait() == 0


WORKERS = pytest.mark.parametrize("options", [[], ["--workers", "2"]], ids=["one process", "two processes"])


@WORKERS
async def test_an_app_that_does_not_start_ends_the_server_with_its_reason(options: list[str]) -> None:
    async with running(["-m", "edda", "serve", APP, "--port", "0", *options], EDDA_TEST_FAIL="1") as process:
        said = await everything(process)
        assert said.splitlines()[-1] == "Error: the database is not there"
        assert "edda listens on" not in said
        assert process.returncode == 1


@WORKERS
async def test_a_database_that_does_not_answer_is_reported_in_one_line(options: list[str], tmp_path: Path) -> None:
    port = free_port()
    url = f"postgresql://nobody@127.0.0.1:{port}/shop"
    (tmp_path / "shop.py").write_text("from edda import EddaApp\napp = EddaApp('shop')\n")
    command = ["-m", "edda", "serve", "shop:app", "--port", "0", *options]
    async with running(command, EDDA_DB_URL=url, PYTHONPATH=str(tmp_path)) as process:
        (line,) = (await everything(process)).splitlines()
        assert line.startswith("Error: cannot connect to PostgreSQL")
        assert process.returncode == 1


@WORKERS
async def test_a_port_in_use_is_reported_in_one_line(options: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        async with running(["-m", "edda", "serve", APP, "--port", str(port), *options]) as process:
            said = await everything(process)
            assert said.startswith(f"Error: cannot listen on 127.0.0.1 port {port} (Address already in use): ")
            assert len(said.splitlines()) == 1
            assert process.returncode == 1


async def everything(process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(TIMEOUT):
        said, _ = await process.communicate()
    return said.decode()


async def test_with_tokens_it_serves_beyond_this_machine() -> None:
    tokens = f"shop:events:{SECRET}"
    command = ["-m", "edda", "serve", APP, "--host", "0.0.0.0", "--port", "0"]
    async with running(command, EDDA_TOKENS=tokens) as process:
        server = Server(process, 0)
        port = (await server.hear("edda listens on")).rpartition(":")[2].strip()
        assert "authorization: Bearer <token>" in await server.hear("curl")
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert (await client.post("/events", headers=HEADERS, content=b"{}")).status_code == 401
            headers = HEADERS | {"authorization": f"Bearer {SECRET}"}
            assert (await client.post("/events", headers=headers, content=b"{}")).status_code == 202
        assert not any(SECRET in line for line in server.output)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
def test_beyond_this_machine_it_refuses_to_start_without_tokens(host: str) -> None:
    refused = CliRunner().invoke(main, ["serve", APP, "--host", host])
    assert refused.exit_code == 2
    for setting in ("tokens=", "EDDA_TOKENS", 'auth="none"'):
        assert setting in refused.output


TOKENS = f"ops:view:{SECRET}"
BEYOND = "0.0.0.0"
STARTS = [
    # command, address, tokens, auth, whether it starts
    ("serve", "127.0.0.1", "", None, True),
    ("serve", "localhost", "", None, True),
    ("serve", "::1", "", None, True),
    ("serve", BEYOND, "", None, False),
    ("serve", "::", "", None, False),
    ("serve", "shop.example", "", None, False),
    ("serve", BEYOND, TOKENS, None, True),
    ("serve", BEYOND, "", "none", True),
    ("serve --workers 2", BEYOND, "", None, False),
    ("serve --workers 2", BEYOND, TOKENS, None, True),
    ("viewer", "127.0.0.1", "", None, True),
    ("viewer", BEYOND, "", None, False),
    ("viewer --read-only", BEYOND, "", None, False),
    ("viewer --read-only", BEYOND, TOKENS, None, True),
]


@pytest.mark.parametrize(("command", "host", "tokens", "auth", "starts"), STARTS)
def test_serving_beyond_this_machine_needs_tokens_or_auth_none(
    monkeypatch: pytest.MonkeyPatch, command: str, host: str, tokens: str, auth: str | None, starts: bool
) -> None:
    served: list[object] = []
    for way in ("serve_one", "serve_workers"):
        monkeypatch.setattr(f"edda.cli.uvicorn_server.{way}", lambda *given, **_: served.append(given))
    monkeypatch.setenv("EDDA_TOKENS", tokens)
    options = WebOptions(auth=auth, tokens=find_tokens(None))
    monkeypatch.setattr("edda.cli.serve.load_options", lambda target: options)
    target = ["--db", "memory://"] if command.startswith("viewer") else [APP]
    started = CliRunner().invoke(main, [*command.split(), *target, "--host", host])
    assert (started.exit_code, bool(served)) == ((0, True) if starts else (2, False)), started.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tests.web.program", "expected MODULE:APP"),
        ("tests.web.nothing:app", "cannot be loaded"),
        ("tests.web.program:nothing", "cannot be loaded"),
        ("tests.web.program:something_else", "is a object, expected an EddaApp"),
    ],
)
def test_a_target_that_cannot_be_served_is_named(target: str, message: str) -> None:
    refused = CliRunner().invoke(main, ["serve", target])
    assert refused.exit_code == 2
    assert message in refused.output
