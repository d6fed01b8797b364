"""What workflow and activity code is given as its first argument."""

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

LONGEST_KEY = 200

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def as_datetime(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def as_microseconds(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone: pass an aware datetime, such as ctx.now() + timedelta(...)")
    return (moment - _EPOCH) // timedelta(microseconds=1)


class WorkflowContext:
    """The run that the code belongs to, and the deterministic stand-ins for clock, ids and chance."""

    def __init__(self, instance_id: str, workflow_name: str) -> None:
        self.instance_id = instance_id
        self.workflow_name = workflow_name

    @property
    def execution(self) -> Execution:
        """The run's own loop and commands; for verbs, not for users."""
        raise NotInWorkflowError(
            "this is not the context of a running workflow: activities, wait_event, sleep and the like belong into a "
            "workflow's own code, not into an activity"
        )

    @property
    def codec(self) -> Codec:
        """How the run's values are stored; for verbs, not for users."""
        raise NotInWorkflowError(
            "this is not the context of a running workflow: register_compensation and the like belong into a "
            "workflow's own code, not into an activity"
        )

    @property
    def activity_id(self) -> str:
        raise NotInWorkflowError("ctx.activity_id is there inside an activity only")

    @property
    def attempt(self) -> int:
        """1 for the first try of an activity; a crash does not reset it."""
        raise NotInWorkflowError("ctx.attempt is there inside an activity only")

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt and after every crash: give it to the service you call."""
        raise NotInWorkflowError("ctx.idempotency_key is there inside an activity only")

    def heartbeat(self, details: Any = None) -> None:
        """Say that the activity is alive, and how far it has come: its next attempt can go on from `details`.

        Works in threads too. Raises CancelledError if nobody wants the activity to go on.
        """
        raise NotInWorkflowError("ctx.heartbeat() is there inside an activity only")

    @property
    def heartbeat_details(self) -> Any:
        """The last details that an earlier attempt gave, also before a crash; None if there are none."""
        raise NotInWorkflowError("ctx.heartbeat_details is there inside an activity only")

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants the activity to go on: a thread cannot be stopped, it has to look."""
        raise NotInWorkflowError("ctx.is_cancelled is there inside an activity only")

    @property
    def is_replaying(self) -> bool:
        """True only while recorded steps are gone through again."""
        return False

    @property
    def is_unwinding(self) -> bool:
        """True while the run leaves memory: `finally` blocks run then, though the workflow is not over."""
        return False

    def set(self, key: str, value: Any) -> None:
        """Tell whoever asks where the run stands: `await handle.get(key)` reads it, `handle.wait(key)` waits for it."""
        raise NotInWorkflowError("ctx.set() was called in an activity: it belongs into the workflow's own code")

    @property
    def session(self) -> AsyncSession:
        """SQLAlchemy's session on Edda's database: what is written through it commits together with the step's record.

        Edda commits and rolls back; `flush()`, `begin_nested()` and the rest are yours.
        """
        raise NotInWorkflowError("ctx.session is there inside an activity only")

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """`async with ctx.transaction() as connection:` as `ctx.session`, with the driver's own connection.

        A block that raises is rolled back; what the others wrote commits with the step's record.
        """
        raise NotInWorkflowError("ctx.transaction() is there inside an activity only")

    def recur(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, NoReturn]:
        """Begin anew with these arguments: same id, empty history. `await ctx.recur(page=page + 1)` never returns."""
        raise NotInWorkflowError("ctx.recur() was called in an activity: it belongs into the workflow's own code")

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """Silent on replay, so that each line appears once."""
        return RunLogger(self)

    def now(self) -> datetime:
        raise NotImplementedError

    def uuid4(self) -> UUID:
        return UUID(int=self.rng.getrandbits(128), version=4)

    def random(self) -> float:
        """From 0 up to 1, the same on every replay; `ctx.rng` has the rest of `Random`."""
        return self.rng.random()

    @property
    def rng(self) -> Random:
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
        """An activity without a definition of its own: `await ctx.step("fetch", fetch, url)` runs and records it."""
        raise NotInWorkflowError(f"ctx.step({name!r}) was called in an activity: just call the function there.")


class RunLogger(logging.LoggerAdapter[logging.Logger]):
    def __init__(self, ctx: WorkflowContext) -> None:
        super().__init__(logging.getLogger(f"edda.workflow.{ctx.workflow_name}"), {"instance_id": ctx.instance_id})
        self._ctx = ctx

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - logging's own name
        return not self._ctx.is_replaying and not self._ctx.is_unwinding and super().isEnabledFor(level)


class RunContext(WorkflowContext):
    """The context inside a workflow's own code."""

    def __init__(self, instance_id: str, workflow_name: str, gen: int, codec: Codec, signature: Signature) -> None:
        super().__init__(instance_id, workflow_name)
        self.generation = gen
        self._codec = codec
        self._signature = signature
        self._seed = f"{instance_id}/{gen}"
        self._rng: Random | None = None
        self._execution: Execution | None = None
        self.subscriptions: dict[str, Subscription] = {}
        self.on_value_set: Callable[[RunValue], None] | None = None

    def attach(self, execution: Execution | None) -> None:
        self._execution = execution

    @property
    def execution(self) -> Execution:
        if self._execution is None:
            raise NotInWorkflowError(f"the workflow of run {self.instance_id} is not running any more")
        return self._execution

    @property
    def codec(self) -> Codec:
        return self._codec

    @property
    def is_replaying(self) -> bool:
        return self._execution is not None and self._execution.replaying

    @property
    def is_unwinding(self) -> bool:
        return self._execution is None or self._execution.loop.is_suspending

    def set(self, key: str, value: Any) -> None:
        if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY or not is_storable_text(key):
            raise ValueError(f"ctx.set({key!r}): expected a key of 1 to {LONGEST_KEY} characters")
        execution = self.execution
        if self.on_value_set is not None and not execution.loop.is_suspending:
            self.on_value_set(RunValue(key, self._codec.encode(value)))

    def recur(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, NoReturn]:
        if not self.execution.is_at_root:
            raise NotInWorkflowError("ctx.recur() belongs into the workflow's own code, not into a branch of it")
        raise RecurRequested(self._signature.encode_input(self._codec, self._signature.bind(args, kwargs)))

    def now(self) -> datetime:
        """The time of the last recorded entry: the same on every replay."""
        return as_datetime(self.execution.now)

    @property
    def rng(self) -> Random:
        if self._rng is None:
            self._rng = Random(self._seed)
        return self._rng

    def step(
        self, name: str, fn: Callable[..., Any], *args: Any, retry_policy: RetryPolicy | None = None
    ) -> Coroutine[Any, Any, Any]:
        return inline_step(self, name, fn, args, retry_policy)


class ActivityHeartbeat(Protocol):
    """What an attempt says of itself while it runs."""

    is_given_up: bool
    details: bytes | None
    """Of an earlier attempt."""

    def heartbeat(self, details: bytes | None) -> None: ...


class StepEffects(Protocol):
    """What an attempt does through Edda: it counts only together with the attempt's outcome."""

    @property
    def is_open(self) -> bool:
        """Whether there is a transaction that what it does belongs to."""
        ...

    @property
    def session(self) -> AsyncSession: ...

    def transaction(self) -> AbstractAsyncContextManager[Any]: ...

    def dispatch(self, dispatch: StagedEvent) -> None: ...

    def send(self, event: OutboxEvent) -> None: ...

    async def start(self, run: Start) -> ExistingRun | None:
        """In the transaction; else the run that has its id already."""
        ...

    async def receive_message(self, key: bytes, patience: int) -> bytes | None:
        """The body of the first message under the key; waits so many microseconds for one."""
        ...


class LazyEffects(Protocol):
    """Where an attempt's work lies, once it does any."""

    @property
    def work(self) -> StepEffects | None: ...

    def __call__(self) -> StepEffects: ...


class ActivityContext(WorkflowContext):
    """The context inside an activity's body, which runs in the real world."""

    def __init__(
        self,
        run: tuple[str, str, int],
        activity_id: str,
        attempt: int,
        clock: Callable[[], int],
        codec: Codec,
        pulse: ActivityHeartbeat,
        work: LazyEffects,
        effects: str = "",
    ) -> None:
        instance_id, workflow_name, self._gen = run
        super().__init__(instance_id, workflow_name)
        self._activity_id = activity_id
        self._attempt = attempt
        self._clock = clock
        self.values = codec
        self._pulse = pulse
        self._work = work
        self._prefix = effects
        self._effects = 0

    @property
    def activity_id(self) -> str:
        return self._activity_id

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def idempotency_key(self) -> str:
        return f"{self.instance_id}/{self._gen}/{self._activity_id}"

    @property
    def work(self) -> StepEffects:
        """For verbs, not for users."""
        return self._work()

    @property
    def has_transaction(self) -> bool:
        """Whether what the body does through Edda belongs to a transaction that is open."""
        work = self._work.work
        return work is not None and work.is_open

    @property
    def session(self) -> AsyncSession:
        return self.work.session

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self.work.transaction()

    def heartbeat(self, details: Any = None) -> None:
        self._pulse.heartbeat(None if details is None else self.values.encode(details))

    @property
    def heartbeat_details(self) -> Any:
        details = self._pulse.details
        return None if details is None else self.values.decode(details)

    @property
    def is_cancelled(self) -> bool:
        return self._pulse.is_given_up

    def next_effect_id(self) -> str:
        """For what the body does through Edda: the same at every attempt, so that it happens once."""
        self._effects += 1
        return f"{self.idempotency_key}/{self._prefix}{self._effects}"

    @property
    def microseconds(self) -> int:
        return self._clock()

    def now(self) -> datetime:
        return as_datetime(self._clock())

    @property
    def rng(self) -> Random:
        return Random()


def execution_of(ctx: WorkflowContext, verb: str) -> Execution:
    """The run that a verb of workflows was called in; `verb` is how it is called, such as `sleep(ctx, seconds)`."""
    if isinstance(ctx, RunContext):
        return ctx.execution
    raise misplaced(ctx, verb)


def misplaced(ctx: Any, verb: str) -> NotInWorkflowError:
    """The error of a verb that got something else than the context of a running workflow."""
    name = verb.partition("(")[0]
    if isinstance(ctx, ActivityContext):
        return NotInWorkflowError(
            f"{name}() was called in the activity {ctx.activity_id}: only a workflow's own code can wait or call steps."
            f" Call `await {verb}` in the workflow, before or after this activity."
        )
    if isinstance(ctx, WorkflowContext):
        return NotInWorkflowError(f"{name}() was called with a context that belongs to no running workflow")
    return NotInWorkflowError(
        f"{name}() needs the context of a workflow as its first argument, got {repr_short(ctx)}: "
        f"write `await {verb}` in a "
        "function decorated with @workflow, whose first parameter is the context"
    )


def seconds_to_microseconds(seconds: float | timedelta, what: str) -> int:
    value = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e11:
        raise ValueError(f"{what}: expected a number of seconds or a timedelta, not negative, got {seconds!r}")
    return -int(-value * MICROSECONDS // 1)
