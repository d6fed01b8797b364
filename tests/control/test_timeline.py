"""The timeline of a run."""

from __future__ import annotations

from typing import Any

from edda.control.timeline import TimelineInput, build_timeline
from edda.control.views import Bar, BarState, ErrorView, Timeline
from edda.core.model import MICROSECONDS, Entry, EntryKind, RunId, RunRecord, Wait, WorkerId
from edda.core.states import RunStatus
from edda.workflow.context import as_datetime

BORN = 1_000 * MICROSECONDS


def at(second: int) -> int:
    return BORN + second * MICROSECONDS


def history(*lines: tuple[EntryKind, str, int, dict[str, Any]]) -> tuple[Entry, ...]:
    return tuple(
        Entry(place, kind, step, step.rpartition("/")[2].partition(":")[0], more.pop("ok", True), at(second), **more)
        for place, (kind, step, second, more) in enumerate(lines, 1)
    )


def draw(
    entries: tuple[Entry, ...], status: RunStatus = RunStatus.COMPLETED, waits: tuple[Wait, ...] = (), **known: Any
) -> Timeline:
    ended_at = at(100) if status in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED) else None
    base: dict[str, Any] = {"owner": None, "ready_at": None, "reason": None, "ended_at": ended_at, "value": None}
    record = RunRecord(RunId("r"), "order", 0, status, b"{}", BORN, None, **{**base, **known})
    glance = TimelineInput(
        record, 0, BORN, waits, at(200), lambda value: ErrorView("E", value.decode()), lambda value: ("child-1", True)
    )
    return build_timeline(entries, glance)


def span(bar: Bar) -> tuple[int, int | None]:
    seconds = [None if moment is None else round((moment - as_datetime(BORN)).total_seconds()) for moment in _ends(bar)]
    assert seconds[0] is not None
    return seconds[0], seconds[1]


def _ends(bar: Bar) -> tuple[Any, Any]:
    return bar.since, bar.until


def test_steps_in_a_row_begin_where_the_one_before_ended() -> None:
    timeline = draw(history((EntryKind.STEP, "a:1", 5, {}), (EntryKind.STEP, "b:1", 9, {"ok": False, "value": b"x"})))
    assert [(bar.step, bar.state, span(bar)) for bar in timeline.bars] == [
        ("a:1", BarState.DONE, (0, 5)),
        ("b:1", BarState.FAILED, (5, 9)),
    ]
    assert timeline.until == as_datetime(at(100))


def test_a_branch_is_not_below_one_whose_name_begins_like_it() -> None:
    lines = history((EntryKind.STEP, "flow:10/a:1", 5, {}), (EntryKind.STEP, "flow:1/b:1", 9, {}))
    assert {bar.step: span(bar) for bar in draw(lines).bars} == {"flow:10/a:1": (0, 5), "flow:1/b:1": (0, 9)}


def test_a_branch_goes_on_when_one_below_it_has_moved() -> None:
    lines = history(
        (EntryKind.STEP, "flow:1/flow:1/a:1", 3, {}),
        (EntryKind.STEP, "flow:1/b:1", 5, {}),
        (EntryKind.STEP, "flow:1/flow:1/c:1", 9, {}),
    )
    assert {bar.step: span(bar) for bar in draw(lines).bars} == {
        "flow:1/flow:1/a:1": (0, 3),
        "flow:1/b:1": (3, 5),
        "flow:1/flow:1/c:1": (5, 9),
    }


def test_steps_of_parallel_branches_overlap_and_what_follows_begins_after_both() -> None:
    timeline = draw(
        history(
            (EntryKind.STEP, "a:1", 2, {}),
            (EntryKind.STEP, "flow:1/b:1", 5, {}),
            (EntryKind.STEP, "flow:2/c:1", 8, {}),
            (EntryKind.STEP, "flow:1/d:1", 9, {}),
            (EntryKind.STEP, "e:1", 12, {}),
        )
    )
    assert {bar.step: span(bar) for bar in timeline.bars} == {
        "a:1": (0, 2),
        "flow:1/b:1": (2, 5),
        "flow:2/c:1": (2, 8),
        "flow:1/d:1": (5, 9),
        "e:1": (9, 12),
    }


def test_attempts_are_parts_of_their_step() -> None:
    timeline = draw(
        history(
            (EntryKind.RETRY, "a:1", 1, {"ok": False, "value": b"one", "attempt": 1}),
            (EntryKind.HEARTBEAT, "a:1", 2, {"attempt": 2}),
            (EntryKind.RETRY, "a:1", 3, {"ok": False, "value": b"two", "attempt": 2}),
            (EntryKind.STEP, "a:1", 6, {"attempt": 3}),
        )
    )
    (bar,) = timeline.bars
    assert (bar.state, span(bar), bar.entries) == (BarState.DONE, (0, 6), (1, 2, 3, 4))
    assert [(one.number, one.ok, one.error and one.error.message) for one in bar.attempts] == [
        (1, False, "one"),
        (2, False, "two"),
        (3, True, None),
    ]


