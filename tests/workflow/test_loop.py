"""The loop of a run: what it forbids, how it names things, how time passes on it."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from asyncio import AbstractEventLoop
from contextlib import suppress
from typing import Any

import pytest

from edda.errors import NonDeterminismError, NotInWorkflowError, SpinError
from edda.workflow import loop as loop_module
from edda.workflow.execution import IdleState
from edda.workflow.loop import WorkflowLoop

from .recorded_run import STARTED_AT, Body, Flow, Incarnation, running, started

# What is forbidden

WORKING = frozenset(
    {
        *("call_soon", "call_later", "call_at", "time", "create_future", "create_task"),
        *("get_debug", "is_running", "is_closed", "get_task_factory", "shutdown_asyncgens"),
        *("get_exception_handler", "default_exception_handler", "call_exception_handler"),
    }
)
FORBIDDEN = sorted(name for name in dir(AbstractEventLoop) if not name.startswith("_") and name not in WORKING)


@pytest.mark.parametrize("method", FORBIDDEN)
def test_a_forbidden_method_names_itself_and_the_cure(method: str) -> None:
    async def body(_flow: Flow) -> None:
        getattr(asyncio.get_running_loop(), method)()

    named = pytest.raises(NotInWorkflowError, match=rf"^{method}\(\).* workflow \(run run\).*ctx\.step")
    with running(body) as run, named:
        run.outcome()


@pytest.mark.parametrize("method", sorted(WORKING))
def test_what_asyncio_needs_is_there(method: str) -> None:
    assert getattr(WorkflowLoop, method) is not getattr(AbstractEventLoop, method)


def test_a_forbidden_call_is_remembered_when_the_code_swallows_it() -> None:
    async def body(_flow: Flow) -> str:
        for forbidden in ("getaddrinfo", "run_in_executor"):
            with suppress(Exception):  # as libraries do, and the point of this test
                getattr(asyncio.get_running_loop(), forbidden)()
        return "unharmed"

    with running(body) as run:
        assert run.outcome() == "unharmed"
        assert "getaddrinfo" in str(run.loop.forbidden_call), "the first one is kept"


async def open_connection(_flow: Flow) -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def start_a_server(_flow: Flow) -> None:
    await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)


async def use_a_thread(_flow: Flow) -> None:
    await asyncio.to_thread(time.sleep, 0)


async def start_a_process(_flow: Flow) -> None:
    await asyncio.create_subprocess_exec("true")


async def run_a_shell(_flow: Flow) -> None:
    await asyncio.create_subprocess_shell("true")


async def resolve_a_name(_flow: Flow) -> None:
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)


async def use_a_socket(_flow: Flow) -> None:
    with socket.socket() as plain:
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", 1))


async def call_from_a_thread(_flow: Flow) -> None:
    asyncio.get_running_loop().call_soon_threadsafe(lambda: None)


async def fetch_in_a_group(_flow: Flow) -> None:
    """As HTTP clients do: the connection is opened in a task group of their own, its error wrapped."""
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.open_connection("127.0.0.1", 1))


REAL_WORLD = [
    (open_connection, "getaddrinfo|create_connection"),
    (start_a_server, "getaddrinfo|create_server"),
    (use_a_thread, "run_in_executor"),
    (start_a_process, "subprocess_exec"),
    (run_a_shell, "subprocess_shell"),
    (resolve_a_name, "getaddrinfo"),
    (use_a_socket, "sock_connect"),
    (call_from_a_thread, "call_soon_threadsafe"),
    (fetch_in_a_group, "create_connection"),
]


@pytest.mark.parametrize(("body", "method"), REAL_WORLD, ids=lambda value: getattr(value, "__name__", ""))
def test_the_real_world_is_out_of_reach(body: Body, method: str) -> None:
    with running(body) as run:
        with pytest.raises((NotInWorkflowError, ExceptionGroup)):
            run.outcome()
        assert run.loop.forbidden_call is not None
        assert re.match(rf"({method})\(\)", str(run.loop.forbidden_call))


def test_asyncio_run_is_refused_inside_a_workflow() -> None:
    async def body(_flow: Flow) -> None:
        inner = asyncio.sleep(0)
        try:
            asyncio.run(inner)
        finally:
            inner.close()

    with running(body) as run, pytest.raises(RuntimeError, match="running event loop"):
        run.outcome()


def test_a_future_of_another_loop_cannot_be_awaited() -> None:
    real = asyncio.new_event_loop()
    foreign = real.create_future()
    real.close()

    async def body(_flow: Flow) -> None:
        await foreign

    with running(body) as run, pytest.raises(RuntimeError, match="attached to a different loop"):
        run.outcome()


# Verbs and their place


def test_a_verb_in_a_hand_made_task_is_refused() -> None:
    async def body(flow: Flow) -> None:
        async def branch() -> None:
            await flow.step("charge")

        await asyncio.Task(branch())

    explained = pytest.raises(NotInWorkflowError, match=r"charge was called outside.*an asyncio\.Task that was created")
    with running(body) as run, explained:
        run.outcome()


def test_a_verb_called_in_a_branch_may_be_awaited_in_a_hand_made_task() -> None:
    async def body(flow: Flow) -> Any:
        return await asyncio.Task(flow.step("charge"))

    with running(body) as run:
        run.complete("charge:1", 5)
        assert run.outcome() == 5


def test_a_verb_outside_its_workflow_is_refused() -> None:
    flows: list[Flow] = []

    async def body(flow: Flow) -> None:
        flows.append(flow)
        await flow.step("wait")

    with running(body), pytest.raises(NotInWorkflowError, match="charge was called outside"):
        _ = flows[0].step("charge")


def test_a_verb_in_a_callback_is_refused() -> None:
    refused: list[str] = []

    def call_back(flow: Flow) -> None:
        try:
            _ = flow.step("charge")
        except NotInWorkflowError as error:
            refused.append(str(error))

    async def body(flow: Flow) -> None:
        asyncio.get_running_loop().call_soon(call_back, flow)
        await flow.step("wait")

    with running(body):
        assert "not in a callback" in refused[0]


def test_a_verb_in_a_thread_is_refused() -> None:
    refused: list[str] = []

    def call(flow: Flow) -> None:
        try:
            _ = flow.step("charge")
        except NotInWorkflowError as error:
            refused.append(str(error))

    async def body(flow: Flow) -> None:
        thread = threading.Thread(target=call, args=(flow,))
        thread.start()
        thread.join()

    with running(body):
        assert "a thread" in refused[0]


def test_two_pending_steps_cannot_share_an_id() -> None:
    async def body(flow: Flow) -> None:
        await asyncio.gather(flow.step("pay", id="own"), flow.step("pay", id="own"))

    with running(body) as run, pytest.raises(NonDeterminismError, match="two steps with the id 'own'"):
        run.outcome()


def test_an_id_of_its_own_is_free_again_once_its_step_is_done() -> None:
    async def body(flow: Flow) -> list[Any]:
        return [await flow.step("pay", i, id="own") for i in range(2)]

    with running(body) as run:
        run.complete("own", 1)
        run.complete("own", 2)
        assert run.outcome() == [1, 2]
        with running(body, run.history) as again:
            assert again.outcome() == [1, 2]


# Where a run stands


def test_a_run_whose_branches_wait_for_each_other_is_stuck() -> None:
    async def body(_flow: Flow) -> None:
        await asyncio.Event().wait()

    with running(body) as run:
        assert run.idle is IdleState.STUCK
        assert "test_loop.py" in run.loop.stacks()


def test_a_run_is_busy_with_steps_and_waits_for_timers() -> None:
    async def body(flow: Flow) -> None:
        await asyncio.gather(flow.step("charge"), asyncio.sleep(5))

    with running(body) as run:
        seen = [run.idle]
        for id in ("charge:1", "sleep:1/timer:1"):
            run.complete(id)
            seen.append(run.idle)
        assert seen == [IdleState.BUSY, IdleState.WAITING, IdleState.DONE]


async def yield_once() -> None:
    await asyncio.sleep(0)


def test_code_that_spins_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "MAX_CALLBACKS", 1000)

    async def body(_flow: Flow) -> None:
        while True:
            await yield_once()

    run = Incarnation(body)
    with pytest.raises(SpinError, match="run run: 1000 callbacks"):
        run.start()
    run.drop()


def test_branches_left_over_are_cancelled_and_their_clean_up_is_awaited() -> None:
    async def body(flow: Flow) -> str:
        async def branch() -> None:
            try:
                await flow.step("work")
            finally:
                await flow.step("clean_up")

        task = asyncio.create_task(branch())
        await asyncio.sleep(0)
        return task.get_name()

    with running(body) as run:
        assert list(run.pending) == ["branch:1/clean_up:1"]
        run.complete("branch:1/clean_up:1")
        assert run.outcome() == "branch:1"


def test_a_callback_that_fails_is_reported_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def body(flow: Flow) -> Any:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        return await flow.step("charge")

    with running(body) as run:
        run.complete("charge:1", 5)
        assert run.outcome() == 5
        assert "exception in" in caplog.text


# Ids and names


async def charge(flow: Flow) -> Any:
    return await flow.step("charge")


async def gather_verbs(flow: Flow) -> None:
    await asyncio.gather(flow.step("charge"), flow.step("charge"))


async def gather_branches(flow: Flow) -> None:
    await asyncio.gather(charge(flow), charge(flow))


async def wait_for_a_verb(flow: Flow) -> None:
    await asyncio.wait_for(flow.step("charge"), 5)


async def wait_for_a_coroutine(flow: Flow) -> None:
    await asyncio.wait_for(charge(flow), 5)


async def as_completed_verbs(flow: Flow) -> None:
    for next_one in asyncio.as_completed([flow.step("charge"), flow.step("refund")]):
        await next_one


async def as_completed_branches(flow: Flow) -> None:
    for next_one in asyncio.as_completed([charge(flow), charge(flow)], timeout=5):
        await next_one


async def task_group(flow: Flow) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(charge(flow))
        group.create_task(flow.step("charge"))
        await flow.step("charge")


async def nested_branches(flow: Flow) -> None:
    await asyncio.gather(gather_branches(flow), gather_branches(flow))


async def shield_in_a_timeout(flow: Flow) -> None:
    async with asyncio.timeout(5):
        await asyncio.shield(flow.step("charge"))


IDS: list[tuple[Body, list[str]]] = [
    (charge, ["charge:1"]),
    (gather_verbs, ["charge:1", "charge:2"]),
    (gather_branches, ["charge:1/charge:1", "charge:2/charge:1"]),
    (wait_for_a_verb, ["charge:1", "timer:1"]),
    (wait_for_a_coroutine, ["charge:1", "timer:1"]),
    (as_completed_verbs, ["charge:1", "refund:1"]),
    (as_completed_branches, ["charge:1/charge:1", "charge:2/charge:1", "timer:1"]),
    (task_group, ["charge:1/charge:1", "charge:2", "charge:3"]),
    (
        nested_branches,
        [f"gather_branches:{outer}/charge:{inner}/charge:1" for outer in (1, 2) for inner in (1, 2)],
    ),
    (shield_in_a_timeout, ["charge:1", "timer:1"]),
]


@pytest.mark.parametrize(("body", "ids"), IDS, ids=lambda value: getattr(value, "__name__", ""))
def test_ids_are_the_branch_and_the_count_of_the_name(body: Body, ids: list[str]) -> None:
    with running(body) as run:
        assert sorted(run.pending) == ids


def test_an_id_is_taken_when_the_verb_is_called_not_when_it_is_awaited() -> None:
    async def body(flow: Flow) -> None:
        second_awaited, first_awaited = flow.step("charge", 1), flow.step("charge", 2)
        await first_awaited
        await second_awaited

    with running(body) as run:
        assert list(run.pending) == ["charge:2"]
        run.complete("charge:2")
        assert list(run.pending) == ["charge:1"]


def test_an_unnamed_task_is_named_by_its_path() -> None:
    names: list[str] = []

    async def branch() -> None:
        task = asyncio.current_task()
        assert task is not None
        names.append(task.get_name())

    async def body(_flow: Flow) -> None:
        await asyncio.gather(branch(), branch(), asyncio.create_task(branch(), name="mine"))

    with running(body):
        assert names == ["mine", "branch:2", "branch:3"]


# Time


def test_time_stands_still_between_entries_and_never_goes_back() -> None:
    seen: list[float] = []

    async def body(flow: Flow) -> None:
        for _ in range(3):
            seen.append(asyncio.get_running_loop().time())
            await flow.step("charge")

    with running(body) as run:
        run.complete("charge:1", after=2.5)
        run.complete("charge:2", after=-1)
        start = STARTED_AT / 1_000_000
        assert seen == [start, start + 2.5, start + 2.5]


def test_timers_are_commands_with_their_due_time() -> None:
    async def body(_flow: Flow) -> None:
        await asyncio.gather(asyncio.sleep(3), asyncio.sleep(0.5))

    with running(body) as run:
        dues = {id: (command.due or 0) - STARTED_AT for id, command in run.pending.items()}
        assert dues == {"sleep:1/timer:1": 3_000_000, "sleep:2/timer:1": 500_000}


def test_timers_of_the_same_moment_stand_in_order_of_issue() -> None:
    woken: list[int] = []

    async def sleeper(number: int) -> None:
        await asyncio.sleep(5)
        woken.append(number)

    async def body(_flow: Flow) -> None:
        await asyncio.gather(*map(sleeper, range(4)))

    with running(body) as run:
        while run.pending:
            run.complete(min(run.pending.values(), key=lambda command: command.due or 0).id)
        assert woken == [0, 1, 2, 3]


def test_a_cancelled_timer_is_given_up() -> None:
    async def body(flow: Flow) -> None:
        async with asyncio.timeout(5):
            await flow.step("charge")
        await flow.step("ship")

    with running(body) as run:
        assert sorted(run.pending) == ["charge:1", "timer:1"]
        run.complete("charge:1")
        assert list(run.pending) == ["ship:1"]
        assert "abandon timer 'timer:1'" in run.notes


@pytest.mark.parametrize("delay", [0, -1])
def test_a_delay_that_is_over_takes_no_timer(delay: float) -> None:
    async def body(flow: Flow) -> str:
        asyncio.get_running_loop().call_later(delay, lambda: None)
        await asyncio.sleep(delay)
        return "done"

    with running(body) as run:
        assert run.outcome() == "done"


async def sleep_until(end: float) -> None:
    await asyncio.sleep(end - asyncio.get_running_loop().time())


def test_a_timer_never_fires_before_it_is_due_on_the_loop_s_own_clock() -> None:
    """`while loop.time() < end: await asyncio.sleep(end - loop.time())` would go round for ever."""

    async def body(flow: Flow) -> None:
        await flow.step("begin")
        loop = asyncio.get_running_loop()
        end = loop.time() + 14.2
        while loop.time() < end:
            await sleep_until(end)

    for milliseconds in range(400):
        with running(body) as run:
            run.complete("begin:1", after=milliseconds / 997)
            run.complete("timer:1")
            assert run.idle is IdleState.DONE, f"still waits for {run.waits}"


# Many runs at once


@pytest.mark.timed
def test_the_price_of_a_run_does_not_grow_with_the_runs_in_memory() -> None:
    async def body(flow: Flow) -> None:
        await asyncio.gather(*(flow.step("charge") for _ in range(4)))

    def start_some() -> tuple[float, list[Incarnation]]:
        before = time.thread_time()
        runs = [started(body) for _ in range(500)]
        return time.thread_time() - before, runs

    first, runs = start_some()
    later = []
    for _ in range(4):
        took, more = start_some()
        later.append(took)
        runs += more
    for run in runs:
        run.drop()
    assert min(later[1:]) < 3 * first  # the collector may fall into one of them
