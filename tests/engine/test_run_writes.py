"""What a run writes with which entry: no effect is ahead of its cause, and no record needs another of its own write."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import (
    AckInbox,
    ClaimedRun,
    End,
    Entry,
    EntryKind,
    RunId,
    RunSignal,
    RunValue,
    Start,
    StepCommit,
    Suspend,
)
from edda.core.states import RunStatus
from edda.engine.run.writes import RunWriteBuffer
from tests.storage.records import SUSPENDED, cancel_signal, child, done, end_signal, entry, outbox_event, start, wait

RUN, CHILD, WATCHER = RunId("run-1"), RunId("child-1"), RunId("watcher-1")
MANY = 1_000


def buffer(*, waits: Sequence[tuple[str, bytes]] = (), inbox_read: int = 0, new: Start | None = None) -> RunWriteBuffer:
    claimed = ClaimedRun(
        RUN,
        "checkout",
        generation=0,
        epoch=1,
        input=b"",
        created_at=0,
        deadline=None,
        inbox_read=inbox_read,
        attempts=0,
        entries=(),
        inbox=(),
        waits=tuple(waits),
    )
    return RunWriteBuffer(claimed, new)


def late_event(seq: int, inbox_no: int) -> Entry:
    return Entry(seq, EntryKind.LATE_EVENT, "wait:1", "paid", ok=True, at=1, inbox_no=inbox_no, event=7)


# Signals and children


def test_a_signal_is_written_with_its_entry_and_not_before() -> None:
    writes = buffer()
    for seq in (1, 2, 3):
        writes.add(entry(seq))
    writes.add_signal(end_signal(WATCHER), 2)
    signals = []
    while (write := writes.take(1)) is not None:
        signals.append(write.signals)
    assert signals == [(), (end_signal(WATCHER),), ()]


def test_a_signal_to_a_new_child_is_in_a_later_write_than_the_childs_rows() -> None:
    """One statement does not see its own rows."""
    writes = buffer()
    writes.add(entry(1))
    writes.start_child(child(CHILD, RUN), 1)
    writes.add(entry(2))
    writes.add_signal(cancel_signal(CHILD), 2)
    first, second = writes.take(MANY), writes.take(MANY)
    assert first is not None
    assert second is not None
    assert (first.entries, first.children, first.signals) == ((entry(1),), (child(CHILD, RUN),), ())
    assert (second.entries, second.children, second.signals) == ((entry(2),), (), (cancel_signal(CHILD),))


def test_signals_of_entries_are_not_in_one_write_with_the_transition() -> None:
    """They would be lost if the transition is refused."""
    writes = buffer()
    writes.add(entry(1))
    writes.add_signal(cancel_signal(CHILD), 1)
    writes.leave(done(), (end_signal(WATCHER),))
    first, second = writes.take(MANY), writes.take(MANY)
    assert first is not None
    assert second is not None
    assert (first.transition, first.signals) == (AckInbox(0), (cancel_signal(CHILD),))
    assert (second.transition, second.signals) == (done(), (end_signal(WATCHER),))


def test_the_targets_are_those_of_the_entries_and_of_the_transition() -> None:
    writes = buffer()
    assert writes.signal_targets == frozenset()
    writes.add(entry(1))
    writes.add_signal(cancel_signal(CHILD), 1)
    assert writes.signal_targets == {CHILD}
    writes.leave(done(), (RunSignal(WATCHER, EntryKind.CHILD),))
    assert writes.signal_targets == {CHILD, WATCHER}
    writes.take(MANY)
    assert writes.signal_targets == {WATCHER}


# The inbox


def test_all_items_of_a_write_are_acknowledged() -> None:
    writes = buffer(inbox_read=3)
    for seq, inbox_no in ((1, 4), (2, 5), (3, 6)):
        writes.add(entry(seq, n=inbox_no))
    first, second = writes.take(2), writes.take(MANY)
    assert first is not None
    assert second is not None
    assert (first.transition, second.transition) == (AckInbox(5), AckInbox(6))


def test_an_end_acknowledges_the_items_of_its_write() -> None:
    """If the end is refused, the run stays open: what it has read must not be read again."""
    writes = buffer()
    writes.add(entry(1, n=1))
    writes.leave(done())
    write = writes.take(MANY)
    assert write is not None
    assert isinstance(write.transition, End)
    assert write.transition.inbox_read == 1


def test_only_the_items_of_late_events_are_released() -> None:
    writes = buffer()
    writes.add(entry(1, n=1))
    writes.add(late_event(2, 2))
    write = writes.take(MANY)
    assert write is not None
    assert write.released_items == (2,)


# Waits


def test_a_wait_that_is_cancelled_and_asked_for_again_is_registered_in_the_next_write() -> None:
    again = wait(RUN, "wait:1", "paid")
    writes = buffer(waits=[("wait:1", again.key)])
    writes.cancel_wait("wait:1")
    writes.add_wait(again)
    first, second = writes.take(MANY), writes.take(MANY)
    assert first is not None
    assert second is not None
    assert (first.cancelled_waits, first.waits) == (("wait:1",), ())
    assert (second.cancelled_waits, second.waits) == ((), (again,))


def test_a_wait_is_registered_after_the_write_that_releases_an_item() -> None:
    again = wait(RUN, "wait:1", "paid")
    writes = buffer()
    writes.add(late_event(1, 1))
    writes.add_wait(again)
    first, second = writes.take(MANY), writes.take(MANY)
    assert first is not None
    assert second is not None
    assert (first.released_items, first.waits) == ((1,), ())
    assert (second.released_items, second.waits) == ((), (again,))


def test_a_wait_that_was_never_registered_is_not_cancelled() -> None:
    writes = buffer()
    writes.add_wait(wait(RUN, "wait:1", "paid"))
    writes.cancel_wait("wait:1")
    assert writes.take(MANY) is None


def test_waits_of_a_new_run_that_may_find_an_event_follow_its_rows() -> None:
    plain, later, exclusive = (
        wait(RUN, "wait:1", "paid"),
        wait(RUN, "wait:2", "paid", cursor=3),
        wait(RUN, "wait:3", "jobs", exclusive=True),
    )
    writes = buffer(new=start(RUN))
    for one in (plain, later, exclusive):
        writes.add_wait(one)
    writes.leave(SUSPENDED, waiting=True)
    first, second = writes.take(MANY), writes.take(MANY)
    assert first is not None
    assert second is not None
    assert (first.start, first.waits, first.transition) == (start(RUN), (plain,), AckInbox(0))
    assert (second.start, second.waits, second.transition) == (None, (later, exclusive), SUSPENDED)


def test_a_run_that_does_not_leave_to_wait_registers_no_wait() -> None:
    writes = buffer()
    writes.add_wait(wait(RUN, "wait:1", "paid"))
    parked = Suspend(0, 5, RunStatus.PARKED, "the code changed")
    writes.leave(parked)
    write = writes.take(MANY)
    assert write is not None
    assert (write.waits, write.transition) == ((), parked)


def test_a_refused_suspend_can_be_requested_again() -> None:
    writes = buffer()
    writes.leave(SUSPENDED, waiting=True)
    assert writes.take(MANY) is not None
    writes.cancel_suspend()
    assert writes.transition is None
    writes.leave(SUSPENDED, waiting=True)
    write = writes.take(MANY)
    assert write is not None
    assert write.transition == SUSPENDED


# Other records


def test_records_are_written_with_the_entry_that_they_belong_to() -> None:
    writes = buffer()
    for seq in (1, 2):
        writes.add(entry(seq))
    writes.attach(StepCommit("step1", 1, b"", 0), 1)
    writes.attach(outbox_event("first"), 1)
    writes.attach(outbox_event("second"), 2)
    first, second = writes.take(1), writes.take(1)
    assert first is not None
    assert second is not None
    assert (first.recorded_steps, first.outbox_events) == (("step1",), (outbox_event("first"),))
    assert (second.recorded_steps, second.outbox_events) == ((), (outbox_event("second"),))


def test_the_last_value_of_a_name_is_written() -> None:
    writes = buffer()
    writes.add(entry(1))
    for value in (b"old", b"new"):
        writes.attach(RunValue("phase", value), 1)
    write = writes.take(MANY)
    assert write is not None
    assert write.values == (RunValue("phase", b"new"),)


def test_a_run_whose_records_are_refused_writes_its_failure_and_nothing_else() -> None:
    writes = buffer()
    writes.add(entry(1))
    writes.start_child(child(CHILD, RUN), 1)
    writes.add_signal(cancel_signal(CHILD), 1)
    writes.attach(RunValue("phase", b"bad"), 0)
    writes.attach(outbox_event("bad"), 1)
    writes.add_wait(wait(RUN, "wait:1", "paid"))
    failed = End(RunStatus.FAILED, b"refused", 9)
    writes.replace_with_failure(failed, (end_signal(WATCHER),))
    write = writes.take(MANY)
    assert write is not None
    assert (write.entries, write.children, write.outbox_events, write.values, write.waits) == ((), (), (), (), ())
    assert (write.transition, write.signals) == (failed, (end_signal(WATCHER),))
    assert writes.take(MANY) is None
