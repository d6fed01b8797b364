"""Exceptions are the same live and on replay: class, arguments, text and cause."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from email.message import Message
from io import BytesIO
from typing import Any
from urllib.error import HTTPError

import pytest

from edda import (
    EddaApp,
    RetryExhaustedError,
    RetryPolicy,
    RunStatus,
    TerminalError,
    WorkflowContext,
    activity,
    sleep,
    wait_event,
    workflow,
)
from edda.errors import RemoteError

from .events import REPLAY, run_with_replay

ONCE = RetryPolicy(max_attempts=1)


class CardRefusedError(Exception):
    def __init__(self, card: str, *, code: int) -> None:
        super().__init__(f"card {card} was refused with {code}")
        self.card = card
        self.code = code


class NoSeatError(TerminalError):
    pass


@dataclass(frozen=True)
class FrozenError(Exception):
    reason: str


def facts(error: BaseException | None) -> Any:
    """All that code could tell two exceptions apart by."""
    if error is None:
        return None
    members = [facts(e) for e in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    return type(error), str(error), vars(error).get("code"), facts(error.__cause__), members


ERRORS: dict[str, Exception] = {
    "terminal": TerminalError("never again"),
    "own terminal": NoSeatError("row 3"),
    "built-in": FileNotFoundError(2, "No such file", "/tmp/x"),
    "own class with its own __init__": CardRefusedError("4711", code=51),
    "key error": KeyError("order"),
    "error of urllib": HTTPError("https://pay.example", 402, "Payment Required", Message(), BytesIO(b"no")),
    "frozen dataclass": FrozenError("declined"),
    "group": ExceptionGroup("several", [ValueError("a"), CardRefusedError("1", code=2)]),
}


async def test_an_exception_of_an_activity_is_the_same_live_and_on_replay(app: EddaApp) -> None:
    """Recorded as it was raised, wrapped where its retries are used up."""
    seen: list[dict[str, Any]] = []

    def raiser(name: str) -> Any:
        async def fail(ctx: WorkflowContext) -> None:
            raise ERRORS[name]

        return activity(name=name, retry_policy=ONCE)(fail)

    activities = {name: raiser(name) for name in ERRORS}

    @workflow
    async def collect(ctx: WorkflowContext) -> None:
        found: dict[str, Any] = {}
        for name, fail in activities.items():
            try:
                await fail(ctx)
            except Exception as error:
                found[name] = facts(error)
        seen.append(found)
        await wait_event(ctx, REPLAY)

    await run_with_replay(app, collect)
    assert len(seen) >= 2, "it was replayed"
    assert all(found == seen[0] for found in seen)
    for name, original in ERRORS.items():
        kind, _, _, cause, _ = seen[0][name]
        if isinstance(original, TerminalError):
            assert seen[0][name] == facts(original)
        else:
            assert kind is RetryExhaustedError
            assert cause == facts(original)


async def test_errors_in_a_task_group_are_the_same_live_and_on_replay(app: EddaApp) -> None:
    seen: list[Any] = []

    @activity(retry_policy=ONCE)
    async def fail(ctx: WorkflowContext, number: int) -> None:
        raise CardRefusedError(str(number), code=number)

    @workflow
    async def collect(ctx: WorkflowContext) -> int:
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(3):
                    group.create_task(fail(ctx, number))
        except* RetryExhaustedError as errors:
            seen.append(facts(errors))
        await wait_event(ctx, REPLAY)
        return len(seen[-1][4])

    assert await run_with_replay(app, collect) >= 1
    assert len(seen) >= 2
    assert all(found == seen[0] for found in seen)


async def test_the_error_of_a_failed_run_is_raised_by_its_result(app: EddaApp) -> None:
    @workflow
    async def fail(ctx: WorkflowContext, name: str) -> None:
        await sleep(ctx, 0.01)
        raise ERRORS[name]

    run_ids = {name: await app.start(fail, name) for name in ERRORS}
    for name, run_id in run_ids.items():
        with pytest.raises(type(ERRORS[name])) as caught:
            await app.handle(run_id).result(timeout=20)
        assert facts(caught.value) == facts(ERRORS[name])
        assert await app.handle(run_id).status() is RunStatus.FAILED


async def test_an_error_whose_class_cannot_be_found_says_so(app: EddaApp) -> None:
    class Local(Exception):
        pass

    @workflow
    async def fail(ctx: WorkflowContext) -> None:
        raise Local("only here")

    with pytest.raises(RemoteError, match=r"Local.*only here"):
        await app.run(fail)


async def test_a_recorded_error_keeps_the_place_where_it_was_raised(app: EddaApp) -> None:
    @workflow
    async def fail(ctx: WorkflowContext) -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here") as caught:
        await app.run(fail)
    assert any("test_exceptions.py" in note and "raise ValueError" in note for note in caught.value.__notes__)
