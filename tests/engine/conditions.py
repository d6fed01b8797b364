"""Tests wait for facts, never for time to pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from edda import EddaApp, RunStatus

PATIENCE = 30.0
"""Seconds until a fact that does not come true fails its test; a loaded machine needs some of them."""


async def until(fact: Callable[[], bool | Awaitable[bool]], what: str, within: float = PATIENCE) -> None:
    give_up = time.monotonic() + within
    while True:
        found = fact()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < give_up, f"not within {within} s: {what}"
        await asyncio.sleep(0.005)


async def until_status(app: EddaApp, instance_id: str, status: RunStatus, within: float = PATIENCE) -> None:
    async def reached() -> bool:
        return await app.handle(instance_id).status() is status

    await until(reached, f"run {instance_id} is {status}", within)


async def until_out_of_memory(app: EddaApp) -> None:
    """No run of this app is in memory."""
    worker = app.engine.worker
    assert worker is not None
    await until(lambda: not worker.live, "all runs have left memory")


async def reason_of(app: EddaApp, instance_id: str) -> str:
    """What a parked or waiting run says of itself."""
    return (await app.client.read_run(instance_id)).reason or ""
