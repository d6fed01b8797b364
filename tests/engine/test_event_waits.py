"""Which waits of a run are registered again when it releases an event that it received too late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from edda.core.codec import Codec
from edda.core.model import ClaimedRun, EntryKind, RunId
from edda.engine.run.run import LiveRun, TimerQueue
from edda.engine.run.waits import EventWaits
from edda.engine.run.writes import RunWriteBuffer
from edda.workflow.events import EventCall
from edda.workflow.execution import Command

RUN, TYPE, MANY = RunId("run-1"), "order.paid", 1_000


def command(step: str, order: int) -> Command:
    waiting = Command(EntryKind.EVENT, step, TYPE, b"", lambda entry: None)
    waiting.call = EventCall(TYPE, {"order": order}, None)
    return waiting


class Run:
    """A run with a wait that an earlier owner registered."""

    def __init__(self, registered: Command) -> None:
        self.claimed = ClaimedRun(
            RUN,
            "checkout",
            generation=0,
            epoch=2,
            input=b"",
            created_at=0,
            deadline=None,
            inbox_read=0,
            attempts=0,
            entries=(),
            inbox=(),
            waits=((registered.id, registered.call.key(RUN)),),
        )
        self.run_id, self.timers, self.may_have_exclusive_messages = RUN, TimerQueue(), False
        self.writes = RunWriteBuffer(self.claimed, None)
        match_paths: Any = SimpleNamespace(covers=lambda *_: True)
        self.services: Any = SimpleNamespace(codec=Codec(), match_paths=match_paths)


@pytest.fixture
def registered() -> Command:
    return command("paid:2", 2)


@pytest.fixture
def run(registered: Command) -> Run:
    return Run(registered)


def test_other_waits_are_registered_again_below_the_released_event(run: Run, registered: Command) -> None:
    """They may fit the event as well, and were registered past its number."""
    waits = EventWaits(cast(LiveRun, run))
    waits.on_received(command("paid:1", 2), 9)
    waits.release_event("paid:3", TYPE, 7, {registered.id: registered})
    first, second = run.writes.take(MANY), run.writes.take(MANY)
    assert first is not None
    assert second is not None
    assert (first.cancelled_waits, first.waits) == ((registered.id,), ())
    assert [(wait.step, wait.cursor) for wait in second.waits] == [(registered.id, 6)]


def test_the_wait_that_released_it_is_registered_again_if_it_is_still_asked_for(run: Run, registered: Command) -> None:
    waits = EventWaits(cast(LiveRun, run))
    late = command("paid:3", 3)
    waits.release_event(late.id, TYPE, 7, {late.id: late})
    write = run.writes.take(MANY)
    assert write is not None
    assert write.cancelled_waits == (registered.id,), "its code does not ask for that one any more"
    assert [wait.step for wait in write.waits] == [late.id]
