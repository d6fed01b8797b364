"""The page about NATS, with a server of its own: its blocks are run as they stand, but for the port."""

from __future__ import annotations

from pathlib import Path

from tests.outbox.nats_server import nats_server

from .pages import DOCS
from .test_code_blocks import run_in


async def test_the_code_on_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    (data := tmp_path / "nats").mkdir()
    (folder := tmp_path / "page").mkdir()
    async with nats_server(data) as server:
        text = (DOCS / "how-to" / "nats.md").read_text().replace("nats://localhost:4222", server.url)
        (page := tmp_path / "nats.md").write_text(text)
        done = run_in(folder, "-m", "tests.docs.run_page", page)
    assert done.returncode == 0, done.stderr
