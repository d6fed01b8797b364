"""`edda dev` and `edda viewer`, each in a process of its own; `edda serve` has its tests with the web side."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import httpx2
import pytest

from tests.cli.shell import PATIENCE, Shell, make_tables
from tests.engine.conditions import until

PROGRAM = """
from edda import EddaApp

app = EddaApp("{name}")
print("{name} is loaded", flush=True)
"""

pytestmark = pytest.mark.processes


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


async def test_the_app_starts_again_when_its_code_changes_and_its_page_is_opened(url: str, tmp_path: Path) -> None:
    program, opened = tmp_path / "shop.py", tmp_path / "opened"
    program.write_text(PROGRAM.format(name="first"))
    browser = tmp_path / "browser"
    browser.write_text(f"#!{sys.executable}\nimport sys\nopen({str(opened)!r}, 'w').write(sys.argv[1])\n")
    browser.chmod(0o755)
    shell = Shell({"EDDA_DB_URL": url, "BROWSER": f"{browser} %s"}, tmp_path)
    async with shell.running("dev", "shop:app", "--port", "0") as server:
        base = (await server.hear("edda listens on")).split()[-1]
        await until(lambda: opened.exists() and opened.read_text() == f"{base}/_edda/", "the page is opened")
        changed = PROGRAM.format(name="second")
        program.write_text(changed)
        os.utime(program, (2e9, 2e9))  # a change within one tick of the file system's clock is a change too
        await server.hear("second is loaded")
        async with httpx2.AsyncClient(base_url=base, trust_env=False) as client:
            await until(lambda: _answers(client), "it serves again")


async def _answers(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/_edda/readyz")).status_code == 200
    except httpx2.TransportError:
        return False


async def test_the_page_is_served_alone_on_a_database(url: str) -> None:
    await make_tables(url)
    shell = Shell({"EDDA_DB_URL": url})
    async with shell.running("viewer", "--port", "0") as server:
        base = (await server.hear("viewer: ")).split()[-1]
        async with httpx2.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            page = await client.get(base)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert await server.stop() == 0


async def test_a_viewer_can_be_read_only(url: str) -> None:
    await make_tables(url)
    shell = Shell({"EDDA_DB_URL": url})
    async with shell.running("viewer", "--port", "0", "--read-only") as server:
        base = (await server.hear("edda listens on")).split()[-1]
        here = Shell({"EDDA_SERVER": base})
        assert await here.read("runs", "list") == []
        refused = await here.run("events", "send", "order.created")
        assert refused.code == 1
        assert "read-only" in refused.err
        async with httpx2.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            event = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/me", "ce-type": "order.created"}
            assert (await client.post(f"{base}/events", headers=event)).status_code == 403
            assert (await client.post(f"{base}/cancel/some-run")).status_code == 403


async def test_a_viewer_makes_no_database(tmp_path: Path) -> None:
    refused = await Shell().run("viewer", "--db", f"sqlite:///{tmp_path}/typo.db")
    assert refused.code == 1
    assert "does not exist" in refused.err
    assert not await asyncio.to_thread((tmp_path / "typo.db").exists)
