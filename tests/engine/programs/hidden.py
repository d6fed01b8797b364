"""A worker of another user, who does not see other users' processes: `hidden <db url> <user id> <log file>`.

With `EDDA_TEST_HIDE=1` it looks through a `/proc` of its own, mounted with `hidepid=2`.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys

from edda import EddaApp
from edda.engine.settings import Settings

from . import shop

CLONE_NEWNS = 0x00020000
MS_PRIVATE, MS_REC = 1 << 18, 1 << 14


def hide_others() -> None:
    """A mount namespace of its own, with a /proc in which each user sees only his processes."""
    libc = ctypes.CDLL(None, use_errno=True)
    for outcome in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"proc", b"/proc", b"proc", 0, b"hidepid=2"),
    ):
        if outcome != 0:
            print(f"cannot hide: {os.strerror(ctypes.get_errno())}", flush=True)
            sys.exit(1)


async def main(url: str, user: int) -> None:
    settings = Settings(lease=60.0, heartbeat=0.5, sweep=0.1, takeover_grace=0.0)
    async with EddaApp(f"user{user}", url, workflows=shop.WORKFLOWS, settings=settings) as app:
        os.setgid(user)  # not before: this user cannot read the folder that the library is loaded from
        os.setuid(user)
        await app.engine.storage.now()
        print("serving", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    logging.basicConfig(filename=sys.argv[3], level=logging.WARNING, format="%(levelname)s %(message)s")
    os.environ["HOME"] = "/"  # where a database driver may look for certificates, as any user
    if os.environ.get("EDDA_TEST_HIDE"):
        hide_others()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
