"""Leaving memory: wherever the code stands, nothing stays pending, nothing warns, the collector has nothing to do."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any

import pytest

from edda.core.model import Entry, EntryKind
from edda.workflow import loop as workflow_loop
from edda.workflow.execution import IdleState
from edda.workflow.loop import Suspended, WorkflowLoop

from .recorded_run import STARTED_AT, Body, Flow, running, started

SEEN: list[str] = []
COLOUR: ContextVar[str] = ContextVar("colour")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    SEEN.clear()
    workflow_loop._stuck.clear()
    yield
    SEEN.clear()


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# Code in the middle of something


async def clean_up_with_a_step(flow: Flow) -> None:
    try:
        await flow.step("work")
    finally:
        SEEN.append("finally")
        await flow.step("clean_up")
        SEEN.append("NEVER")


async def clean_up_with_gather(flow: Flow) -> None:
    async def clean_up() -> None:
        await flow.step("clean_up")

    try:
        await flow.step("work")
    finally:
        await asyncio.gather(clean_up(), clean_up())
        SEEN.append("NEVER")


async def clean_up_with_verbs_in_gather(flow: Flow) -> None:
    try:
        await flow.step("work")
    finally:
        await asyncio.gather(flow.step("one"), flow.step("other"))
        SEEN.append("NEVER")


async def clean_up_with_wait_for(flow: Flow) -> None:
    try:
        await flow.step("work")
    finally:
        await asyncio.wait_for(flow.step("clean_up"), 5)
        SEEN.append("NEVER")


async def clean_up_with_as_completed(flow: Flow) -> None:
    try:
        await flow.step("work")
    finally:
        for next_one in asyncio.as_completed([flow.step("one"), flow.step("other")]):
            await next_one
        SEEN.append("NEVER")


async def clean_up_in_a_group(flow: Flow) -> None:
    async def clean_up() -> None:
        await flow.step("clean_up")

    try:
        await flow.step("work")
    finally:
        async with asyncio.TaskGroup() as group:
            group.create_task(clean_up())
            group.create_task(clean_up(), name="named")
        SEEN.append("NEVER")


async def clean_up_shielded(flow: Flow) -> None:
    try:
        await flow.step("work")
    finally:
        await asyncio.shield(flow.step("clean_up"))
        SEEN.append("NEVER")


async def clean_up_after_a_pause(flow: Flow) -> None:
    try:
        await flow.step("work")
    finally:
        await asyncio.sleep(0)
        await asyncio.sleep(5)
        SEEN.append("NEVER")


async def swallow_everything_and_return(flow: Flow) -> int:
    try:
        await flow.step("work")
    except BaseException as error:  # what this test is about
        SEEN.append(type(error).__name__)
    return 1


async def turn_it_into_another_error(flow: Flow) -> None:
    try:
        await flow.step("work")
    except BaseException as error:
        raise ValueError("something went wrong") from error


async def wait_in_a_group(flow: Flow) -> None:
    async def branch() -> None:
        try:
            await flow.step("work")
        except (asyncio.CancelledError, Exception):
            SEEN.append("NEVER: a suspend is neither a cancel nor an error")
            raise

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(branch())
            group.create_task(branch())
            await flow.step("work")
    except* Exception:
        SEEN.append("NEVER")


async def hold_everything_at_once(flow: Flow) -> None:
    @asynccontextmanager
    async def room() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(5)
            SEEN.append("NEVER")

    async with room(), asyncio.timeout(10), asyncio.Lock(), asyncio.Semaphore():
        await asyncio.shield(asyncio.gather(flow.step("work"), asyncio.sleep(9)))


async def iterate_a_generator(flow: Flow) -> None:
    async def generate() -> AsyncGenerator[Any, None]:
        try:
            while True:
                yield await flow.step("work")
        finally:
            SEEN.append("finally")
            await flow.step("clean_up")
            SEEN.append("NEVER")

    async with aclosing(generate()) as values:
        async for _ in values:
            pass


async def iterate_a_generator_in_a_task(flow: Flow) -> None:
    async def generate() -> AsyncGenerator[Any, None]:
        try:
            yield await flow.step("work")
        finally:
            await flow.step("clean_up")

    task: asyncio.Task[Any] = asyncio.ensure_future(generate().__anext__())
    await task


async def leave_branches_unstarted(flow: Flow) -> None:
    async def branch() -> None:
        await flow.step("work")

    async def start_and_fail() -> None:
        SEEN.extend(task.get_name() for task in (asyncio.create_task(branch()), asyncio.create_task(asyncio.sleep(5))))
        asyncio.create_task(flow.step("work"))  # noqa: RUF006 - left alone on purpose

    await start_and_fail()
    await flow.step("work")


async def wait_for_a_condition(flow: Flow) -> None:
    condition = asyncio.Condition()

    async def branch() -> None:
        async with condition:
            await condition.wait()

    await asyncio.gather(branch(), branch(), flow.step("work"))


async def wait_for_a_queue_and_an_event(flow: Flow) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    await asyncio.gather(queue.get(), queue.join(), asyncio.Event().wait(), flow.step("work"))


async def race(flow: Flow) -> None:
    tasks = [asyncio.create_task(flow.step("work")), asyncio.create_task(asyncio.sleep(5))]
    await asyncio.wait(tasks, timeout=3, return_when=asyncio.FIRST_COMPLETED)


async def iterate_as_completed(flow: Flow) -> None:
    for next_one in asyncio.as_completed([flow.step("work"), asyncio.sleep(5)], timeout=3):
        await next_one


async def call_back_when_done(flow: Flow) -> None:
    task = asyncio.create_task(flow.step("work"))
    task.add_done_callback(lambda _: SEEN.append("NEVER"))
    await task


async def set_a_context_variable(flow: Flow) -> None:
    token = COLOUR.set("red")
    try:
        await flow.step("work")
    finally:
        SEEN.append(COLOUR.get("lost"))
        COLOUR.reset(token)
        SEEN.append("reset")


async def gather_gathers(flow: Flow) -> None:
    pairs = [asyncio.gather(flow.step("work"), asyncio.sleep(5)) for _ in range(2)]
    await asyncio.gather(*pairs, asyncio.shield(flow.step("work")))


async def refer_to_itself(flow: Flow) -> None:
    task = asyncio.current_task()
    await flow.step("work")
    SEEN.append(str(task))


async def hold_a_coroutine_for_later(flow: Flow) -> None:
    later = flow.step("later")
    try:
        await flow.step("work")
    finally:
        later.close()


SUSPENDED: list[Body] = [
    clean_up_with_a_step,
    clean_up_with_gather,
    clean_up_with_verbs_in_gather,
    clean_up_with_wait_for,
    clean_up_with_as_completed,
    clean_up_in_a_group,
    clean_up_shielded,
    clean_up_after_a_pause,
    swallow_everything_and_return,
    turn_it_into_another_error,
    wait_in_a_group,
    hold_everything_at_once,
    iterate_a_generator,
    iterate_a_generator_in_a_task,
    leave_branches_unstarted,
    wait_for_a_condition,
    wait_for_a_queue_and_an_event,
    race,
    iterate_as_completed,
    call_back_when_done,
    set_a_context_variable,
    gather_gathers,
    refer_to_itself,
    hold_a_coroutine_for_later,
]


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("body", SUSPENDED, ids=lambda body: body.__name__)
def test_a_run_leaves_memory_by_reference_counts_alone(body: Body, recwarn: pytest.WarningsRecorder) -> None:
    run = started(body)
    assert run.idle is IdleState.BUSY
    notes = list(run.notes)
    witnesses: list[weakref.ref[Any]] = [weakref.ref(thing) for thing in (run, run.loop, *run.loop.tasks.values())]
    run.drop()
    assert run.notes == notes, "asked for something on the way out"
    assert not run.pending
    assert not run.loop.tasks
    assert not run.loop.ready
    del run
    assert [type(witness()) for witness in witnesses if witness() is not None] == []
    assert [str(warning.message) for warning in recwarn] == []
    assert not any("NEVER" in seen for seen in SEEN), SEEN
    assert not workflow_loop._stuck


@pytest.mark.parametrize("body", SUSPENDED, ids=lambda body: body.__name__)
def test_a_run_that_left_comes_back_to_the_same_waits(body: Body) -> None:
    with running(body) as first:
        waits = first.waits
    with running(body) as second:
        assert second.waits == waits


# The order of unwinding, and what code sees of it


def test_the_newest_branch_is_unwound_first() -> None:
    async def branch(flow: Flow, name: str) -> None:
        try:
            await flow.step(name)
        finally:
            SEEN.append(name)

    async def body(flow: Flow) -> None:
        await asyncio.gather(branch(flow, "one"), branch(flow, "two"))

    started(body).drop()
    assert SEEN == ["two", "one"]


def test_code_can_tell_that_it_is_unwound() -> None:
    async def body(flow: Flow) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WorkflowLoop)
        try:
            await flow.step("work")
        except Suspended as suspended:
            SEEN.append(f"{suspended} {loop.is_suspending}")
            raise

    started(body).drop()
    assert SEEN == ["the run leaves memory True"]


def test_a_context_variable_is_the_branch_s_own_while_unwinding() -> None:
    started(set_a_context_variable).drop()
    assert SEEN == ["red", "reset"]


def test_a_run_that_is_done_is_dropped_too() -> None:
    async def body(_flow: Flow) -> None:
        raise ValueError

    run = started(body)
    with pytest.raises(ValueError):  # noqa: PT011 - it has no text
        run.outcome()
    run.drop()
    run.drop()


# Code that catches Suspended


class Defiance:
    """How long the code below goes on: until the test is over, or has failed by then."""

    rounds = 0

    def __bool__(self) -> bool:
        self.rounds -= 1
        return self.rounds > 0


DEFIANT = Defiance()


async def swallow_and_ask_again(flow: Flow) -> None:
    while DEFIANT:
        with suppress(BaseException):
            await flow.step("work")


async def swallow_and_sleep_again(flow: Flow) -> None:
    await flow.nap(1)
    while DEFIANT:
        with suppress(BaseException):
            await asyncio.sleep(5)


async def swallow_and_spawn_again(flow: Flow) -> None:
    while DEFIANT:
        with suppress(BaseException):
            await asyncio.gather(flow.step("work"), flow.step("work"))


@pytest.mark.parametrize("body", [swallow_and_ask_again, swallow_and_sleep_again, swallow_and_spawn_again])
def test_code_that_swallows_everything_for_ever_does_not_hang_the_worker(
    body: Body, caplog: pytest.LogCaptureFixture
) -> None:
    DEFIANT.rounds = 5_000
    run = started(body)
    if "nap:1" in run.pending:
        run.complete("nap:1")
    run.drop()
    assert "does not end: it catches BaseException" in caplog.text
    assert len(workflow_loop._stuck) == 1, "kept: the collector would print 'coroutine ignored GeneratorExit'"
    DEFIANT.rounds = 0
    stuck: Any = workflow_loop._stuck.pop()
    stuck.close()


# Generators that their user left


def _leaving(flow: Flow, lock: asyncio.Lock, *, clean_up: bool) -> AsyncGenerator[int, None]:
    async def generate() -> AsyncGenerator[int, None]:
        async with lock:
            try:
                yield 1
            finally:
                if clean_up:
                    await flow.step("clean_up")

    return generate()


@pytest.mark.parametrize("clean_up", [False, True])
def test_a_lock_held_by_a_generator_that_was_left_is_free_again(clean_up: bool) -> None:
    async def body(flow: Flow) -> str:
        lock = asyncio.Lock()

        async def wait_for_the_lock() -> str:
            async with lock:
                return "mine"

        async for _ in (values := _leaving(flow, lock, clean_up=clean_up)):
            waiting = asyncio.create_task(wait_for_the_lock())
            await asyncio.sleep(0)
            break
        del values
        return await waiting

    with running(body) as run:
        assert run.outcome() == "mine"
        assert "clean_up" not in str(run.notes), "the run leaves memory, so it cannot issue a step"


def test_a_generator_closed_by_its_user_may_have_steps_in_its_end() -> None:
    async def body(flow: Flow) -> str:
        async with aclosing(_leaving(flow, asyncio.Lock(), clean_up=True)) as values:
            async for _ in values:
                break
        return "closed"

    with running(body) as run:
        run.complete("clean_up:1")
        assert run.outcome() == "closed"


@pytest.mark.usefixtures("_no_collector")
def test_a_generator_left_before_a_suspend_is_gone_with_the_run(recwarn: pytest.WarningsRecorder) -> None:
    async def body(flow: Flow) -> None:
        async def generate() -> AsyncGenerator[Any, None]:
            try:
                yield await flow.step("first")
                yield 2
            finally:
                await asyncio.gather(flow.step("one"), flow.step("other"))

        async for _ in generate():
            break
        await flow.step("second")

    first = Entry(1, EntryKind.STEP, "first:1", "first", ok=True, at=STARTED_AT, input=b"[]", value=b"1")
    run = started(body, [first])
    assert list(run.pending) == ["second:1"]
    witness = weakref.ref(run.loop)
    run.drop()
    del run
    assert witness() is None
    assert [str(warning.message) for warning in recwarn] == []


# The collector has nothing to say


def test_the_collector_finds_nothing_to_complain_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for body in SUSPENDED:
            started(body).drop()
        gc.collect()
