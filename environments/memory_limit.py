"""Workers in too little memory: one step takes more than there is, and its process is killed or cannot allocate.

A control group limits the memory where one can be made, and the kernel then kills the process; elsewhere `prlimit --as`
limits the address space, and Python raises MemoryError.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.core.states import ENDED, RunStatus
from faults.fork_server import ROOT
from faults.target_databases import fresh
from tests.servers import Unavailable

from .trial import PATIENCE, folder

LIMIT = 300 * 2**20
ADDRESS_SPACE = 900 * 2**20
TOO_MUCH = 1200 * 2**20
INNOCENT = 20
LIVES = 15
"""So often a supervisor starts the worker again."""


@activity
async def fill(ctx: WorkflowContext, size: int) -> int:
    return len(bytearray(os.urandom(1024)) * (size // 1024))


@workflow(name="hungry")
async def hungry(ctx: WorkflowContext) -> int:
    return await fill(ctx, TOO_MUCH)


@workflow(name="modest")
async def modest(ctx: WorkflowContext) -> int:
    return await fill(ctx, 2**20)


WORKFLOWS = (hungry, modest)


@contextmanager
def _limit() -> Iterator[tuple[str, list[str]]]:
    """How it is limited, and what goes before a command that is to be."""
    group = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").exists() else "/sys/fs/cgroup")
    group = group / f"edda_environment_{os.getpid()}"
    name = "memory.max" if (group.parent / "cgroup.controllers").exists() else "memory.limit_in_bytes"
    try:
        group.mkdir()
        (group / name).write_text(str(LIMIT))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        if shutil.which("prlimit") is None:
            raise Unavailable("a memory control group, or prlimit: install util-linux") from None
        yield "prlimit --as", ["prlimit", f"--as={ADDRESS_SPACE}"]
        return
    try:
        yield "cgroup", ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        with suppress(OSError):
            group.rmdir()


def run() -> dict[str, object]:
    with folder() as place_folder, fresh("postgres", place_folder) as place, _limit() as (how, limited):
        return asyncio.run(_work(place.url, place_folder, how, limited))


async def _work(url: str, place_folder: Path, how: str, limited: list[str]) -> dict[str, object]:
    """The worker is started again whenever it was killed, as a supervisor would."""
    command = [*limited, sys.executable, "-m", "environments.memory_limit", url]
    began = time.monotonic()
    async with EddaApp("client", url, workflows=WORKFLOWS, worker=False) as client:
        hog = await client.start(hungry)
        runs = [await client.start(modest) for _ in range(INNOCENT)]
        lives, worker = 0, None
        try:
            with (place_folder / "log").open("wb") as log:
                while True:
                    if worker is None or worker.returncode is not None:
                        lives += 1
                        assert lives <= LIVES, f"the worker died {LIVES} times, and not all other runs have ended"
                        worker = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=log, stderr=log)
                    ended = [await client.client.read_run(run) for run in runs]
                    its = await client.client.read_run(hog)
                    if all(one.status in ENDED for one in ended) and its.status in {*ENDED, RunStatus.PARKED}:
                        break
                    left = sum(one.status not in ENDED for one in ended)
                    assert time.monotonic() < began + 2 * PATIENCE, f"{left} runs are open, {its.status}"
                    await asyncio.sleep(0.2)
        finally:
            if worker is not None and worker.returncode is None:
                worker.kill()
                await worker.wait()
    assert {one.status for one in ended} == {RunStatus.COMPLETED}
    return {
        "done": f"a step that takes {TOO_MUCH >> 20} MB, limited by {how}",
        "runs": INNOCENT + 1,
        "recovered": round(time.monotonic() - began, 1),
        "log lines": len((place_folder / "log").read_text(errors="replace").splitlines()),
        "processes": lives,
        "the step's run": its.status,
    }


async def _serve(url: str) -> None:
    async with EddaApp("limited", url, workflows=WORKFLOWS):
        await asyncio.Event().wait()


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO)
    asyncio.run(_serve(sys.argv[1]))
