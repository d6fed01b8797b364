"""One run in memory: its execution, the bodies of its steps, its timers, and what it has to write.

The barrier that makes it safe: workflow code may run ahead of the journal, because it has no effects. Each
effect (a step's body, an answer to a caller, leaving memory) waits until every entry it was decided after
is committed.
"""

from __future__ import annotations

import asyncio
import logging
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
    Written,
)
from edda.core.states import RunStatus
from edda.errors import (
    DeadlockError,
    LeaseLostError,
    ParkedError,
    StorageRejectedError,
)
from edda.workflow.context import RunContext
from edda.workflow.current import Client, here, running
from edda.workflow.events import event_data, stored_type
from edda.workflow.execution import Command, Execution, Idle

from .bodies import Bodies, Stage
from .draft import Draft
from .endings import Endings
from .herald import AT_END, Herald
from .steps import Outcome, Retry, Success, outside_task
from .timetable import Timetable
from .waits import Registry, Waits

if TYPE_CHECKING:
    from edda.workflow.workflow import Workflow

    from .clock import Alarm
    from .hooks import HookCaller
    from .journal import JournalWriter
    from .settings import Settings

logger = logging.getLogger(__name__)

_WAITING = {
    EntryKind.TIMER: RunStatus.WAITING_FOR_TIMER,
    EntryKind.STEP: RunStatus.WAITING_FOR_TIMER,
    EntryKind.EVENT: RunStatus.WAITING_FOR_EVENT,
}
"""What a pending command makes a run that leaves memory; a step then waits for its next attempt."""


