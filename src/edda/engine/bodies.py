"""The steps of one run: those that wait for the journal, those whose bodies run, those between two attempts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from edda.core.codec import Codec
from edda.core.model import MICROSECONDS, RunId
from edda.core.retry import RetryPolicy
from edda.workflow.context import ActivityContext
from edda.workflow.current import here
from edda.workflow.execution import Command

from .clock import Clock
from .herald import Herald
from .steps import Outcome, Threads, run_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edda.workflow.activity import StepCall


class Stage(Protocol):
    """What bodies need of the worker."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    codec: Codec
    threads: Threads
    retry_policy: RetryPolicy

    @property
    def may_act(self) -> bool:
        """False when the lease may have lapsed: start nothing in the world."""
        ...


class Bodies:
    """`settled` is told of every body that is over, with None if there is nothing to record."""

    def __init__(
        self,
        stage: Stage,
        run: tuple[RunId, str, int],
        herald: Herald | None,
        settled: Callable[[Command, Outcome | None], None],
    ) -> None:
        self._stage = stage
        self._run_id, self._workflow, self._gen = run
        self._herald = herald
        self._settled = settled
        self._running: set[asyncio.Task[None]] = set()
        self._blocked: deque[Command] = deque()
        """Steps that wait for the journal, in the order they were issued."""
        self._resting: set[Command] = set()

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._blocked)

    @property
    def resting(self) -> int:
        return len(self._resting)

    def add(self, command: Command) -> None:
        self._resting.discard(command)
        self._blocked.append(command)

    def rest(self, command: Command) -> int:
        """Until the next attempt is due, which is when it returns."""
        assert command.retry_at is not None
        self._resting.add(command)
        delay = self._policy(command).delay(command.attempt - 1, f"{self._run_id}/{command.id}")
        return command.retry_at + int(delay * MICROSECONDS)

    def start(self, committed: int, pending: Mapping[str, Command]) -> None:
        """Those whose history is durable."""
        while self._blocked and self._blocked[0].needs <= committed and self._stage.may_act:
            command = self._blocked.popleft()
            if pending.get(command.id) is command:
                command.body = self._stage.loop.create_task(self._run(command), context=command.context)
                self._running.add(command.body)

    async def _run(self, command: Command) -> None:
        stage = self._stage
        ctx = ActivityContext(self._run_id, self._workflow, command.id, command.attempt, self._gen, stage.clock.now)
        here.set(ctx)
        if self._herald is not None:
            self._herald.tell_begun(command)
        outcome: Outcome | None = None
        try:
            outcome = await run_body(command, ctx, stage.codec, self._policy(command), stage.threads)
        except asyncio.CancelledError:
            pass  # abandoned, handed back or taken over: there is nothing to record
        finally:
            self._running.discard(command.body)
            command.body = None
        self._settled(command, outcome)

    def _policy(self, command: Command) -> RetryPolicy:
        call: StepCall = command.call
        return call.retry_policy or self._stage.retry_policy

    def abandon(self, command: Command) -> None:
        self._resting.discard(command)
        if command.body is not None:
            command.body.add_done_callback(lambda body: self._gone(command, body))
            command.body.cancel()

    def _gone(self, command: Command, body: asyncio.Task[None]) -> None:
        """A body cancelled before its first turn never reached its own `finally`."""
        if body in self._running:
            self._running.discard(body)
            self._settled(command, None)

    def cancel(self) -> None:
        for body in self._running:
            body.cancel()

    def close(self) -> None:
        """Forget who wanted to know: the two would keep each other in memory."""
        self._settled = _nobody


def _nobody(_command: Command, _outcome: Outcome | None) -> None:
    pass
