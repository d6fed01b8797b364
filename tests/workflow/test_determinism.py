"""Code that changed under a recorded history: what does not fit is refused by name, what fits goes on.

The recorded workflow is `deliver_order`. Each change of it below says which entry it breaks, or breaks none.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from edda.core.model import Entry, EntryKind
from edda.errors import NonDeterminismError
from edda.workflow.execution import IdleState

from .recorded_run import STARTED_AT, Body, Flow, Incarnation, running


async def inform(flow: Flow, order: int) -> Any:
    return await flow.step("inform", order)


async def deliver_order(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 10)
    await flow.nap(5)
    await asyncio.gather(flow.step("ship", order), inform(flow, order), flow.step("log", 1), flow.step("log", 2))
    return await flow.step("close", order)


COMPLETED = ("reserve:1", "charge:1", "nap:1", "inform:1/inform:1", "log:2", "log:1", "ship:1")
"""In the order in which they came in; `close` is still under way, at the frontier."""


def record(body: Body, completed: tuple[str, ...]) -> tuple[Entry, ...]:
    with running(body) as run:
        for value, id in enumerate(completed, start=7):
            run.complete(id, value)
        return tuple(run.history)


HISTORY = record(deliver_order, COMPLETED)


async def tail(flow: Flow, order: Any) -> Any:
    """The part that most changes leave as it is."""
    await asyncio.gather(flow.step("ship", order), inform(flow, order), flow.step("log", 1), flow.step("log", 2))
    return await flow.step("close", order)


async def head(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 10)
    await flow.nap(5)
    return order


# Changes that do not fit


@dataclass(frozen=True)
class Change:
    body: Body
    entry: int
    recorded: str
    """The history's side of the message."""
    found: str
    """The code's side."""


REFUSED: list[Change] = []


def refused(entry: int, recorded: str, found: str) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        REFUSED.append(Change(body, entry, recorded, found))
        return body

    return register


@refused(1, "step 'reserve:1'", "step 'charge:1'")
async def the_first_step_is_gone(flow: Flow) -> Any:
    await flow.step("charge", 7, 10)
    await flow.nap(5)
    return await tail(flow, 7)


