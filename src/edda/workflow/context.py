"""The contexts that workflow and activity functions get as their first argument."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, overload
from uuid import UUID

from edda.core.channels import is_storable_text
from edda.core.model import MICROSECONDS, RunValue
from edda.core.value_path import repr_short
from edda.errors import NotInWorkflowError

from .activity import inline_step
from .execution import RecurRequested

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from edda.core.codec import Codec
    from edda.core.model import OutboxEvent, StagedEvent, Start
    from edda.core.retry import RetryPolicy
    from edda.core.signature import Signature
    from edda.storage.shared.step_commit import ExistingRun

    from .channels import Subscription
    from .execution import Execution

R = TypeVar("R")

MAX_KEY_LENGTH = 200

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def as_datetime(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def as_microseconds(time: datetime) -> int:
    if time.tzinfo is None:
        raise ValueError(f"{time!r} has no time zone: pass an aware datetime, such as ctx.now() + timedelta(...)")
    return (time - _EPOCH) // timedelta(microseconds=1)


class WorkflowContext:
    """The current run, with deterministic replacements for clock, ids and random numbers.

    A workflow's function gets a `RunContext`, an activity an `ActivityContext`. Members that belong to the other one
    raise `NotInWorkflowError`.
    """

    instance_id: str
    workflow_name: str
    codec: Codec
    """Encodes the run's values; for Edda's own functions."""

    @property
    def execution(self) -> Execution:
        """The run's event loop and commands; for Edda's own functions."""
        raise NotInWorkflowError(
            "this is not the context of a running workflow: activities, wait_event, sleep and similar functions work "
            "in the code of a workflow only, not in an activity"
        )

    @property
    def activity_id(self) -> str:
        """The id of the step, such as `charge:1`. In activities only."""
        raise NotInWorkflowError("ctx.activity_id is available in an activity only")

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1; it continues after a crash. In activities only."""
        raise NotInWorkflowError("ctx.attempt is available in an activity only")

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt, also after a crash: pass it to the service that you call. In activities only."""
        raise NotInWorkflowError("ctx.idempotency_key is available in an activity only")

    def heartbeat(self, details: Any = None) -> None:
        """Report that the activity makes progress; its next attempt can read `details` as `ctx.heartbeat_details`.

        Works in threads too. Raises CancelledError if the step was cancelled or timed out. In activities only.
        """
        raise NotInWorkflowError("ctx.heartbeat() is available in an activity only")

    @property
    def heartbeat_details(self) -> Any:
        """The last `details` of an earlier attempt, also from before a crash; None without any. In activities only."""
        raise NotInWorkflowError("ctx.heartbeat_details is available in an activity only")

    @property
    def is_cancelled(self) -> bool:
        """Whether the step was cancelled or timed out; a thread cannot be stopped, so a sync activity has to check it.
        In activities only."""
        raise NotInWorkflowError("ctx.is_cancelled is available in an activity only")

    @property
    def is_replaying(self) -> bool:
        """True while the workflow's code is replayed from its history."""
        return False

    @property
    def is_unwinding(self) -> bool:
        """True while the run leaves memory: `finally` blocks run, although the workflow has not ended."""
        return False

    def set(self, key: str, value: Any) -> None:
        """Publish a value of the run: `await handle.get(key)` reads it, `await handle.wait(key)` waits for it.

        `key` has 1 to 200 characters. In workflows only.
        """
        raise NotInWorkflowError("ctx.set() was called in an activity: call it in the code of the workflow")

    @property
    def session(self) -> AsyncSession:
        """A SQLAlchemy session on Edda's database, whose transaction commits together with the outcome of the step.

        Edda commits and rolls back; do not call `commit()`, but `flush()` and `begin_nested()` as you need them. In
        activities only.
        """
        raise NotInWorkflowError("ctx.session is available in an activity only")

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """`async with ctx.transaction() as connection:` like `ctx.session`, with the connection of the driver.

        A block that raises is rolled back to its beginning; all other blocks commit with the outcome of the step. In
        activities only.
        """
        raise NotInWorkflowError("ctx.transaction() is available in an activity only")

    def recur(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, NoReturn]:
        """Start again with these arguments, the same id and an empty history: `await ctx.recur(page=page + 1)` does
        not return. In workflows only."""
        raise NotInWorkflowError("ctx.recur() was called in an activity: call it in the code of the workflow")

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """Logs nothing during replay, so that each line appears once."""
        return RunLogger(self)

    def now(self) -> datetime:
        """The current time in UTC; in a workflow the time of the last history entry, the same on every replay."""
        raise NotImplementedError

    def uuid4(self) -> UUID:
        """A random UUID; in a workflow the same on every replay."""
        return UUID(int=self.rng.getrandbits(128), version=4)

    def random(self) -> float:
        """A number from 0 to 1; in a workflow the same on every replay. `ctx.rng` has the other methods of `Random`."""
        return self.rng.random()

    @property
    def rng(self) -> Random:
        """A `random.Random`; in a workflow seeded by the run's id and generation."""
        raise NotImplementedError

    @overload
    def step(
        self, name: str, fn: Callable[..., Coroutine[Any, Any, R]], *args: Any, retry_policy: RetryPolicy | None = None
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def step(
        self, name: str, fn: Callable[..., R], *args: Any, retry_policy: RetryPolicy | None = None
    ) -> Coroutine[Any, Any, R]: ...

    def step(
        self, name: str, fn: Callable[..., Any], *args: Any, retry_policy: RetryPolicy | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Run a plain function as a recorded step: `await ctx.step("fetch", fetch, url)`. In workflows only.

        `retry_policy` defaults to the app's `default_retry_policy`.
        """
        raise NotInWorkflowError(f"ctx.step({name!r}) was called in an activity: call the function directly there.")


class RunLogger(logging.LoggerAdapter[logging.Logger]):
    def __init__(self, ctx: WorkflowContext) -> None:
        super().__init__(logging.getLogger(f"edda.workflow.{ctx.workflow_name}"), {"instance_id": ctx.instance_id})
        self._ctx = ctx

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - logging's own name
        return not self._ctx.is_replaying and not self._ctx.is_unwinding and super().isEnabledFor(level)


class RunContext(WorkflowContext):
    """The context of a workflow's function."""

    def __init__(
        self, instance_id: str, workflow_name: str, generation: int, codec: Codec, signature: Signature
    ) -> None:
        self.instance_id = instance_id
        self.workflow_name = workflow_name
        self.codec = codec
        self.generation = generation
        self._signature = signature
        self._rng: Random | None = None
        self._execution: Execution | None = None
        self.subscriptions: dict[str, Subscription] = {}
        self.on_value_set: Callable[[RunValue], None] | None = None

    def attach(self, execution: Execution | None) -> None:
        self._execution = execution

    @property
    def execution(self) -> Execution:
        if self._execution is None:
            raise NotInWorkflowError(f"the workflow of run {self.instance_id} is no longer running")
        return self._execution

    @property
    def is_replaying(self) -> bool:
        return self._execution is not None and self._execution.replaying

    @property
    def is_unwinding(self) -> bool:
        return self._execution is None or self._execution.loop.is_suspending

    def set(self, key: str, value: Any) -> None:
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_LENGTH or not is_storable_text(key):
            raise ValueError(f"ctx.set({key!r}): expected a key of 1 to {MAX_KEY_LENGTH} characters")
        execution = self.execution
        if self.on_value_set is not None and not execution.loop.is_suspending:
            self.on_value_set(RunValue(key, self.codec.encode(value)))

    def recur(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, NoReturn]:
        if not self.execution.is_at_root:
            raise NotInWorkflowError("ctx.recur() works in the main task of the workflow only, not in another task")
        raise RecurRequested(self._signature.encode_input(self.codec, self._signature.bind(args, kwargs)))

    def now(self) -> datetime:
        return as_datetime(self.execution.now)

    @property
    def rng(self) -> Random:
        if self._rng is None:
            self._rng = Random(f"{self.instance_id}/{self.generation}")
        return self._rng

    def step(
        self, name: str, fn: Callable[..., Any], *args: Any, retry_policy: RetryPolicy | None = None
    ) -> Coroutine[Any, Any, Any]:
        return inline_step(self, name, fn, args, retry_policy)


class AttemptHeartbeat(Protocol):
    """The heartbeats of one attempt."""

    is_given_up: bool
    """The attempt was cancelled or timed out."""
    details: bytes | None
    """The last details of an earlier attempt."""

    def heartbeat(self, details: bytes | None) -> None: ...


class AttemptEffects(Protocol):
    """The database effects of one attempt, which commit together with its outcome."""

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open."""
        ...

    @property
    def session(self) -> AsyncSession: ...

    def transaction(self) -> AbstractAsyncContextManager[Any]: ...

    def dispatch(self, dispatch: StagedEvent) -> None: ...

    def send(self, event: OutboxEvent) -> None: ...

    async def start(self, run: Start) -> ExistingRun | None:
        """Store a run in the transaction; returns the existing run if its id is taken."""
        ...

    async def receive_message(self, key: bytes, timeout: int) -> bytes | None:
        """Take the first message under the key; waits `timeout` microseconds for one."""
        ...


class AttemptEffectsFactory(Protocol):
    """Creates the `AttemptEffects` of an attempt at its first use."""

    @property
    def work(self) -> AttemptEffects | None: ...

    def effects(self) -> AttemptEffects: ...


class ActivityContext(WorkflowContext):
    """The context of an activity's function."""

    def __init__(
        self,
        run: tuple[str, str, int],
        activity_id: str,
        attempt: int,
        clock: Callable[[], int],
        codec: Codec,
        heartbeat: AttemptHeartbeat,
        work: AttemptEffectsFactory,
        effects: str = "",
    ) -> None:
        self.instance_id, self.workflow_name, self._generation = run
        self._activity_id = activity_id
        self._attempt = attempt
        self._clock = clock
        self.codec = codec
        self._heartbeat = heartbeat
        self._work = work
        self._effect_prefix = effects
        self._effect_count = 0

    @property
    def activity_id(self) -> str:
        return self._activity_id

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def idempotency_key(self) -> str:
        return f"{self.instance_id}/{self._generation}/{self._activity_id}"

    @property
    def work(self) -> AttemptEffects:
        """For Edda's own functions."""
        return self._work.effects()

    @property
    def has_transaction(self) -> bool:
        """Whether the attempt has an open transaction."""
        work = self._work.work
        return work is not None and work.is_open

    @property
    def session(self) -> AsyncSession:
        return self.work.session

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self.work.transaction()

    def heartbeat(self, details: Any = None) -> None:
        self._heartbeat.heartbeat(None if details is None else self.codec.encode(details))

    @property
    def heartbeat_details(self) -> Any:
        details = self._heartbeat.details
        return None if details is None else self.codec.decode(details)

    @property
    def is_cancelled(self) -> bool:
        return self._heartbeat.is_given_up

    def next_effect_id(self) -> str:
        """The id of the next event, message or run of this attempt: the same for every attempt, so that each is stored
        once."""
        self._effect_count += 1
        return f"{self.idempotency_key}/{self._effect_prefix}{self._effect_count}"

    @property
    def microseconds(self) -> int:
        return self._clock()

    def now(self) -> datetime:
        return as_datetime(self._clock())

    @property
    def rng(self) -> Random:
        return Random()


def execution_of(ctx: WorkflowContext, call_text: str) -> Execution:
    """The execution of the calling workflow; `call_text` is for error messages, such as `sleep(ctx, seconds)`."""
    if isinstance(ctx, RunContext):
        return ctx.execution
    raise misplaced(ctx, call_text)


def misplaced(ctx: Any, call_text: str) -> NotInWorkflowError:
    """The error of a function that was called without the context of a running workflow."""
    name = call_text.partition("(")[0]
    if isinstance(ctx, ActivityContext):
        return NotInWorkflowError(
            f"{name}() was called in the activity {ctx.activity_id}: only the code of a workflow can wait or call "
            f"steps. Call `await {call_text}` in the workflow, before or after this activity."
        )
    if isinstance(ctx, WorkflowContext):
        return NotInWorkflowError(f"{name}() was called with a context that belongs to no running workflow")
    return NotInWorkflowError(
        f"{name}() needs the context of a workflow as its first argument, got {repr_short(ctx)}: "
        f"write `await {call_text}` in a function decorated with @workflow, whose first parameter is the context"
    )


def seconds_to_microseconds(seconds: float | timedelta, what: str) -> int:
    value = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e11:
        raise ValueError(f"{what}: expected a number of seconds or a timedelta, not negative, got {seconds!r}")
    return -int(-value * MICROSECONDS // 1)
