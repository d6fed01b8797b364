"""What a step published reaches the log, whatever else lies beside it."""

from __future__ import annotations

from typing import Any

import pytest

from edda import EddaApp, WorkflowContext, publish, workflow
from edda.core.channels import Message, unpack_message
from edda.core.codec import Codec
from edda.engine import events
from edda.workflow.workflow import registry

from .conditions import until
from .conftest import MakeApp
from .messages import logged, run, until_logged


@workflow
async def say(ctx: WorkflowContext, *words: str) -> None:
    for word in words:
        await publish(ctx, "news", word)


def lose_the_key(codec: Codec, body: bytes) -> Message:
    message = unpack_message(codec, body)
    if message.data == "secret":
        raise RuntimeError("no key for this one")
    return message


async def test_a_message_that_cannot_be_read_here_stays_for_who_can_and_stops_nobody(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add(say)
    first = await make_app()
    with monkeypatch.context() as patch:
        patch.setattr(events, "unpack_message", lose_the_key)
        await run(first, say, "one", "secret", "two")
        await until_logged(first, "news", 2)
        assert await logged(first, "news") == ["one", "two"]
        assert len(await first.engine.storage.staged_events(10)) == 1
    second = await make_app()
    await until_logged(second, "news", 3)
    assert await logged(second, "news") == ["one", "two", "secret"]


async def test_a_fault_does_not_end_forwarding(app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.add(say)
    dispatches, faults = app.engine.storage.staged_events, 0

    async def fail_once(limit: int) -> Any:
        nonlocal faults
        faults += 1
        if faults == 1:
            raise RuntimeError("a fault of ours")
        return await dispatches(limit)

    monkeypatch.setattr(app.engine.storage, "staged_events", fail_once)

    await until(lambda: faults > 0, "it has met the fault")
    await run(app, say, "hello")
    await until_logged(app, "news", 1)
