"""A worker on the given database: `serve <db url> <lease>`; it works until it is killed or its input ends."""

from __future__ import annotations

import asyncio
import sys

from edda import EddaApp
from edda.engine.settings import Settings

from . import shop


async def main(url: str, lease: float) -> None:
    settings = Settings(lease=lease, heartbeat=lease / 5, sweep=0.1, takeover_grace=0.0, linger=0.0)
    async with EddaApp("serve", url, workflows=shop.WORKFLOWS, settings=settings):
        print("serving", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
