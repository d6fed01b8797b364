"""One run in memory: its execution, the bodies of its steps, its timers, and what it has to write.

The barrier that makes it safe: workflow code may run ahead of the journal, because it has no effects. Each
effect (a step's body, an answer to a caller, leaving memory) waits until every entry it was decided after
is committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from edda.core.exceptions import encode_failure
from edda.core.model import (
    MICROSECONDS,
    BatchResult,
    ClaimedRun,
    End,
    EndWatcher,
    Entry,
    EntryKind,
    InboxItem,
    Recur,
    RunId,
    RunRecord,
    RunSignal,
    RunValue,
    RunWrite,
    Start,
    Suspend,
    Transition,
)
from edda.core.redact import redact_credentials
from edda.core.states import RunStatus
from edda.engine.log import RunLog, tell_moment
from edda.engine.tasks import GraceTimer
from edda.engine.worker.process_deaths import CrashGuard
from edda.errors import (
    ConfigurationError,
    DeadlockError,
    EddaError,
    LeaseLostError,
    ParkedError,
    ProcessDiedError,
    StorageRejectedError,
)
from edda.workflow.channels import carried_subscriptions
from edda.workflow.client import Client, current_app, current_context
from edda.workflow.context import RunContext
from edda.workflow.events import stored_event
from edda.workflow.execution import STOPS, Command, Execution, IdleState

from . import inbox
from .activities import ActivityRunner, ActivityServices
from .children import ChildRuns, ChildServices
from .completion import RunCompletion
from .hooks import AFTER_LAST_ENTRY, RunHooks
from .inbox import InboxReader, find_misfit
from .outcome_policy import Outcome, Unready, no_current_task
from .outcomes import StepOutcomes
from .timers import TimerQueue
from .waits import WAITS, EventWaits, WaitServices
from .writes import FinalTransition, RunWriteBuffer

if TYPE_CHECKING:
    from edda.engine.clock import TimerHandle
    from edda.engine.hooks import HookCaller
    from edda.engine.journal import JournalWriter
    from edda.engine.parking_log import ParkingLog
    from edda.engine.settings import Settings
    from edda.workflow.workflow import Workflow

logger = logging.getLogger(__name__)

_WAITING = {
    EntryKind.TIMER: RunStatus.WAITING_FOR_TIMER,
    EntryKind.STEP: RunStatus.WAITING_FOR_TIMER,
    EntryKind.EVENT: RunStatus.WAITING_FOR_EVENT,
    EntryKind.MESSAGE: RunStatus.WAITING_FOR_MESSAGE,
    EntryKind.CHILD: RunStatus.WAITING_FOR_CHILD,
    EntryKind.SETTLED: RunStatus.WAITING_FOR_CHILD,
}
"""What a pending command makes a run that leaves memory; a step then waits for its next attempt."""
MAX_STEPS_PER_TURN = 100
"""Births, and messages that are read: other runs want their turn, too."""


class RunHost(ActivityServices, WaitServices, ChildServices, Protocol):
    """The worker, as its runs see it."""

    client: Client
    journal: JournalWriter
    hooks: HookCaller | None
    settings: Settings
    parking_log: ParkingLog

    def run_ended(self, run: LiveRun, end: End) -> None: ...

    def run_suspended(self, run: LiveRun, release: Suspend, early: bool) -> None: ...

    def run_recurred(self, run: LiveRun, following: ClaimedRun) -> None: ...

    def run_unstored(self, run: LiveRun) -> None:
        """Its rows were refused: this run was never stored, or another call stored one under its id."""
        ...

    def run_progressed(self, run: LiveRun) -> None:
        """The steps have ended that were in flight when earlier processes died: those deaths are void."""
        ...

    def on_written(self, bundle: RunWrite) -> None:
        """It has children, letters, dispatches or outgoing events: others have something to do."""
        ...

    def run_failed(self, run: LiveRun, error: Exception) -> None:
        """Forget the run and give it back after a while: an unexpected error has left it half moved."""
        ...

    def fetch_watchers(self, run: LiveRun) -> None:
        """Read who waits for the run's end and tell it with `watchers_read`."""
        ...

    def request_inbox(self, run: LiveRun) -> None:
        """Read the run's inbox now and tell it with `mail_checked`."""
        ...