@refused(2, "step 'charge:1'", "timer 'nap:1'")
async def a_step_in_the_middle_is_gone(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.nap(5)
    return await tail(flow, order)


@refused(1, "step 'reserve:1'", "step 'check:1'")
async def a_step_is_new_at_the_beginning(flow: Flow) -> Any:
    await flow.step("check")
    return await tail(flow, await head(flow))


@refused(2, "step 'charge:1'", "step 'check:1'")
async def a_step_is_new_in_the_middle(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("check", order)
    await flow.step("charge", order, 10)
    await flow.nap(5)
    return await tail(flow, order)


@refused(2, "step 'charge:1'", "step 'debit:1'")
async def a_step_has_another_name(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("debit", order, 10)
    await flow.nap(5)
    return await tail(flow, order)


@refused(1, "step 'reserve:1'", "step 'charge:1'")
async def two_steps_changed_places(flow: Flow) -> Any:
    await flow.step("charge", 7, 10)
    order = await flow.step("reserve", 1)
    await flow.nap(5)
    return await tail(flow, order)


@refused(2, "step 'charge:1'", "timer 'nap:1'")
async def a_step_and_a_timer_changed_places(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.nap(5)
    await flow.step("charge", order, 10)
    return await tail(flow, order)


@refused(2, "charge with arguments [7,10]", "charge with [7,11]")
async def an_argument_has_another_value(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 11)
    await flow.nap(5)
    return await tail(flow, order)


@refused(2, "charge with arguments [7,10]", "charge with [7,10,null]")
async def an_argument_is_new(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 10, None)
    await flow.nap(5)
    return await tail(flow, order)


@refused(1, "reserve with arguments [1]", "reserve with [")
async def an_argument_is_the_time(flow: Flow) -> Any:
    return await flow.step("reserve", time.time_ns())


@refused(1, "reserve with arguments [1]", "reserve with [")
async def an_argument_is_random(flow: Flow) -> Any:
    return await flow.step("reserve", random.random())


@refused(1, "reserve with arguments [1]", "reserve with [")
async def an_argument_is_a_new_uuid(flow: Flow) -> Any:
    return await flow.step("reserve", uuid.uuid4())


@refused(1, "reserve with arguments [1]", "reserve with [")
async def an_argument_is_of_this_process(flow: Flow) -> Any:
    return await flow.step("reserve", os.getpid())


@refused(3, "timer 'nap:1'", "step 'nap:1'")
async def a_timer_became_a_step(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 10)
    await flow.step("nap", 5)
    return await tail(flow, order)


@refused(3, "timer 'nap:1'", "timer 'timer:1'")
async def a_timer_became_another_kind_of_timer(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 10)
    await asyncio.sleep(5)
    return await tail(flow, order)


@refused(3, "timer 'nap:1'", "step 'ship:1'")
async def a_timer_is_gone(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 10)
    return await tail(flow, order)


@refused(3, "timer 'nap:1'", "nothing: it has returned")
async def the_code_ends_earlier(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 10)
    return order


@refused(3, "timer 'nap:1'", "nothing: it has returned")
async def the_code_fails_earlier(flow: Flow) -> Any:
    await flow.step("charge", await flow.step("reserve", 1), 10)
    raise ValueError("a new check")


@refused(3, "timer 'nap:1'", "nothing")
async def the_code_waits_for_nothing(flow: Flow) -> Any:
    await flow.step("charge", await flow.step("reserve", 1), 10)
    await asyncio.Event().wait()


@refused(4, "step 'inform:1/inform:1'", "step 'ship:1'")
async def branches_became_a_sequence(flow: Flow) -> Any:
    order = await head(flow)
    await flow.step("ship", order)
    await inform(flow, order)


@refused(4, "step 'inform:1/inform:1'", "step 'inform:1'")
async def a_branch_became_a_plain_call(flow: Flow) -> Any:
    order = await head(flow)
    await asyncio.gather(flow.step("ship", order), flow.step("inform", order), flow.step("log", 1), flow.step("log", 2))


@refused(4, "step 'inform:1/inform:1'", "step 'tell:1/inform:1'")
async def a_branch_has_another_name(flow: Flow) -> Any:
    async def tell() -> Any:
        return await flow.step("inform", order)

    order = await head(flow)
    await asyncio.gather(flow.step("ship", order), tell(), flow.step("log", 1), flow.step("log", 2))


@refused(4, "step 'inform:1/inform:1'", "step 'ship:1', step 'log:1', step 'log:2'")
async def a_branch_is_gone(flow: Flow) -> Any:
    order = await head(flow)
    await asyncio.gather(flow.step("ship", order), flow.step("log", 1), flow.step("log", 2))


@refused(5, "log with arguments [2]", "log with [1]")
async def calls_of_one_name_changed_places(flow: Flow) -> Any:
    order = await head(flow)
    await asyncio.gather(flow.step("ship", order), inform(flow, order), flow.step("log", 2), flow.step("log", 1))


@refused(5, "step 'log:2'", "step 'ship:1', step 'log:1'")
async def a_loop_goes_round_once_less(flow: Flow) -> Any:
    order = await head(flow)
    await asyncio.gather(flow.step("ship", order), inform(flow, order), *(flow.step("log", i) for i in (1,)))


@refused(5, "step 'log:2'", "step 'close:1'")
async def a_race_is_over_at_the_first_to_come(flow: Flow) -> Any:
    order = await head(flow)
    verbs = (flow.step("ship", order), inform(flow, order), flow.step("log", 1), flow.step("log", 2))
    branches = [asyncio.create_task(verb) for verb in verbs]
    _, losers = await asyncio.wait(branches, return_when=asyncio.FIRST_COMPLETED)
    for loser in losers:
        loser.cancel()
    return await flow.step("close", order)


@refused(2, "step 'charge:1'", "step 'payment-7'")
async def a_step_has_an_id_of_its_own_now(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 10, id=f"payment-{order}")


@refused(2, "charge:1' = charge", "debit")
async def an_id_of_its_own_hides_another_step(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("debit", order, 10, id="charge:1")


@refused(2, "step 'charge:1'", "step 'refuse:1'")
async def a_condition_goes_the_other_way(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("refuse" if order < 100 else "charge", order, 10)


@refused(2, "charge with arguments [7,10]", "charge with [7,11]")
async def the_code_would_swallow_the_error(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    try:
        await flow.step("charge", order, 11)
    except Exception:
        await flow.step("refund", order)
    return await tail(flow, order)


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.body.__name__)
def test_a_change_that_does_not_fit_is_refused_with_entry_and_both_sides(change: Change) -> None:
    text = refusal(lambda: replay(change.body, HISTORY))
    assert f"run run, entry {change.entry}: the history has" in text
    recorded, _, found = text.partition(", the code ")
    assert change.recorded in recorded
    assert change.found in found


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.body.__name__)
def test_up_to_the_change_the_history_is_gone_through(change: Change) -> None:
    replay(change.body, HISTORY[: change.entry - 1])


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.body.__name__)
def test_an_entry_delivered_by_itself_is_refused_in_the_same_place(change: Change) -> None:
    with running(change.body) as run:
        text = refusal(lambda: deliver_all(run))
    assert f"run run, entry {change.entry}: the history has" in text
    assert change.recorded in text


def deliver_all(run: Incarnation) -> None:
    for entry in HISTORY:
        run.deliver(entry)


def replay(body: Body, history: tuple[Entry, ...]) -> None:
    with running(body, history):
        pass


def refusal(do: Callable[[], object]) -> str:
    with pytest.raises(NonDeterminismError) as refused:
        do()
    return str(refused.value)


# Changes that fit


async def nothing_changed(flow: Flow) -> Any:
    return await deliver_order(flow)


async def a_step_is_new_behind_the_frontier(flow: Flow) -> Any:
    order = await head(flow)
    await tail(flow, order)
    return await flow.step("thank", order)


async def a_branch_is_new_at_the_frontier(flow: Flow) -> Any:
    order = await head(flow)
    await asyncio.gather(flow.step("ship", order), inform(flow, order), flow.step("log", 1), flow.step("log", 2))
    await asyncio.gather(flow.step("close", order), inform(flow, order))


async def a_branch_is_new_beside_recorded_ones(flow: Flow) -> Any:
    order = await head(flow)
    asyncio.create_task(flow.step("measure"), name="measure")  # noqa: RUF006 - the run keeps it
    return await tail(flow, order)


async def the_step_at_the_frontier_is_gone(flow: Flow) -> Any:
    order = await head(flow)
    await asyncio.gather(flow.step("ship", order), inform(flow, order), flow.step("log", 1), flow.step("log", 2))
    return order


async def branches_of_other_names_changed_places(flow: Flow) -> Any:
    order = await head(flow)
    await asyncio.gather(flow.step("log", 1), flow.step("log", 2), inform(flow, order), flow.step("ship", order))
    return await flow.step("close", order)


async def gather_became_a_task_group(flow: Flow) -> Any:
    order = await head(flow)
    async with asyncio.TaskGroup() as group:
        group.create_task(flow.step("ship", order))
        group.create_task(inform(flow, order))
        group.create_task(flow.step("log", 1))
        await flow.step("log", 2)
    return await flow.step("close", order)


async def a_step_is_bounded_in_time(flow: Flow) -> Any:
    order = await asyncio.wait_for(flow.step("reserve", 1), 60)
    async with asyncio.timeout(60):
        await flow.step("charge", order, 10)
    await flow.nap(5)
    return await tail(flow, order)


async def a_step_is_awaited_through_a_task(flow: Flow) -> Any:
    order = await asyncio.create_task(flow.step("reserve", 1))
    await flow.step("charge", order, 10)
    await flow.nap(5)
    return await tail(flow, order)


async def a_timer_that_fired_has_another_length(flow: Flow) -> Any:
    order = await flow.step("reserve", 1)
    await flow.step("charge", order, 10)
    await flow.nap(50)
    return await tail(flow, order)


async def plain_code_is_written_anew(flow: Flow) -> Any:
    async def run_both(*verbs: Coroutine[Any, Any, Any]) -> list[Any]:
        return [await verb for verb in verbs]

    order, _ = await run_both(flow.step("reserve", 1), flow.step("charge", 7, 10))
    await flow.nap(5)
    return await tail(flow, order)


ALLOWED: list[Body] = [
    nothing_changed,
    a_step_is_new_behind_the_frontier,
    a_branch_is_new_at_the_frontier,
    a_branch_is_new_beside_recorded_ones,
    the_step_at_the_frontier_is_gone,
    branches_of_other_names_changed_places,
    gather_became_a_task_group,
    a_step_is_bounded_in_time,
    a_step_is_awaited_through_a_task,
    a_timer_that_fired_has_another_length,
    plain_code_is_written_anew,
]


@pytest.mark.parametrize("body", ALLOWED, ids=lambda body: body.__name__)
def test_a_change_that_fits_goes_on(body: Body) -> None:
    with running(body, HISTORY) as run:
        assert run.length == len(HISTORY)
        assert not run.replaying
        while run.pending:
            run.complete(next(iter(run.pending)))
        assert run.idle is IdleState.DONE
        run.outcome()


def test_recorded_steps_in_a_row_are_gone_through_without_being_issued_again() -> None:
    with running(deliver_order, HISTORY[:2]) as run:
        assert [command.id for command in run.take_issued()] == ["nap:1"]


def test_the_run_goes_on_after_the_code_is_restored() -> None:
    refusal(lambda: replay(a_step_has_another_name, HISTORY))
    with running(deliver_order, HISTORY) as run:
        run.complete("close:1", "closed")
        assert run.outcome() == "closed"


# Entries of other kinds


def test_a_retry_of_a_step_that_is_gone_is_refused() -> None:
    retry = Entry(1, EntryKind.RETRY, "reserve:1", "reserve", ok=False, at=STARTED_AT)
    text = refusal(lambda: replay(the_first_step_is_gone, (retry,)))
    assert "entry 1: the history has retry 'reserve:1' here, the code waits for step 'charge:1'" in text


def test_a_retry_counts_the_attempts_of_its_step() -> None:
    retry = Entry(1, EntryKind.RETRY, "reserve:1", "reserve", ok=False, at=STARTED_AT + 3, attempt=2)
    with running(deliver_order, [retry]) as run:
        command = run.pending["reserve:1"]
        assert (command.attempt, command.retry_at) == (3, STARTED_AT + 3)


def test_a_late_outcome_of_any_command_runs_no_code() -> None:
    late = Entry(1, EntryKind.LATE, "gone:1", "gone", ok=True, at=STARTED_AT + 3)
    with running(deliver_order, [late]) as run:
        assert list(run.pending) == ["reserve:1"]
        assert run.now == STARTED_AT + 3


@pytest.mark.parametrize("kind", [EntryKind.CANCEL, EntryKind.TIMEOUT])
def test_a_cancel_reaches_the_code_with_its_reason(kind: EntryKind) -> None:
    cancel = Entry(1, kind, "", "the shop is closed", ok=True, at=STARTED_AT)
    with running(deliver_order, [cancel]) as run:
        with pytest.raises(asyncio.CancelledError, match="the shop is closed"):
            run.outcome()
        assert "abandon step 'reserve:1'" in run.notes


def test_entries_behind_the_end_are_refused_but_not_those_that_move_no_code() -> None:
    async def body(flow: Flow) -> Any:
        return await flow.step("reserve", 1)

    late = Entry(2, EntryKind.LATE, "gone:1", "gone", ok=True, at=STARTED_AT)
    cancel = Entry(3, EntryKind.CANCEL, "", "too late", ok=True, at=STARTED_AT)
    with running(body, [HISTORY[0], late, cancel]) as run:
        assert run.outcome() == 7
    text = refusal(lambda: replay(body, HISTORY[:2]))
    assert "entry 2: the history has step 'charge:1' here, the code waits for nothing: it has returned" in text


# Values that cannot be read any more


class UnreadableError(Exception):
    """The recorded value does not fit what the code expects of it."""


@pytest.mark.parametrize("alone", [True, False], ids=["by the short cut", "the long way"])
def test_a_value_that_cannot_be_read_stops_the_replay_where_no_code_can_swallow_it(alone: bool) -> None:
    def decode(_entry: Entry) -> Any:
        raise UnreadableError

    async def body(flow: Flow) -> str:
        assert flow.execution is not None
        verb = flow.execution.call(EntryKind.STEP, "reserve", b"[1]", decode=decode)
        try:
            await (verb if alone else asyncio.gather(verb, flow.step("other")))
        except Exception:
            return "swallowed"
        return "read"

    run = Incarnation(body, HISTORY[:1])
    with pytest.raises(UnreadableError):
        run.start()
    run.drop()