class Host(Stage, Registry, Protocol):
    """The worker, as its runs see it."""

    client: Client
    journal: JournalWriter
    hooks: HookCaller | None
    settings: Settings

    def run_ended(self, run: LiveRun, end: End) -> None: ...

    def run_released(self, run: LiveRun, release: Release, early: bool) -> None: ...

    def fetch_mail(self, run: LiveRun) -> None:
        """Read the run's inbox now and tell it with `mail_checked`."""
        ...


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
        self._draft = Draft(claimed, start)
        self._timetable = Timetable()
        self._waits = Waits(host, claimed, self._draft, self._timetable, self._wait_prepared)
        self._alarm: Alarm | None = None
        self.alarm_at: int | None = None
        self._draining = False
        self._timed_out = any(entry.kind is EntryKind.TIMEOUT for entry in claimed.entries)
        self._herald: Herald | None = None
        if host.hooks is not None:
            self._herald = Herald(host.hooks, self.run_id, workflow.name, lambda body: event_data(host.codec, body))
        self._endings = Endings(f"{workflow.name} {self.run_id}", host.codec, host.clock, self._herald)
        self._bodies = Bodies(host, (self.run_id, workflow.name, self.gen), self._herald, self._body_settled)

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
            here.set(self._context)
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
            self._waits.drop_all_but(self._execution.pending)
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
        return self.alarm_at is not None and not (self._is_busy or self.is_leaving)

    @property
    def _is_busy(self) -> bool:
        return self._bodies.is_busy or self._waits.is_busy

    def pump(self) -> None:
        """Do all that can be done now; called after every change."""
        execution = self._execution
        if self.closed or self.is_leaving or execution is None:
            return
        if execution.loop.refused is not None:
            self._park(execution.loop.refused)
            return
        self._accept_issued(execution)
        if not self._draining:
            self._bodies.start(self._draft.committed, execution.pending)
        self._look(execution)
        self._write_more()

    def _accept_issued(self, execution: Execution) -> None:
        for command in execution.take_issued():
            if execution.pending.get(command.id) is command:
                self._accept(command)

    def _look(self, execution: Execution) -> None:
        """Where does the run stand?"""
        if self._is_busy:
            if self._draining and not self._bodies.is_running:
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
        elif execution.in_memory > self._bodies.resting:
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
        self._waits.close()
        self._bodies.close()
        if self._execution is not None:
            with outside_task():
                self._execution.drop()
            self._context.attach(None)
            self._execution = None  # the two know each other: without this only the collector would free them

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = self.alarm_at = None
        self._waits.cancel()
        self._bodies.cancel()

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
        event: int | None = None,
    ) -> None:
        execution = self._execution
        assert execution is not None
        moment = max(self._host.clock.now() if at is None else at, execution.now)
        entry = Entry(execution.length + 1, kind, step, name, ok, moment, input, value, attempt, n, event)
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
        execution = self._execution
        if execution is None or letter.n != self._draft.absorbed + 1 or execution.idle is Idle.DONE or self.is_leaving:
            return  # read already, or too late to matter
        if letter.event is not None:
            self._read_event(execution, letter, letter.event)
        else:
            name = self._host.codec.decode(letter.value, str) if letter.value else ""
            self.deliver(letter.kind, letter.step, name, n=letter.n)

    def _read_event(self, execution: Execution, letter: Delivery, event: int) -> None:
        command = execution.pending.get(letter.step)
        if command is None or not letter.value or not self._waits.takes(command, letter.value):  # over, or pruned
            self._give_back(execution, letter, event)
            return
        self._waits.received(command, event)
        if self._herald is not None:
            self._herald.tell_received(execution.length + 1, command, letter.value)
        self.deliver(
            EntryKind.EVENT,
            command.id,
            command.name,
            input=command.input,
            value=letter.value,
            n=letter.n,
            event=event,
        )

    def _give_back(self, execution: Execution, letter: Delivery, event: int) -> None:
        """Its wait was over when it came, or the event was."""
        type = stored_type(self._host.codec, letter.value) if letter.value else ""
        self.deliver(EntryKind.STRAY, letter.step, type, n=letter.n, event=event)
        self._waits.give_back(letter.step, type, event, execution.pending)

    def mail_checked(self) -> None:
        """All mail there was has been read: what is still missing can be asked for."""
        if not self.closed and not self.is_leaving and self._execution is not None:
            with outside_task():
                self._waits.mail_checked(self._execution.pending)
                self.pump()

    def _wait_prepared(self, command: Command, failure: Exception | None) -> None:
        execution = self._execution
        if self.closed or self.is_leaving or execution is None:
            return
        with outside_task():
            if execution.pending.get(command.id) is not command:
                pass
            elif failure is None:
                self._waits.ask(command)
            else:
                value = encode_failure(self._host.codec, failure)
                self.deliver(EntryKind.EVENT, command.id, command.name, ok=False, input=command.input, value=value)
            self.pump()

    # Steps

    def _accept(self, command: Command) -> None:
        if command.kind is EntryKind.EVENT:
            self._waits.ask(command)
        elif command.due is not None:
            self._timetable.add(command.due, command)
        elif command.kind is EntryKind.STEP and command.retry_at is not None:
            self._timetable.add(self._bodies.rest(command), command)
        elif command.kind is EntryKind.STEP:
            self._bodies.add(command)

    def _body_settled(self, command: Command, outcome: Outcome | None) -> None:
        execution = self._execution
        if not self.closed and not self.is_leaving and execution is not None:
            with outside_task():
                if outcome is not None:
                    self._settle(execution, command, outcome)
                self.pump()

    def _settle(self, execution: Execution, command: Command, outcome: Outcome) -> None:
        if execution.pending.get(command.id) is not command:
            if not isinstance(outcome, Retry):  # nobody waits for it any more, but it happened
                self._record(execution, EntryKind.LATE, command, outcome)
        elif isinstance(outcome, Retry):
            self._record(execution, EntryKind.RETRY, command, outcome)
            if not self.is_leaving:
                command.needs = execution.length
                self._timetable.add(self._bodies.rest(command), command)
        else:
            self._record(execution, EntryKind.STEP, command, outcome)

    def _record(self, execution: Execution, kind: EntryKind, command: Command, outcome: Outcome) -> None:
        if self._herald is not None:
            self._herald.tell_settled(execution.length + 1, command, outcome)
        self.deliver(
            kind,
            command.id,
            command.name,
            ok=isinstance(outcome, Success),
            input=b"" if kind is EntryKind.RETRY else command.input,
            value=outcome.value,
            attempt=command.attempt,
        )

    def _abandoned(self, command: Command) -> None:
        if command.kind is EntryKind.EVENT:
            self._waits.drop(command.id)
        else:
            self._bodies.abandon(command)

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
            if self._execution is not None:
                self._accept_issued(self._execution)
        self.pump()

    def _fire_one(self, due: int) -> None:
        if not self._timed_out and self._claimed.deadline is not None and self._claimed.deadline <= due:
            self._timed_out = True
            self.deliver(EntryKind.TIMEOUT, name="the run passed its deadline", at=due)
            return
        command = self._timetable.pop()
        now = max(due, self._host.clock.now())
        if command.kind is EntryKind.TIMER:
            self.deliver(EntryKind.TIMER, command.id, command.name, at=now)
        elif command.kind is EntryKind.EVENT:
            self._waits.drop(command.id)
            self.deliver(EntryKind.EVENT, command.id, command.name, at=now, ok=False, input=command.input)
        else:
            self._bodies.add(command)

    def _wait_or_leave(self) -> None:
        due = min((due for due in (self._next_due(), self._waits.next_due) if due is not None), default=None)
        if due is not None and due - self._host.clock.now() <= self._host.settings.linger * MICROSECONDS:
            self._set_alarm()
            return
        assert self._execution is not None
        first = next(iter(self._execution.pending.values()))
        reason = repr(first)
        if first.kind is EntryKind.EVENT:
            reason = first.call.describe(values=not self._host.codec.is_sealing)
        self._leave(Release(self._draft.absorbed, due, _WAITING[first.kind], reason), waiting=True)

    # Leaving memory

    def _finish(self, execution: Execution) -> None:
        try:
            self._leave(self._endings.of(execution, self._timed_out))
        except ParkedError as error:
            self._park(error)

    def _park(self, error: Exception) -> None:
        logger.error("run %s of %s is parked: %s", self.run_id, self.workflow.name, error)
        rest = self._host.settings.parked_rest(self._claimed.attempts)
        due = self._host.clock.now() + int(rest * MICROSECONDS)
        self._leave(Release(self._draft.absorbed, due, RunStatus.PARKED, f"{type(error).__name__}: {error}"[:2000]))

    def _hand_back(self) -> None:
        self._leave(Release(self._draft.absorbed, 0, RunStatus.RUNNING))

    def _leave(self, last: Release | End, *, waiting: bool = False) -> None:
        """From here on nothing is delivered; the run is gone when this is committed."""
        if not self.is_leaving:
            self._draft.leave(last, waiting=waiting)
            self._silence()
            self._host.journal.put(self)

    # The journal's side

    def take(self, most: int) -> Bundle | None:
        return None if self.closed else self._draft.take(most)

    def flushed(self, bundle: Bundle, written: Written) -> None:
        self._draft.settle(bundle)
        if bundle.start is not None:
            self._was_stored()
        if bundle.waits:
            self._settle_waits(bundle, written)
        if self._herald is not None:
            self._herald.flushed(AT_END if isinstance(bundle.move, End) else self._draft.committed)
        if isinstance(bundle.move, End):
            self._close()
            self._host.run_ended(self, bundle.move)
        elif isinstance(bundle.move, Release) and self.is_leaving:
            self._close()
            self._host.run_released(self, bundle.move, self.run_id in written.ready)
        else:
            self.pump()
            self._write_more()

    def _write_more(self) -> None:
        if self._draft.has_more:
            self._host.journal.put(self)

    def _settle_waits(self, bundle: Bundle, written: Written) -> None:
        pending = self._execution.pending if self._execution is not None else {}
        if self._waits.settle(bundle, written, pending):
            self._draft.stay()
            self._host.fetch_mail(self)

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
            self._draft.replace(self._endings.failed(error))
            self._silence()
            self._host.journal.put(self)
            return
        self._close()
        self._host.run_ended(self, End(RunStatus.FAILED, encode_failure(self._host.codec, error), 0))
