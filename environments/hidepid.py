"""Two workers of different users on a host where each sees only its own processes: hidepid, ProtectProc=invisible."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys

from faults.audit_triggers import COUNT_TAKEOVERS
from faults.fork_server import ROOT
from faults.target_databases import fresh
from tests.servers import Unavailable

from .trial import Trial, folder, until

QUICK = True
USERS = (64_001, 64_002)
WATCHED = 8.0
"""Seconds: they bury each other within 3 s, if they do."""
RUNS = 20
# The file system's permissions count for neither: the interpreter may lie where only root looks.
MOUNT = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'


def run() -> dict[str, object]:
    for tool in ("unshare", "setpriv"):
        if os.geteuid() != 0 or shutil.which(tool) is None:
            raise Unavailable("unshare and setpriv as root: install util-linux")
    with folder() as place_folder, fresh("postgres", place_folder) as place:
        trial = Trial(place, place_folder, 0)
        return asyncio.run(_watch(trial))


async def _watch(trial: Trial) -> dict[str, object]:
    async with trial.open():
        workers = [_launch(trial, user) for user in USERS]
        try:
            await until(lambda: _are_registered(trial), "both workers have registered")
            await trial.start(RUNS)
            await asyncio.sleep(WATCHED)
            recovered = await trial.finish()
            buried = (await trial.rows(COUNT_TAKEOVERS))[0][0]
            assert buried == 0, f"live workers took over from each other {buried} times"
            await trial.check()
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    return {"done": "two users' workers, hidepid=2", "runs": RUNS, "recovered": recovered, "log lines": trial.log_lines}


async def _are_registered(trial: Trial) -> bool:
    return (await trial.rows("SELECT count(*) FROM edda_worker"))[0][0] == len(USERS)


def _launch(trial: Trial, user: int) -> subprocess.Popen[bytes]:
    caps = "-all,+dac_override"
    # Group 0 sees all processes, whatever the mount says.
    become = [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        f"--inh-caps={caps}",
        f"--ambient-caps={caps}",
    ]
    work = [sys.executable, "-m", "environments.lone_worker", trial.place.url, str(trial.folder), f"w{user}"]
    command = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", *become, f"--bounding-set={caps}", *work]
    return subprocess.Popen(command, cwd=ROOT)
