"""The driver's connections, made so that nobody is told off who changes his mind."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

LAST_CHANCE = 1.0
"""Seconds that a server which is there needs at most."""


async def connect(url: str, **options: Any) -> Any:
    """If it is cancelled just when the server answers, the driver leaves a future with an error that nobody looks at,
    and asyncio prints it some time later. So what has begun goes on in the background, and may come to its end there.
    """
    connecting = asyncio.create_task(asyncpg.connect(url, **options), name="edda-connect")
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_drop)
        asyncio.get_running_loop().call_later(LAST_CHANCE, connecting.cancel)
        raise


def _drop(connecting: asyncio.Task[Any]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().terminate()
