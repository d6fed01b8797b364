"""From which event on a run asks: never above one that it gave back and has not got since."""

from __future__ import annotations

import pytest

from edda.core.channels import ChannelMode
from edda.core.codec import Codec
from edda.core.model import ClaimedRun, Entry, EntryKind, RunId
from edda.engine.run import waits
from edda.engine.run.waits import EventCursors
from edda.workflow.channels import MessageCall
from edda.workflow.events import EventCall
from edda.workflow.execution import Command

CODEC = Codec()


def wait_for(**match: int) -> Command:
    command = Command(EntryKind.EVENT, "paid:1", "paid", CODEC.encode(match), lambda entry: None)
    command.call = EventCall("paid", match, None)
    return command


def message_on(channel: str) -> Command:
    command = Command(EntryKind.MESSAGE, "m:2", channel, CODEC.encode("broadcast"), lambda entry: None)
    command.call = MessageCall(channel, ChannelMode.BROADCAST, None)
    return command


def received(seq: int, event: int, **match: int) -> Entry:
    return Entry(seq, EntryKind.EVENT, f"paid:{seq}", "paid", True, 0, CODEC.encode(match), inbox_no=seq, event=event)


def given_back(seq: int, event: int, type: str = "paid") -> Entry:
    return Entry(seq, EntryKind.LATE_EVENT, f"paid:{seq}", type, True, 0, inbox_no=seq, event=event)


def floors_of(*entries: Entry) -> EventCursors:
    run = ClaimedRun(RunId("run"), "order", 0, 1, b"", 0, None, len(entries), 0, entries, ())
    return EventCursors(run, CODEC)


def test_a_key_is_asked_for_from_the_last_event_that_came_by_it() -> None:
    floors = floors_of(received(1, 7, k=1))
    floors.received(wait_for(k=1), 9)
    assert floors.to_wait(wait_for(k=1)).cursor == 9
    assert floors.to_wait(wait_for(k=2)).cursor is None


def test_what_was_given_back_is_asked_for_again_though_another_wait_got_a_later_one() -> None:
    floors = floors_of()
    floors.on_released("paid", 5)
    floors.received(wait_for(k=1), 6)
    assert floors.to_wait(wait_for(k=1)).cursor == 4
    floors.received(wait_for(k=1), 5)
    assert floors.to_wait(wait_for(k=1)).cursor == 6


def test_a_replay_knows_what_was_given_back_too() -> None:
    assert floors_of(given_back(1, 5), received(2, 6, k=1)).to_wait(wait_for(k=1)).cursor == 4
    back_again = floors_of(given_back(1, 5), received(2, 6, k=1), received(3, 5, k=1))
    assert back_again.to_wait(wait_for(k=1)).cursor == 6


def test_what_no_letter_brought_is_carried_over_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MAX_CARRIED_CURSORS", 0)
    before = floors_of(Entry(1, EntryKind.MESSAGE, "m:1", "news", True, 0, CODEC.encode("broadcast"), event=7))
    before.received(wait_for(k=1), 9)
    carried = Entry(1, EntryKind.RECUR, "", "", True, 0, value=before.export({}))
    after = floors_of(carried)
    assert after.position(message_on("news")) == 7
    assert after.to_wait(wait_for(k=1)).cursor is None
    assert (
        floors_of(Entry(1, EntryKind.RECUR, "", "", True, 0, value=after.export({}))).position(message_on("news")) == 7
    )


def test_nothing_is_read_on_while_something_of_its_type_was_given_back() -> None:
    floors = floors_of(given_back(1, 5))
    assert not floors.has_no_released("paid")
    assert floors.has_no_released("sent")


def test_what_was_given_back_holds_up_its_own_type_alone() -> None:
    assert floors_of(given_back(1, 5, "sent"), received(2, 6, k=1)).to_wait(wait_for(k=1)).cursor == 6