def test_a_wait_is_open_until_its_event_comes() -> None:
    wait = Wait("paid:1", b"", b"", "paid", b"{}", due=at(300))
    message = Wait("news:1", b"", b"", "channel/news", b'"broadcast"')
    timeline = draw(
        history((EntryKind.STEP, "a:1", 5, {})), RunStatus.WAITING_FOR_EVENT, (wait, message), reason="paid"
    )
    assert [(bar.name, bar.kind, bar.state, span(bar)) for bar in timeline.bars[1:]] == [
        ("paid", "event", BarState.WAITING, (5, None)),
        ("news", "message", BarState.WAITING, (5, None)),
    ]
    assert timeline.until == as_datetime(at(200))


def test_a_wait_that_was_over_in_time_is_over_and_one_that_was_met_names_its_event() -> None:
    timeline = draw(
        history((EntryKind.EVENT, "paid:1", 5, {"ok": False}), (EntryKind.EVENT, "paid:2", 9, {"event": 77}))
    )
    assert [(bar.state, bar.event) for bar in timeline.bars] == [(BarState.OVER, None), (BarState.DONE, 77)]


def test_children_go_from_their_start_to_their_end() -> None:
    started = (EntryKind.START, "ship:1", 2, {"value": b"x"})
    whole = draw(history(started, (EntryKind.STEP, "a:1", 4, {}), (EntryKind.CHILD, "ship:1", 9, {})))
    assert [(bar.kind, bar.child, span(bar)) for bar in whole.bars if bar.child] == [("child", "child-1", (0, 9))]
    waiting = draw(history(started), RunStatus.WAITING_FOR_CHILD)
    assert [(bar.state, bar.until) for bar in waiting.bars] == [(BarState.WAITING, None)]
    stopped = draw(history(started, (EntryKind.CANCEL, "", 5, {})), RunStatus.CANCELLED)
    assert [(bar.state, span(bar)) for bar in stopped.bars] == [(BarState.OVER, (0, 100))]


def test_undoing_has_bars_of_its_own_kind() -> None:
    timeline = draw(history((EntryKind.STEP, "a:1", 2, {}), (EntryKind.STEP, "undo:1/release", 5, {})))
    assert [(bar.kind, span(bar)) for bar in timeline.bars] == [("step", (0, 2)), ("undo", (2, 5))]


def test_a_sleep_and_a_step_under_way_are_shown() -> None:
    asleep = draw((), RunStatus.WAITING_FOR_TIMER, reason="timer 'timer:1'", ready_at=at(900))
    assert [(bar.step, bar.kind, bar.state) for bar in asleep.bars] == [("timer:1", "timer", BarState.WAITING)]
    running = draw((), RunStatus.RUNNING, owner=WorkerId("w"))
    assert [(bar.step, bar.state) for bar in running.bars] == [("", BarState.RUNNING)]
    retried = draw(
        history((EntryKind.RETRY, "a:1", 3, {"ok": False, "value": b"x"})),
        RunStatus.WAITING_FOR_TIMER,
        reason="step 'a:1'",
    )
    (bar,) = retried.bars
    assert (bar.state, [one.number for one in bar.attempts]) == (BarState.WAITING, [1, 2])


def test_a_late_outcome_is_over_and_a_stray_has_no_bar() -> None:
    timeline = draw(history((EntryKind.LATE, "a:1", 3, {}), (EntryKind.LATE_EVENT, "paid:1", 4, {"event": 5})))
    assert [(bar.step, bar.state) for bar in timeline.bars] == [("a:1", BarState.OVER)]


def test_a_run_that_was_tried_again_has_a_past_before_its_generation() -> None:
    timeline = draw(history((EntryKind.STEP, "a:1", -50, {}), (EntryKind.STEP, "b:1", 5, {})))
    assert timeline.since == as_datetime(at(-50))
    assert all(bar.until is None or bar.since <= bar.until for bar in timeline.bars)


def test_an_empty_history_is_an_empty_line() -> None:
    assert draw(()).bars == ()


def test_a_wait_counts_rejected_items_and_lists_the_last() -> None:
    rejected = [(EntryKind.REJECTED, "paid:1", second, {"ok": False, "value": b"x"}) for second in range(1, 31)]
    (waiting,) = draw(history(*rejected), RunStatus.WAITING_FOR_EVENT).bars
    assert (waiting.kind, waiting.state, waiting.rejected) == ("event", BarState.WAITING, 30)
    assert waiting.entries == tuple(range(21, 31))
    done = draw(history(*rejected, (EntryKind.MESSAGE, "paid:1", 40, {"event": 7}))).bars[0]
    assert (done.kind, done.state, done.rejected, done.event) == ("message", BarState.DONE, 30, 7)
    assert (done.entries, span(done)) == ((*range(21, 31), 31), (0, 40))