P = ParamSpec("P")
R = TypeVar("R")


def _entry(method: Callable[Concatenate[LiveRun, P], R]) -> Callable[Concatenate[LiveRun, P], R | None]:
    """For what the loop, a task or the journal calls: an error of the engine's own must not leave the run in memory
    with nothing that drives it. The worker forgets it and gives it back."""

    @wraps(method)
    def guarded(self: LiveRun, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # a bug, or no memory: users' own errors are caught where their code is called
            self.fail(error)
            return None

    return guarded


class LiveRun:
    def __init__(
        self,
        host: RunHost,
        workflow: Workflow[Any, Any],
        claimed: ClaimedRun,
        start: Start | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        """`is_new`: nobody ran this generation before."""
        self.run_id = claimed.run_id
        self.epoch = claimed.epoch
        self.gen = claimed.gen
        self.workflow = workflow
        self.stored: asyncio.Future[None] = host.loop.create_future()
        self.closed = False
        self._host = host
        self._claimed = claimed
        self._is_resumed = claimed.epoch > 1 and not is_new
        self._context = RunContext(self.run_id, workflow.name, self.gen, host.codec, workflow.signature)
        self._execution: Execution | None = None
        self._draft = RunWriteBuffer(claimed, start)
        self._timetable = TimerQueue()
        self._waits = EventWaits(host, claimed, self._draft, self._timetable, self.on_wait_indexed, self.fail)
        self._children = ChildRuns(
            host, claimed, self._draft, deliver=self.append_entry, found=self.on_child_resolved, failed=self.fail
        )
        self._alarm: TimerHandle | None = None
        self.alarm_at: int | None = None
        self._draining = False
        is_opened = bool(claimed.entries) and claimed.entries[-1].kind is EntryKind.RECUR
        self._replayed_entries = 0 if is_opened else len(claimed.entries)
        """Entries behind which nothing was decided that is not written; the first of a generation moves no code."""
        self._stop_entries = [entry.kind for entry in claimed.entries if entry.kind in STOPS]
        """What stopped the run, the first first."""
        self._watched_from = min(host.settings.history_warning, host.settings.history_limit)
        self._is_warned = len(claimed.entries) >= host.settings.history_warning
        self._is_undoing = False
        self._log = RunLog(self.run_id, workflow.name, host.codec, claimed.input)
        self._was_parked = claimed.attempts > 0
        self._waits_for = ""
        self._guard = CrashGuard(claimed, host.settings)
        self._is_refused = False
        """The database refused a record of it, and it is about to end as failed."""
        self._ends_unread: str | None = None
        """Why it is about to end as cancelled without its code."""
        self._herald: RunHooks | None = None
        if host.hooks is not None:
            self._herald = RunHooks(host.hooks, self.run_id, workflow.name, lambda body: stored_event(host.codec, body))
        self._bodies = ActivityRunner(
            host,
            (self.run_id, workflow.name, self.gen),
            self.epoch,
            self._herald,
            self._log,
            settled=self.on_step_finished,
            progressed=self.on_step_heartbeat,
            unbegun=self.on_step_never_started,
            failed=self.fail,
        )
        self._outcomes = StepOutcomes(
            self._draft, self._bodies, self._timetable, self._herald, self._log, self.append_entry
        )
        self._departure = RunCompletion(
            claimed,
            host.codec,
            host.clock,
            self._draft,
            self._waits,
            self._context,
            workflow.signature,
            self._herald,
            host.settings.history_limit,
        )

    # Parts that few runs need

    @cached_property
    def _mailbox(self) -> InboxReader:
        on_rejected = sum(entry.kind is EntryKind.REJECTED for entry in self._claimed.entries)
        return InboxReader(
            self._log, self._host.codec, self._draft, self._waits, self._herald, self.append_entry, on_rejected
        )

    @cached_property
    def _patience(self) -> GraceTimer:
        """For bodies that were given up, once nothing else is to be done."""
        return GraceTimer(self._host.loop, self._host.settings.late_grace, self.advance)

    # Life

    @_entry
    def begin(self) -> None:
        """Replay to where the run stood. Call it from a plain callback of the real loop."""
        if self.closed:
            return
        claimed = self._claimed
        if self._host.settings.is_deadly_to_replay(claimed.crashes):
            self._park(self._guard.error("the workflow's own code, on replay"))
            return
        try:
            args, kwargs = self.workflow.signature.decode_input(self._host.codec, claimed.input)
        except Exception as error:  # the stored input does not fit the code: the code must change, the run is kept
            self._park(error)
            return

        def main() -> Coroutine[Any, Any, Any]:
            current_app.set(self._host.client)
            current_context.set(self._context)
            return self.workflow.fn(self._context, *args, **kwargs)

        self._execution = Execution(
            self.run_id,
            main,
            claimed.entries,
            started_at=claimed.created_at,
            resumed=self._is_resumed,
            outside=self._host.loop,
            on_abandon=self.on_command_cancelled,
            same=self._host.codec.equal,
            encode=self._departure.encode,
        )
        self._context.attach(self._execution)
        self._context.on_value_set = self.on_value_set
        if claimed.entries and claimed.entries[0].kind is EntryKind.RECUR:
            self._context.subscriptions = carried_subscriptions(self._host.codec, claimed.entries[0].value)
        if self._herald is not None:
            self._execution.on_replayed = self._herald.step_replayed
        if self.is_stored and self.epoch == 1 and not claimed.entries:  # stored by somebody who did not run it
            self._notify_started()
        if self._run_or_park(self._execution.start):
            self._waits.cancel_stale(self._execution.pending)
            self._apply_since_last_entry(self._execution)

    def _apply_since_last_entry(self, execution: Execution) -> None:
        """With what happened since the last entry was written."""
        claimed = self._claimed
        for done in claimed.done:
            if not self._run_or_park(self._outcomes.record_committed, execution, done, self._host.codec):
                return
        if claimed.entries and claimed.entries[-1].kind in STOPS:
            self._children.cancel_dependents(len(claimed.entries))
        for letter in claimed.mail:
            self._mailbox.read(letter, execution)
        if claimed.deadline is not None:  # before any step begins: a run that is claimed too late must not act
            self._accept_issued(execution)
            self._deliver_due()
        else:
            self.advance()

    @property
    def is_stored(self) -> bool:
        return self._draft.committed >= 0

    @property
    def is_start_taken(self) -> bool:
        """Whether the journal may have sent the run's own rows."""
        return self._draft.is_start_taken

    @property
    def signal_targets(self) -> frozenset[RunId]:
        return self._draft.signal_targets

    @property
    def is_closing(self) -> bool:
        return self._draft.transition is not None

    @property
    def is_idle(self) -> bool:
        """In memory, with nothing to do but wait for its alarm."""
        return self.alarm_at is not None and not (self._is_busy or self.is_closing)

    @property
    def _is_busy(self) -> bool:
        return self._bodies.is_busy or self._waits.is_busy or self._children.is_busy

    @_entry
    def advance(self) -> None:
        """Do all that can be done now; called after every change."""
        execution, draft = self._execution, self._draft
        if execution is None or draft.transition is not None:
            return
        if execution.loop.forbidden_call is not None:
            self._park(execution.loop.forbidden_call)
            return
        if execution.length >= self._watched_from:
            self._check_history_length(execution)
        if execution.issued:
            self._accept_issued(execution)
        if self._children.to_create or self._waits.backlog_waits:
            self._create_children_and_read_backlog(execution)
        if self._outcomes.uncertain:
            self._outcomes.resolve_uncertain(execution)
        if draft.transition is None:
            self._start_work(execution, draft)

    def _start_work(self, execution: Execution, draft: RunWriteBuffer) -> None:
        begun_at = execution.undoing.begun_at
        if begun_at is not None and not self._is_undoing:
            self._is_undoing = True
            if begun_at >= self._replayed_entries:  # else it is known
                draft.mark_compensating()
        if not self._draining:
            if self._guard and not self._may_start(execution):
                return
            self._bodies.start_ready(draft.committed, execution.pending)
            if self._children.to_resolve:
                self._children.resolve_ready(draft.committed, execution.pending)
        self._decide_next_state(execution)
        if draft.has_more:
            self._host.journal.enqueue(self)

    def _may_start(self, execution: Execution) -> bool:
        """Whether to go on with the steps that were in flight when the process died."""
        judge, pending = self._bodies.judge, execution.pending
        if self._guard.see(self._bodies.may_have_been_in_flight(pending.values(), self._host.clock.now())):
            self._host.run_progressed(self)
            return True
        begun = [one for one in self._bodies.in_flight_before() if pending.get(one.id) is one]
        for command in begun:
            failure = self._guard.count(command, judge)
            if failure is not None:
                self._outcomes.record(execution, command, failure)
                self.advance()
                return False
        error = self._guard.refused(begun, judge)
        if error is not None:
            self._park(error)
        return error is None

    def _accept_issued(self, execution: Execution) -> None:
        for command in execution.take_issued():
            if execution.pending.get(command.id) is command:
                self._dispatch_command(command)

    def _decide_next_state(self, execution: Execution) -> None:
        """Where does the run stand?"""
        if self._is_busy and (execution.in_memory or not self._late_attempts_expired(execution)):
            if self._draining and not self._bodies.is_running:
                self._release_to_others()
            elif self._timetable.dues or self.alarm_at is not None or self._claimed.deadline is not None:
                self._set_alarm()
            return
        idle = execution.idle
        if idle is IdleState.DONE:
            self._finish(execution)
        elif self._draining:
            self._release_to_others()
        elif self._can_quiesce(execution):
            self._outcomes.resolve_uncertain(execution, at_last=True)
            self.append_entry(EntryKind.SETTLED, execution.undoing.quiesce_step or "", "settled")
            self.advance()
        elif idle is IdleState.STUCK:
            self._park(DeadlockError(f"every branch waits for another one: {execution.loop.stacks()}"))
        elif execution.in_memory > self._bodies.waiting_for_retry:
            self._release_to_others()  # a body was cancelled by somebody else: it has to run again
        else:
            self._wait_or_suspend()

    def _can_quiesce(self, execution: Execution) -> bool:
        """Undoing waits until it is known what was done, also by children that were cancelled."""
        return execution.undoing.quiesce_step in execution.pending and not execution.cancelled_children

    def _late_attempts_expired(self, execution: Execution) -> bool:
        """Only bodies that were given up are still running, and we have waited for them long enough."""
        if execution.idle is not IdleState.DONE and not self._can_quiesce(execution):
            return False
        if self._bodies.has_active_attempts or self._waits.is_busy or self._children.is_busy:
            return False
        return self._patience.has_expired()

    def _check_history_length(self, execution: Execution) -> None:
        """A history that grows for ever makes every replay slower, until nothing moves any more."""
        settings = self._host.settings
        if execution.undoing.has_begun:
            return
        if execution.length >= settings.history_limit and EntryKind.LIMIT not in self._stop_entries:
            self.append_entry(EntryKind.LIMIT, name="the history is too long")
        elif execution.length >= 2 * settings.history_limit:
            self._request_transition(*self._departure.history_limit_reached())
        elif execution.length >= settings.history_warning and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "run %s of %s has a history of %d entries, and at %d it is stopped: let it begin anew with ctx.recur()",
                self.run_id,
                self.workflow.name,
                execution.length,
                settings.history_limit,
            )

    @_entry
    def drain(self) -> None:
        """Start nothing more; what runs may finish; then hand the run back."""
        self._draining = True
        self._bodies.drain()
        self.advance()

    @_entry
    def abandon_attempts(self) -> None:
        """The grace is over: the run is handed back without waiting for its bodies."""
        if not self.closed and not self.is_closing:
            self._release_to_others()

    def fail(self, error: Exception) -> None:
        """The engine could not go on with it; see `_entry`."""
        if not self.closed:
            self._host.run_failed(self, error)

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
        self._cancel_timers()
        self._waits.close()
        self._children.close()
        self._bodies.close()
        self.__dict__.pop("_mailbox", None)  # the two know each other, and so does this one
        self.__dict__.pop("_patience", None)
        self._outcomes.close()
        if self._execution is not None:
            with no_current_task():
                self._execution.drop()
            self._context.attach(None)
            self._context.on_value_set = None
            self._execution = None  # the two know each other: without this only the collector would free them

    def _cancel_timers(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = self.alarm_at = None
        if "_patience" in self.__dict__:
            self._patience.cancel()
        self._waits.cancel_indexing()
        self._children.cancel()
        self._bodies.cancel()

    # Entries: the one way into the execution

    def append_entry(
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
        self._host.journal.enqueue(self)
        if kind in STOPS:
            self._stop_entries.append(kind)
            self._children.cancel_dependents(entry.seq)
            if kind is EntryKind.CANCEL:
                self._log.write_at(entry.seq, "cancel_received", reason=name)
            elif kind is EntryKind.TIMEOUT:
                self._log.write_at(entry.seq, "deadline_passed")
        try:
            execution.deliver(entry)
        except Exception as error:  # code that does not fit, spins, or a value that cannot be read: keep the run
            self._park(error)

    def _run_or_park(self, move: Callable[..., None], *args: Any) -> bool:
        try:
            move(*args)
        except Exception as error:  # code that does not fit, spins, or a history that cannot be read: keep the run
            self._park(error)
            return False
        return True

    @_entry
    def read_inbox_item(self, letter: InboxItem) -> None:
        if not self.closed and not self.is_closing and self._execution is not None:
            with no_current_task():
                self._mailbox.read(letter, self._execution)
                self.advance()

    @_entry
    def inbox_checked(self) -> None:
        """All mail there was has been read: what is still missing can be asked for."""
        if not self.closed and not self.is_closing and self._execution is not None:
            with no_current_task():
                self._waits.retry_unregistered(self._execution.pending)
                self.advance()

    @_entry
    def on_wait_indexed(self, command: Command, failure: Exception | None) -> None:
        execution = self._execution
        if self.closed or self.is_closing or execution is None:
            return
        with no_current_task():
            if execution.pending.get(command.id) is not command:
                pass
            elif failure is None:
                self._waits.register(command)
            else:
                value = encode_failure(self._host.codec, failure)
                self.append_entry(EntryKind.EVENT, command.id, command.name, ok=False, input=command.input, value=value)
            self.advance()

    def _create_children_and_read_backlog(self, execution: Execution) -> None:
        """By what is at hand: children to be born and messages that were read. Now and then others get their turn."""
        for _ in range(MAX_STEPS_PER_TURN):
            if self._draft.transition is not None or not (
                self._children.create_next(execution) or self._append_from_backlog(execution)
            ):
                return
            self._accept_issued(execution)
        self._host.loop.call_soon(self.advance)

    def _append_from_backlog(self, execution: Execution) -> bool:
        found = self._waits.next_from_backlog(execution.pending)
        if found is None:
            return False
        command, message = found
        body = message.event.body
        if (error := find_misfit(command, body)) is not None:
            self._mailbox.reject(execution, command, error, message.seq)
            return True
        self.append_entry(command.kind, command.id, command.name, input=command.input, value=body, event=message.seq)
        return True

    @_entry
    def on_child_resolved(self, command: Command, found: RunRecord | EddaError) -> None:
        execution = self._execution
        if not self.closed and not self.is_closing and execution is not None:
            with no_current_task():
                if execution.pending.get(command.id) is command:
                    self._children.record(command, found)
                self.advance()

    # Steps

    def _dispatch_command(self, command: Command) -> None:
        if command.kind in WAITS:
            self._waits.register(command)
        elif command.target is not None:
            self._children.accept(command)
        elif command.due is not None:
            self._timetable.add(command.due, command)
        elif command.kind is EntryKind.STEP and command.retry_at is not None:
            self._timetable.add(self._bodies.schedule_retry(command), command)
        elif command.kind is EntryKind.STEP:
            self._bodies.enqueue(command)

    @_entry
    def on_step_finished(self, command: Command, outcome: Outcome | Unready | None) -> None:
        execution = self._execution
        if execution is not None and self._draft.transition is None:
            with no_current_task():
                if isinstance(outcome, Unready):
                    self._park(ConfigurationError(f"step {command.id!r}: {outcome.error}"))
                    return
                if outcome is not None:
                    self._outcomes.record(execution, command, outcome)
                self.advance()

    @_entry
    def on_step_heartbeat(self, command: Command, value: bytes) -> None:
        execution = self._execution
        if self.closed or self.is_closing or execution is None or execution.pending.get(command.id) is not command:
            return
        with no_current_task():
            self.append_entry(EntryKind.HEARTBEAT, command.id, command.name, value=value, attempt=command.attempt)

    def on_value_set(self, fact: RunValue) -> None:
        """What was set before the last recorded entry went in with it."""
        execution = self._execution
        if execution is not None and execution.length >= self._replayed_entries:
            self._draft.attach(fact, execution.length)

    def on_step_never_started(self, command: Command) -> None:
        self._outcomes.mark_uncertain(command)

    def on_command_cancelled(self, command: Command) -> None:
        execution = self._execution
        assert execution is not None
        if command.kind in WAITS:
            self._waits.cancel(command.id)
        elif command.target is not None:
            self._children.abandon(command, execution, is_new=execution.length >= self._replayed_entries)
        elif command.kind is EntryKind.STEP:
            self._bodies.abandon(command, execution.now)

    # Time

    def _next_due(self) -> int | None:
        execution = self._execution
        assert execution is not None
        due = self._timetable.next_due(execution.pending)
        deadline = None if self._claimed.deadline is None else self._deadline
        if due is None or deadline is None:
            return deadline if due is None else due
        return min(due, deadline)

    @property
    def _deadline(self) -> int | None:
        """It has nothing to say to a run that is undoing, nor to code that is done: that may be about to begin anew."""
        deadline, execution = self._claimed.deadline, self._execution
        if deadline is None or execution is None or execution.idle is IdleState.DONE:
            return None
        return None if EntryKind.TIMEOUT in self._stop_entries or execution.undoing.has_begun else deadline

    def _set_alarm(self) -> None:
        due = self._next_due()
        if due == self.alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self.alarm_at = due
        if due is not None:
            self._alarm = self._host.clock.call_at(due, self._deliver_due)

    @_entry
    def _deliver_due(self) -> None:
        """Deliver what is due: earliest first, one entry each, run to idle in between."""
        self._alarm = self.alarm_at = None
        while not self.closed and not self.is_closing and self._execution is not None:
            due = self._next_due()
            if due is None or due > self._host.clock.now():
                break
            self._deliver_due_one(due)
            if self._execution is not None:
                self._accept_issued(self._execution)
        self.advance()

    def _deliver_due_one(self, due: int) -> None:
        if self._deadline is not None and self._deadline <= due:
            self.append_entry(EntryKind.TIMEOUT, name="the run passed its deadline", at=due)
            return
        command = self._timetable.pop()
        now = max(due, self._host.clock.now())
        if command.kind is EntryKind.TIMER:
            self.append_entry(EntryKind.TIMER, command.id, command.name, at=now)
        elif command.kind in WAITS:
            self._waits.cancel(command.id)
            self.append_entry(command.kind, command.id, command.name, at=now, ok=False, input=command.input)
        else:
            self._bodies.enqueue(command)

    def _wait_or_suspend(self) -> None:
        due = min((due for due in (self._next_due(), self._waits.next_due) if due is not None), default=None)
        if due is not None and due - self._host.clock.now() <= self._host.settings.linger * MICROSECONDS:
            self._set_alarm()
            return
        assert self._execution is not None
        first = next(iter(self._execution.pending.values()))
        reason = repr(first)
        if first.kind in WAITS:
            reason = first.call.describe(values=not self._host.codec.is_sealing)
        if self._log.is_verbose:
            self._waits_for = first.call.describe(values=False) if first.kind in WAITS else repr(first)
        status = RunStatus.COMPENSATING if self._is_undoing else _WAITING[first.kind]
        self._request_transition(Suspend(self._draft.absorbed, due, status, reason), waiting=True)

    # Leaving memory

    def _finish(self, execution: Execution) -> None:
        try:
            self._request_transition(*self._departure.complete(execution, self._stop_entries))
        except ParkedError as error:
            self._park(error)
        except KeyboardInterrupt:  # raised through its code: this process ends, and another one goes on with the run
            self._release_to_others()

    def _park(self, error: Exception) -> None:
        if self.is_closing:
            return
        if self._claimed.end_if_parked and not self._has_begun_undoing:
            self._end_unread(error)
            return
        due: int | None = None  # its process would die again: not before it is resumed
        if not isinstance(error, ProcessDiedError):
            rest = self._host.settings.parked_rest(self._claimed.attempts)
            due = self._host.clock.now() + int(rest * MICROSECONDS)
        self._request_transition(
            Suspend(self._draft.absorbed, due, RunStatus.PARKED, f"{type(error).__name__}: {error}"[:2000])
        )

    @property
    def _has_begun_undoing(self) -> bool:
        return self._claimed.undoing or self._is_undoing

    def _end_unread(self, error: Exception) -> None:
        """It was cancelled while it was parked, and cannot go on: it ends without its code."""
        claimed, codec = self._claimed, self._host.codec
        self._log.write("run_ends_unread", error=redact_credentials(f"{type(error).__name__}: {error}"))
        self._was_parked = False
        self._ends_unread = f"{type(error).__name__}: {error}"[:2000]
        inbox.absorb(claimed, self._draft, codec, self._host.clock.now())
        end, letters = self._departure.cancelled_unread(inbox.reason(claimed, codec, error))
        self._request_transition(end, (*letters, *inbox.cancels(claimed, codec)))

    def _release_to_others(self) -> None:
        self._request_transition(Suspend(self._draft.absorbed, 0, RunStatus.RUNNING))

    def _request_transition(
        self, last: FinalTransition, letters: tuple[RunSignal, ...] = (), *, waiting: bool = False
    ) -> None:
        """From here on nothing is delivered; the run is gone when this is committed."""
        if not self.is_closing:
            if not isinstance(last, End):
                self._bodies.report_progress()
            if self._draft.transition is None:
                self._draft.leave(last, letters, waiting=waiting)
                self._cancel_timers()
                self._host.journal.enqueue(self)

    # The journal's side

    @_entry
    def next_write(self, most: int) -> RunWrite | None:
        return None if self.closed else self._draft.take(most)

    @_entry
    def on_committed(self, bundle: RunWrite, written: BatchResult) -> None:
        self._note(bundle)
        if bundle.start is not None:
            self.on_run_stored()
        if bundle.waits:
            self._apply_wait_result(bundle, written)
        if bundle.children or bundle.letters or bundle.dispatches or bundle.outgoing:
            self._host.on_written(bundle)
        is_refused = self.run_id in written.unmet and isinstance(bundle.move, End | Recur)
        if self._herald is not None:
            is_ended = isinstance(bundle.move, End) and not is_refused
            self._herald.on_committed(AFTER_LAST_ENTRY if is_ended else self._draft.committed)
        if is_refused:
            self._keep_running(bundle.move)
        elif bundle.move is not None and self._apply_transition(bundle.move, written):
            return
        elif self._draft.transition is None:
            self.advance()
        elif self._draft.has_more:
            self._host.journal.enqueue(self)

    def _note(self, bundle: RunWrite) -> None:
        """What was committed."""
        self._draft.mark_committed(bundle)
        self._log.flushed(self._draft.committed)
        if bundle.undoing:
            self._log.write("compensation_begun")
        if self._guard and self._guard.note(bundle, self._execution.pending if self._execution is not None else {}):
            self._host.run_progressed(self)

    def _apply_transition(self, move: Transition, written: BatchResult) -> bool:
        if isinstance(move, Recur):
            if self._log.is_verbose:
                self._log.write("run_recurred", generation=self.gen + 1)
            self._close()
            self._host.run_recurred(self, self._departure.next_generation(move))
        elif isinstance(move, End):
            self._log_end(move)
            self._close()
            self._host.run_ended(self, move)
        elif isinstance(move, Suspend) and self.is_closing:
            self._log_release(move)
            self._close()
            self._host.run_suspended(self, move, self.run_id in written.ready)
        else:
            return False
        return True

    def _log_end(self, end: End) -> None:
        self._log_resumed()
        if end.status is RunStatus.FAILED:
            self._log.write("run_failed", error=self._departure.reason)
        elif end.status is RunStatus.CANCELLED:
            self._log.write("run_cancelled", reason=self._departure.reason)
        elif self._execution is not None and self._execution.unfinished:
            self._log.write("steps_unfinished", steps=", ".join(self._execution.unfinished))
        if end.status is RunStatus.COMPLETED and self._log.is_verbose:
            self._log.write("run_completed")

    def _log_release(self, release: Suspend) -> None:
        if release.status is RunStatus.PARKED:
            due = tell_moment(release.ready_at) if release.ready_at else "its resumption by hand"
            reason = redact_credentials(release.reason or "")
            self._host.parking_log.write(self._log, self.run_id, self.workflow.name, reason, due)
            return
        self._log_resumed()
        if self._log.is_verbose and release.status is RunStatus.RUNNING:
            self._log.write("run_handed_back")
        elif self._log.is_verbose:
            until = "it comes" if release.ready_at is None else tell_moment(release.ready_at)
            self._log.write("run_suspended", status=release.status.value, waits_for=self._waits_for, until=until)

    def _log_resumed(self) -> None:
        if self._was_parked:
            self._was_parked = False
            self._log.write("run_resumed")

    def _keep_running(self, move: Transition | None) -> None:
        """Somebody began to wait for the run's end, or mail came in, before it could go."""
        self._draft.cancel_transition()
        if self._ends_unread is not None:  # whoever claims it next has all of it
            self._request_transition(Suspend(self._draft.absorbed, 0, RunStatus.PARKED, self._ends_unread))
            return
        if isinstance(move, End):
            self._host.fetch_watchers(self)
        else:
            self._host.request_inbox(self)

    @_entry
    def watchers_loaded(self, watchers: tuple[EndWatcher, ...]) -> None:
        self._departure.watchers = watchers
        if self._waits.may_have_exclusive_messages:
            self._host.request_inbox(self)
        else:
            self.advance()

    def _apply_wait_result(self, bundle: RunWrite, written: BatchResult) -> None:
        pending = self._execution.pending if self._execution is not None else {}
        if self._waits.apply_result(bundle, written, pending):
            self._draft.cancel_suspend()
            self._host.request_inbox(self)

    def on_run_stored(self) -> None:
        if not self.stored.done():
            self.stored.set_result(None)
        self._notify_started()

    def _notify_started(self) -> None:
        if self._log.is_verbose:
            self._log.write("run_started")
        if self._herald is not None:
            self._herald.run_started(self._host.codec.decode(self._claimed.input))

    @_entry
    def on_rejected(self, bundle: RunWrite, error: StorageRejectedError) -> None:
        """The database refuses what this run has to say: a run that was never stored fails its starter,
        a stored one fails, without the record that cannot be written, be it its own end. If even that end is refused,
        the fault is not in what the run says: the run stays open, is given back and tried again, ever more rarely."""
        if bundle.start is not None:
            if not self.stored.done():
                self.stored.set_exception(error)
            self._close()
            self._host.run_unstored(self)
            return
        if self._is_refused:
            self.fail(error)
            return
        self._is_refused = True
        self._draft.replace_with_failure(*self._departure.failed(error))
        self._cancel_timers()
        if self._execution is not None:  # its code is over, even if it cannot end at once
            with no_current_task():
                self._execution.drop()
        self._host.journal.enqueue(self)
