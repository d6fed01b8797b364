"""Which workers of the same host are dead for certain: those whose locked file is there and unlocked, and no others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from edda.core.model import WorkerId
from edda.engine.worker import host
from edda.engine.worker.host import Presence, has_ended
from edda.storage.ports import Storage
from tests.conftest import Database

from .conditions import until
from .conftest import url_of
from .processes import Process, program

WORKER = WorkerId("w1")
HOLD = """
import sys
from pathlib import Path
from edda.engine.worker.host import Presence
presence = Presence("w1", Path(sys.argv[1]))
presence.hold()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def holder(folder: Path) -> subprocess.Popen[bytes]:
    """A process that holds the worker's file."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_live_process_is_not_dead_and_a_killed_one_is_even_before_it_is_reaped(folder: Path) -> None:
    process = holder(folder)
    assert not has_ended(WORKER, process.pid, folder)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert has_ended(WORKER, process.pid, folder)
    process.communicate()
    assert has_ended(WORKER, process.pid, folder)


def test_without_its_file_nothing_is_certain(folder: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not has_ended(WORKER, gone.pid, folder)
    assert not has_ended(WORKER, gone.pid, folder / "missing")


def test_our_own_workers_are_alive(folder: Path) -> None:
    presence = Presence(WORKER, folder)
    presence.hold()
    assert not has_ended(WORKER, os.getpid(), folder)
    presence.remove()
    assert not list(folder.iterdir())


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(folder: Path) -> None:
    child = 'import os\nif os.fork() == 0:\n    os.close(1)\n    sys.stdin.read()\n    os._exit(0)\nprint("held"'
    code = HOLD.replace('print("held"', child)
    process = subprocess.Popen([sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    process.kill()
    process.wait()
    assert has_ended(WORKER, process.pid, folder)
    process.communicate()


def test_a_file_that_cannot_be_written_leaves_it_to_the_lease(tmp_path: Path) -> None:
    presence = Presence(WORKER, tmp_path / "missing")
    presence.hold()
    presence.remove()


def test_old_files_of_dead_processes_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = holder(folder)
    process.kill()
    process.communicate()
    Presence(WorkerId("w2"), folder).hold()
    assert has_ended(WORKER, process.pid, folder)
    monkeypatch.setattr(host, "_KEEP_SECONDS", -1.0)
    monkeypatch.setattr(host, "_next_cleanup", 0.0)
    Presence(WorkerId("w3"), folder).hold()
    assert not has_ended(WORKER, process.pid, folder)


# Two users who do not see each other


@asynccontextmanager
async def user(database: Database, number: int, log: Path) -> AsyncIterator[Process]:
    async with program("hidden", url_of(database), number, log) as process:
        await process.hear("serving")
        yield process


async def worker_ids(storage: Storage) -> set[str]:
    return {one.info.id for one in await storage.registered_workers()}


@pytest.mark.timed
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs the right to mount /proc")
@pytest.mark.parametrize("database", ["postgres", "mysql"], indirect=True)
@pytest.mark.parametrize("hides", [False, True], ids=["all-see-all", "hidepid"])
async def test_workers_that_do_not_see_each_other_do_not_bury_each_other(
    database: Database, storage: Storage, hides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hides:
        monkeypatch.setenv("EDDA_TEST_HIDE", "1")
    logs = [tmp_path / "one", tmp_path / "two"]
    for log in logs:
        log.touch(0o666)
    async with user(database, 65533, logs[0]) as first, user(database, 65534, logs[1]):
        before = await worker_ids(storage)
        assert len(before) == 2
        await asyncio.sleep(1.0)  # ten sweeps
        assert await worker_ids(storage) == before
        assert not [log for log in logs if "is gone" in log.read_text()]
        await first.kill()
        await until(lambda: "is gone" in logs[1].read_text(), "the other one has seen its death, by its lock")

        async def is_buried() -> bool:
            return len(await worker_ids(storage)) == 1

        await until(is_buried, "its row is gone")
