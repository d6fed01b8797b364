"""File modes: only the owner can read a new database file and the files beside it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from edda import EddaApp, WorkflowContext, workflow
from edda.engine.settings import Settings

pytestmark = pytest.mark.databases("sqlite")


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    """As on most machines; a stricter mask would make every file private anyway."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """By the kind of file."""
    return {
        re.sub("worker-.*", "worker", path.name): oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir()
    }


async def look(folder: Path) -> dict[str, str]:
    @workflow
    async def greet(ctx: WorkflowContext) -> str:
        return "hello"

    app = EddaApp("shop", f"sqlite:///{folder}/shop.db", workflows=[greet], settings=Settings(linger=0.0))
    async with app:
        await app.run(greet)
        return modes(folder)


async def test_files_that_edda_makes_are_for_their_owner_alone(tmp_path: Path) -> None:
    found = await look(tmp_path)
    assert found.keys() == {"shop.db", "shop.db-wal", "shop.db-shm", "shop.db.lock", "shop.db.worker"}
    assert set(found.values()) == {"0o600"}


async def test_a_file_that_was_there_keeps_its_mode_and_the_others_follow_it(tmp_path: Path) -> None:
    (tmp_path / "shop.db").touch()
    (tmp_path / "shop.db").chmod(0o660)
    found = await look(tmp_path)
    assert set(found.values()) == {"0o660"}
