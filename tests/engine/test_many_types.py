"""Event types are the senders' words: any number of them may come, and none may cost another one its event."""

from __future__ import annotations

import pytest

from edda import EddaApp, WorkflowContext, wait_event, workflow
from edda.cloudevents.event import CloudEvent, make
from edda.engine import events

from .conditions import until_out_of_memory

POST = 700
TYPES = 10_001
"""One more than a process keeps in memory."""


def event(type: str, id: str) -> CloudEvent:
    return make(id=id, type=type, source="/shop")


async def test_a_known_type_beside_the_type_that_is_one_too_many_is_stored(app: EddaApp) -> None:
    """Which types are forgotten for a new one must not concern the post at hand."""
    names = [f"type-{number}" for number in range(TYPES)]
    for begin in range(0, len(names), POST):
        await app.client.receive([event(name, "first") for name in names[begin : begin + POST]])
    for number in range(3):
        post = [
            event(names[0], f"again-{number}"),
            event(f"new-{number}", "first"),
            event(names[-1], f"again-{number}"),
        ]
        await app.client.receive(post)
    assert await app.engine.storage.find_event("/shop", "again-2") is not None
    assert len(app.engine.services.match_paths._known) <= events.MAX_TYPES


async def test_one_post_may_have_more_types_than_are_kept(app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_TYPES", 3)
    await app.client.receive([event(f"type-{number}", "first") for number in range(10)])
    await app.client.receive([event("type-9", "second"), event("type-0", "second"), event("other", "first")])
    assert len(app.engine.services.match_paths._known) <= 10


async def test_a_wait_is_found_after_its_type_was_forgotten(app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_TYPES", 2)

    @workflow
    async def order(ctx: WorkflowContext, type: str) -> str:
        return (await wait_event(ctx, type, match={"order": type})).id

    runs = [await app.start(order, f"type-{number}") for number in range(5)]
    await until_out_of_memory(app)
    for number in range(5):
        paid = make(id=f"paid-{number}", type=f"type-{number}", source="/shop", data={"order": f"type-{number}"})
        await app.client.receive([paid])
    for number, run_id in enumerate(runs):
        assert await app.handle(run_id).result(timeout=30) == f"paid-{number}"
    assert len(app.engine.services.match_paths._filled) <= 2
    assert not app.engine.services.match_paths._registering
