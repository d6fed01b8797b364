"""Messages as tests publish and receive them, and processes that die between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edda import EddaApp, RunStatus, WorkflowContext, publish, receive, subscribe, workflow
from edda.core.channels import event_type, unpack_message
from edda.core.model import BatchResult, End, EntryKind, Fence, Recur, RunWrite

from .conditions import PATIENCE, until, until_status

_FOR_EVER = (1 << 63) - 1


@workflow
async def hear_one(ctx: WorkflowContext, channel: str) -> Any:
    await subscribe(ctx, channel)
    return (await receive(ctx, channel)).data


@workflow
async def hear(ctx: WorkflowContext, channel: str, count: int) -> list[Any]:
    await subscribe(ctx, channel)
    return [(await receive(ctx, channel)).data for _ in range(count)]


LISTENERS = (hear_one, hear)
"""For the tests to register: each begins with no workflows."""


async def start_receiving(app: EddaApp, workflow: Any, *args: Any) -> str:
    """Started, and in the database as waiting for a message."""
    run_id: str = await app.start(workflow, *args)
    await until_status(app, run_id, RunStatus.WAITING_FOR_MESSAGE)
    return run_id


async def run(app: EddaApp, workflow: Any, *args: Any) -> Any:
    """As `app.run`, but not for ever."""
    return await app.handle(await app.start(workflow, *args)).result(timeout=PATIENCE)


async def publish_all(app: EddaApp, channel: str, *data: Any) -> None:
    for one in data:
        await publish(app, channel, one)


async def logged(app: EddaApp, channel: str) -> list[Any]:
    """The data of every message of a channel that is in the log, in its order."""
    found = await app.engine.storage.events_of_type(event_type(channel), 0, _FOR_EVER, 100_000)
    return [unpack_message(app.engine.codec, one.event.body).data for one in found]


async def until_logged(app: EddaApp, channel: str, count: int) -> None:
    async def are_logged() -> bool:
        return len(await logged(app, channel)) == count

    await until(are_logged, f"{count} messages are on {channel}")


async def kill(app: EddaApp, witness: EddaApp) -> None:
    """It dies as a process does, and somebody else sees that it is dead."""
    worker = app.engine.worker
    assert worker is not None
    app.kill()
    await witness.engine.storage.remove_worker(worker.info.id)


class Held:
    """Stands before the database: the first batch with such a bundle waits until it is let go."""

    def __init__(self, app: EddaApp, monkeypatch: pytest.MonkeyPatch, holds: Callable[[RunWrite], bool]) -> None:
        self._reached, self._let_go = asyncio.Event(), asyncio.Event()
        self._holds = holds
        self._write = app.engine.storage.write
        monkeypatch.setattr(app.engine.storage, "write", self.write)

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        if any(self._holds(bundle) for bundle in batch):
            self._reached.set()
            await self._let_go.wait()
        return await self._write(fence, batch, token)

    async def reached(self) -> None:
        await asyncio.wait_for(self._reached.wait(), PATIENCE)

    def let_go(self) -> None:
        self._let_go.set()


def is_timeout(bundle: RunWrite) -> bool:
    """Waiting for a message is over."""
    return any(entry.kind is EntryKind.MESSAGE and not entry.ok for entry in bundle.entries)


def is_received(bundle: RunWrite) -> bool:
    return any(entry.kind is EntryKind.MESSAGE and entry.ok for entry in bundle.entries)


def is_end(bundle: RunWrite) -> bool:
    return isinstance(bundle.transition, End)


def is_recur(bundle: RunWrite) -> bool:
    return isinstance(bundle.transition, Recur)
