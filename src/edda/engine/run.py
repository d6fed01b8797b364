"""One run in memory: its execution, the bodies of its steps, its timers, and what it has to write.

The barrier that makes it safe: workflow code may run ahead of the journal, because it has no effects. Each
effect (a step's body, an answer to a caller, leaving memory) waits until every entry it was decided after
is committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from edda.core.failure import encode_failure
from edda.core.model import (
    MICROSECONDS,
    Bundle,
    ClaimedRun,
    Delivery,
    End,
    Entry,
    EntryKind,
    Release,
    Start,
)
from edda.core.states import RunStatus
from edda.errors import (
    DeadlockError,
    LeaseLostError,
    ParkedError,
    PayloadError,
    StorageRejectedError,
    WorkflowTimeoutError,
)
from edda.workflow.context import ActivityContext, RunContext
from edda.workflow.current import Client, running
from edda.workflow.execution import Command, Execution, Idle

from .draft import Draft
from .herald import AT_END, Herald
from .steps import Outcome, Retry, Success, Threads, outside_task, run_body
from .timetable import Timetable

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.core.retry import RetryPolicy
    from edda.workflow.activity import StepCall
    from edda.workflow.workflow import Workflow

    from .clock import Alarm, Clock
    from .hooks import HookCaller
    from .journal import JournalWriter
    from .settings import Settings

logger = logging.getLogger(__name__)

_WAITING = {EntryKind.TIMER: RunStatus.WAITING_FOR_TIMER, EntryKind.STEP: RunStatus.WAITING_FOR_TIMER}
"""What a pending command makes a run that leaves memory; a step then waits for its next attempt."""


class Host(Protocol):
    """The worker, as its runs see it."""

    client: Client
    loop: asyncio.AbstractEventLoop
    clock: Clock
    codec: Codec
    journal: JournalWriter
    threads: Threads
    hooks: HookCaller | None
    settings: Settings
    retry_policy: RetryPolicy

    @property
    def may_act(self) -> bool:
        """False when the lease may have lapsed: start nothing in the world."""
        ...

    def run_ended(self, run: LiveRun, end: End) -> None: ...

    def run_released(self, run: LiveRun, release: Release, early: bool) -> None: ...


class LiveRun:
    def __init__(self, host: Host, workflow: Workflow[Any, Any], claimed: ClaimedRun, start: Start | None = None):
        self.run_id = claimed.run_id
        self.epoch = claimed.epoch
        self.gen = claimed.gen
        self.workflow = workflow
        self.stored: asyncio.Future[None] = host.loop.create_future()
        self.closed = False
        self._host = host
        self._claimed = claimed
        self._context = RunContext(self.run_id, workflow.name, self.gen, host.codec)
        self._execution: Execution | None = None
        self._draft = Draft(self.run_id, self.epoch, self.gen, start, len(claimed.entries))
        self._absorbed = claimed.absorbed
        self._bodies: set[asyncio.Task[None]] = set()
        self._blocked: deque[Command] = deque()
        """Steps that wait for the journal, in the order they were issued."""
        self._resting: set[Command] = set()
        """Steps between two attempts."""
        self._timetable = Timetable()
        self._alarm: Alarm | None = None
        self.alarm_at: int | None = None
        self._draining = False
        self._timed_out = any(entry.kind is EntryKind.TIMEOUT for entry in claimed.entries)
        self._herald = Herald(host.hooks, self.run_id, workflow.name) if host.hooks is not None else None

    # Life

    def begin(self) -> None:
        """Replay to where the run stood. Call it from a plain callback of the real loop."""
        if self.closed:
            return
        claimed = self._claimed
        try:
            args, kwargs = self.workflow.signature.decode(self._host.codec, claimed.input)
        except Exception as error:  # the stored input does not fit the code: the code must change, the run is kept
            self._park(error)
            return

        async def main() -> Any:
            running.set(self._host.client)
            return await self.workflow.fn(self._context, *args, **kwargs)

        self._execution = Execution(
            self.run_id,
            main,
            claimed.entries,
            started_at=claimed.created_at,
            resumed=claimed.epoch > 1,
            outside=self._host.loop,
            on_abandon=self._abandoned,
            same=self._host.codec.same,
        )
        self._context.attach(self._execution)
        if self._herald is not None:
            self._execution.on_replayed = self._herald.tell_replayed
            if self.is_stored and self.epoch == 1 and not claimed.entries:  # stored by somebody who did not run it
                self._tell_started(self._herald)
        if self._attempt(self._execution.start):
            for letter in claimed.mail:
                self._read(letter)
            self.pump()

    @property
    def is_stored(self) -> bool:
        return self._draft.committed >= 0

    @property
    def is_leaving(self) -> bool:
        return self._draft.last is not None

    @property
    def is_resting(self) -> bool:
        """In memory, with nothing to do but wait for its alarm."""
        return self.alarm_at is not None and not (self._bodies or self._blocked or self.is_leaving)

    def pump(self) -> None:
        """Do all that can be done now; called after every change."""
        execution = self._execution
        if self.closed or self.is_leaving or execution is None:
            return
        if execution.loop.refused is not None:
            self._park(execution.loop.refused)
            return
        for command in execution.take_issued():
            if execution.pending.get(command.id) is command:
                self._accept(command)
        if not self._draining:
            self._start_bodies()
        self._look(execution)

    def _look(self, execution: Execution) -> None:
        """Where does the run stand?"""
        if self._bodies or self._blocked:
            if self._draining and not self._bodies:
                self._hand_back()
            else:
                self._set_alarm()
            return
        idle = execution.idle
        if idle is Idle.DONE:
            self._finish(execution)
        elif self._draining:
            self._hand_back()
        elif idle is Idle.STUCK:
            self._park(DeadlockError(f"every branch waits for another one: {execution.loop.stacks()}"))
        elif execution.in_memory > len(self._resting):
            self._hand_back()  # a body was cancelled by somebody else: it has to run again
        else:
            self._wait_or_leave()

    def drain(self) -> None:
        """Start nothing more; what runs may finish; then hand the run back."""
        self._draining = True
        self.pump()

    def stop_bodies(self) -> None:
        """The grace is over: the run is handed back without waiting for its bodies."""
        if not self.closed and not self.is_leaving:
            self._hand_back()

    def abandon(self) -> None:
        """The run is no longer ours: forget it without writing anything."""
        self._close()
        if not self.stored.done():
            self.stored.set_exception(LeaseLostError(f"run {self.run_id} is no longer this worker's"))
            self.stored.exception()  # looked at: nobody may be waiting for it

    def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._silence()
        if self._execution is not None:
            with outside_task():
                self._execution.drop()
            self._context.attach(None)
            self._execution = None  # the two know each other: without this only the collector would free them

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = self.alarm_at = None
        for body in self._bodies:
            body.cancel()

    # Entries: the one way into the execution

    def deliver(
        self,
        kind: EntryKind,
        step: str = "",
        name: str = "",
        *,
        at: int | None = None,
        ok: bool = True,
        input: bytes = b"",
        value: bytes = b"",
        attempt: int = 1,
        n: int | None = None,
    ) -> None:
        execution = self._execution
        assert execution is not None
        moment = max(self._host.clock.now() if at is None else at, execution.now)
        entry = Entry(execution.length + 1, kind, step, name, ok, moment, input, value, attempt, n)
        self._draft.add(entry)
        self._host.journal.put(self)
        self._attempt(execution.deliver, entry)

    def _attempt(self, move: Callable[..., None], *args: Any) -> bool:
        try:
            move(*args)
        except Exception as error:  # code that does not fit, spins, or a history that cannot be read: keep the run
            self._park(error)
            return False
        return True

    def read_mail(self, letter: Delivery) -> None:
        if not self.closed and not self.is_leaving and self._execution is not None:
            with outside_task():
                self._read(letter)
                self.pump()

    def _read(self, letter: Delivery) -> None:
        assert self._execution is not None
        if letter.n != self._absorbed + 1 or self._execution.idle is Idle.DONE:
            return  # read already, or too late to matter
        self._absorbed = letter.n
        name = self._host.codec.decode(letter.value, str) if letter.value else ""
        self.deliver(letter.kind, letter.step, name, n=letter.n)

    # Steps

    def _accept(self, command: Command) -> None:
        if command.kind is EntryKind.TIMER:
            assert command.due is not None
            self._timetable.add(command.due, command)
        elif command.retry_at is not None:
            self._rest(command, self._retry_due(command))
        else:
            self._blocked.append(command)

    def _start_bodies(self) -> None:
        execution = self._execution
        assert execution is not None
        while self._blocked and self._blocked[0].needs <= self._draft.committed and self._host.may_act:
            command = self._blocked.popleft()
            if execution.pending.get(command.id) is command:
                body = self._host.loop.create_task(self._body(command), context=command.context)
                command.body = body
                self._bodies.add(body)

    async def _body(self, command: Command) -> None:
        host = self._host
        ctx = ActivityContext(self.run_id, self.workflow.name, command.id, command.attempt, self.gen, host.clock.now)
        if self._herald is not None:
            self._herald.tell_begun(command)
        outcome: Outcome | None = None
        try:
            outcome = await run_body(command, ctx, host.codec, self._policy(command), host.threads)
        except asyncio.CancelledError:
            pass  # abandoned, handed back or taken over: there is nothing to record
        finally:
            self._bodies.discard(command.body)
            command.body = None
        if not self.closed and not self.is_leaving:
            with outside_task():
                self._settle(command, outcome)
                self.pump()

    def _body_gone(self, body: asyncio.Task[None]) -> None:
        """A body cancelled before its first turn never reached its own `finally`."""
        if body in self._bodies:
            self._bodies.discard(body)
            self.pump()

    def _policy(self, command: Command) -> RetryPolicy:
        call: StepCall = command.call
        return call.retry_policy or self._host.retry_policy

    def _settle(self, command: Command, outcome: Outcome | None) -> None:
        execution = self._execution
        if execution is None or outcome is None:
            return
        if execution.pending.get(command.id) is not command:
            if not isinstance(outcome, Retry):  # nobody waits for it any more, but it happened
                self._record(EntryKind.LATE, command, outcome)
        elif isinstance(outcome, Retry):
            self._record(EntryKind.RETRY, command, outcome)
            if not self.is_leaving:
                command.needs = execution.length
                self._rest(command, self._retry_due(command))
        else:
            self._record(EntryKind.STEP, command, outcome)

    def _record(self, kind: EntryKind, command: Command, outcome: Outcome) -> None:
        if self._herald is not None and self._execution is not None:
            self._herald.tell_settled(self._execution.length + 1, command, outcome)
        self.deliver(
            kind,
            command.id,
            command.name,
            ok=isinstance(outcome, Success),
            input=b"" if kind is EntryKind.RETRY else command.input,
            value=outcome.value,
            attempt=command.attempt,
        )

    def _retry_due(self, command: Command) -> int:
        assert command.retry_at is not None
        delay = self._policy(command).delay(command.attempt - 1, f"{self.run_id}/{command.id}")
        return command.retry_at + int(delay * MICROSECONDS)

    def _rest(self, command: Command, due: int) -> None:
        self._resting.add(command)
        self._timetable.add(due, command)

    def _abandoned(self, command: Command) -> None:
        self._resting.discard(command)
        if command.body is not None:
            command.body.add_done_callback(self._body_gone)
            command.body.cancel()

    # Time

    def _next_due(self) -> int | None:
        execution = self._execution
        assert execution is not None
        due = self._timetable.next_due(execution.pending)
        deadline = None if self._timed_out else self._claimed.deadline
        if due is None or deadline is None:
            return deadline if due is None else due
        return min(due, deadline)

    def _set_alarm(self) -> None:
        due = self._next_due()
        if due == self.alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self.alarm_at = due
        if due is not None:
            self._alarm = self._host.clock.call_at(due, self._fire)

    def _fire(self) -> None:
        """Deliver what is due: earliest first, one entry each, run to idle in between."""
        self._alarm = self.alarm_at = None
        while not self.closed and not self.is_leaving and self._execution is not None:
            due = self._next_due()
            if due is None or due > self._host.clock.now():
                break
            self._fire_one(due)
            for command in self._execution.take_issued():
                if self._execution.pending.get(command.id) is command:
                    self._accept(command)
        self.pump()

    def _fire_one(self, due: int) -> None:
        if not self._timed_out and self._claimed.deadline is not None and self._claimed.deadline <= due:
            self._timed_out = True
            self.deliver(EntryKind.TIMEOUT, name="the run passed its deadline", at=due)
            return
        command = self._timetable.pop()
        if command.kind is EntryKind.TIMER:
            self.deliver(EntryKind.TIMER, command.id, command.name, at=max(due, self._host.clock.now()))
        else:
            self._resting.discard(command)
            self._blocked.append(command)

    def _wait_or_leave(self) -> None:
        due = self._next_due()
        if due is not None and due - self._host.clock.now() <= self._host.settings.linger * MICROSECONDS:
            self._set_alarm()
            return
        assert self._execution is not None
        first = next(iter(self._execution.pending.values()))
        self._leave(Release(self._absorbed, due, _WAITING[first.kind], repr(first)))

    # Leaving memory

    def _finish(self, execution: Execution) -> None:
        codec, clock = self._host.codec, self._host.clock
        try:
            result = execution.outcome()
            end = End(RunStatus.COMPLETED, codec.encode(result), clock.now())
            if self._herald is not None:
                self._herald.tell_completed(result)
        except asyncio.CancelledError as error:
            end = self._cancelled(error)
        except ParkedError as error:
            self._park(error)
            return
        except PayloadError as error:
            end = self._failed(PayloadError(f"the result of {self.workflow.name} cannot be stored: {error}"))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a workflow ends with is its outcome, SystemExit included
            end = self._failed(error)
        self._leave(end)

    def _cancelled(self, error: asyncio.CancelledError) -> End:
        if self._timed_out:
            return self._failed(WorkflowTimeoutError(f"run {self.run_id} passed its deadline"))
        if self._herald is not None:
            self._herald.tell_cancelled()
        reason = str(error.args[0]) if error.args and error.args[0] else "cancelled"
        return End(RunStatus.CANCELLED, self._host.codec.encode(reason), self._host.clock.now())

    def _failed(self, error: BaseException) -> End:
        if self._herald is not None:
            self._herald.tell_failed(error)
        return End(RunStatus.FAILED, encode_failure(self._host.codec, error), self._host.clock.now())

    def _park(self, error: Exception) -> None:
        logger.error("run %s of %s is parked: %s", self.run_id, self.workflow.name, error)
        rest = self._host.settings.parked_rest(self._claimed.attempts)
        due = self._host.clock.now() + int(rest * MICROSECONDS)
        self._leave(Release(self._absorbed, due, RunStatus.PARKED, f"{type(error).__name__}: {error}"[:2000]))

    def _hand_back(self) -> None:
        self._leave(Release(self._absorbed, 0, RunStatus.RUNNING))

    def _leave(self, last: Release | End) -> None:
        """From here on nothing is delivered; the run is gone when this is committed."""
        if not self.is_leaving:
            self._draft.last = last
            self._silence()
            self._host.journal.put(self)

    # The journal's side

    def take(self, most: int) -> Bundle | None:
        return None if self.closed else self._draft.take(most)

    def flushed(self, bundle: Bundle, early: bool) -> None:
        self._draft.settle(bundle)
        if bundle.start is not None:
            self._was_stored()
        if self._herald is not None:
            self._herald.flushed(AT_END if isinstance(bundle.move, End) else self._draft.committed)
        if isinstance(bundle.move, End):
            self._close()
            self._host.run_ended(self, bundle.move)
        elif isinstance(bundle.move, Release):
            self._close()
            self._host.run_released(self, bundle.move, early)
        else:
            self.pump()

    def _was_stored(self) -> None:
        if not self.stored.done():
            self.stored.set_result(None)
        if self._herald is not None:
            self._tell_started(self._herald)

    def _tell_started(self, herald: Herald) -> None:
        herald.tell_started(self._host.codec.decode(self._claimed.input))

    def rejected(self, bundle: Bundle, error: StorageRejectedError) -> None:
        """The database refuses what this run has to say: a run that was never stored fails its starter,
        a stored one fails, without the record that cannot be written."""
        if bundle.start is not None:
            if not self.stored.done():
                self.stored.set_exception(error)
        elif not isinstance(bundle.move, End):
            self._draft.replace(self._failed(error))
            self._silence()
            self._host.journal.put(self)
            return
        self._close()
        self._host.run_ended(self, End(RunStatus.FAILED, encode_failure(self._host.codec, error), 0))
