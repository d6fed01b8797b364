"""One run in memory: its execution, its activities, timers, waits and children, and what it has to write.

Workflow code may run ahead of the journal, because it has no effects. Each effect (an attempt of a step, an answer to a
caller, leaving memory) waits until every entry before its decision is committed.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from msgspec import Struct, field

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
from edda.core.states import RunStatus
from edda.core.type_models import TypeMismatchError
from edda.engine.log import RunLog
from edda.engine.log import runs as run_logger
from edda.engine.tasks import no_current_task
from edda.engine.worker.process_deaths import CrashGuard
from edda.errors import (
    ConfigurationError,
    DeadlockError,
    EddaError,
    LeaseLostError,
    PayloadError,
    ProcessDiedError,
    StorageRejectedError,
)
from edda.workflow.channels import carried_subscriptions
from edda.workflow.client import current_app, current_context
from edda.workflow.context import RunContext
from edda.workflow.events import stored_event
from edda.workflow.execution import STOPS, Command, Execution, IdleState

from .activities import ActivityRunner
from .children import ChildRuns
from .completion import RunCompletion
from .hooks import AFTER_LAST_ENTRY, RunHooks
from .inbox import InboxReader, find_misfit
from .outcomes import Outcome, Unready
from .waits import WAITS, EventWaits
from .writes import FinalTransition, RunWriteBuffer

if TYPE_CHECKING:
    from edda.engine.clock import TimerHandle
    from edda.engine.services import EngineServices
    from edda.engine.worker.worker import Worker
    from edda.workflow.workflow import Workflow

_WAITING = {
    EntryKind.TIMER: RunStatus.WAITING_FOR_TIMER,
    EntryKind.STEP: RunStatus.WAITING_FOR_TIMER,
    EntryKind.EVENT: RunStatus.WAITING_FOR_EVENT,
    EntryKind.MESSAGE: RunStatus.WAITING_FOR_MESSAGE,
    EntryKind.CHILD: RunStatus.WAITING_FOR_CHILD,
    EntryKind.SETTLED: RunStatus.WAITING_FOR_CHILD,
}
"""The status of a suspended run by the kind of its first pending command; a step then waits for its next attempt."""
MAX_STEPS_PER_TURN = 100
"""New children and messages that are read before other runs get the loop."""


P = ParamSpec("P")
R = TypeVar("R")


def _entry(method: Callable[Concatenate[LiveRun, P], R]) -> Callable[Concatenate[LiveRun, P], R | None]:
    """For methods that the loop, a task or the worker calls: after an unexpected error nothing would drive the run any
    more. The worker drops it from memory and releases it. The methods that every step passes do the same without it."""

    @wraps(method)
    def guarded(self: LiveRun, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # a bug, or no memory: errors of the user's code are caught where it is called
            self.fail(error)
            return None

    return guarded


class TimerQueue(Struct):
    """When the commands of a run are due: the earliest first, and of two at the same time the one issued first."""

    dues: list[tuple[int, int, Command]] = field(default_factory=list)
    """A heap. Commands that are not pending any more stay in it until `next_due` removes them."""
    order: count[int] = field(default_factory=count)

    def add(self, due: int, command: Command) -> None:
        heapq.heappush(self.dues, (due, next(self.order), command))

    def next_due(self, pending: Mapping[str, Command]) -> int | None:
        """Removes commands that are not pending any more."""
        while self.dues and pending.get(self.dues[0][2].id) is not self.dues[0][2]:
            heapq.heappop(self.dues)
        return self.dues[0][0] if self.dues else None


class LiveRun:
    def __init__(
        self,
        worker: Worker,
        workflow: Workflow[Any, Any],
        claimed: ClaimedRun,
        start: Start | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        """`start`: its rows are still to be written. `is_new`: this generation was never in memory before."""
        services = worker.services
        settings = services.settings
        self.run_id: RunId = claimed.run_id
        self.epoch = claimed.epoch
        self.generation = claimed.generation
        self.workflow: Workflow[Any, Any] = workflow
        self.worker: Worker = worker
        self.services: EngineServices = services
        self.claimed: ClaimedRun = claimed
        self.context = RunContext(self.run_id, workflow.name, self.generation, services.codec, workflow.signature)
        self.writes: RunWriteBuffer = RunWriteBuffer(claimed, start)
        self.timers: TimerQueue = TimerQueue()
        self.is_verbose = run_logger.isEnabledFor(logging.DEBUG)
        """Read once per claim: a step of a quiet run costs one attribute access."""
        self.hooks: RunHooks | None = None
        if services.hooks is not None:
            codec = services.codec
            self.hooks = RunHooks(services.hooks, self.run_id, workflow.name, lambda body: stored_event(codec, body))
        self.stored: asyncio.Future[None] = worker.loop.create_future()
        self.closed = False
        self.alarm_at: int | None = None
        self.activities = ActivityRunner(self)
        self._log: RunLog | None = None
        self._waits: EventWaits | None = None
        self._children: ChildRuns | None = None
        self._inbox: InboxReader | None = None
        self._completion: RunCompletion | None = None
        self._late_grace: asyncio.TimerHandle | None = None
        self._is_late_grace_over = False
        self._execution: Execution | None = None
        self._alarm: TimerHandle | None = None
        self._is_resumed = claimed.epoch > 1 and not is_new
        self._draining = False
        is_opened = bool(claimed.entries) and claimed.entries[-1].kind is EntryKind.RECUR
        self._replayed_entries = 0 if is_opened else len(claimed.entries)
        """Up to this entry all decisions of the code are written. The first entry of a generation runs no code."""
        self.stop_entries = [entry.kind for entry in claimed.entries if entry.kind in STOPS]
        """The entries that stopped the run, the first first."""
        self._watched_from = min(settings.history_warning, settings.history_limit)
        self.is_compensating = False
        self.was_parked = claimed.attempts > 0
        self.waits_for = ""
        self._guard = CrashGuard(claimed, settings) if claimed.crashes.deaths else None
        """None if no process died with the run, or all these deaths are void."""
        self.may_have_exclusive_messages = bool(claimed.waits or claimed.inbox)
        """Whether its inbox may have a message of a competing channel, which no other run gets."""
        self._is_refused = False
        """The database refused a record of it, and it is about to end as failed."""

    # Parts that few runs need, created on first use

    @property
    def log(self) -> RunLog:
        if self._log is None:
            self._log = RunLog(self.run_id, self.workflow.name, self.services.codec, self.claimed.input)
        return self._log

    @property
    def waits(self) -> EventWaits:
        if self._waits is None:
            self._waits = EventWaits(self)
        return self._waits

    @property
    def _child_runs(self) -> ChildRuns:
        if self._children is None:
            self._children = ChildRuns(self)
        return self._children

    @property
    def _inbox_reader(self) -> InboxReader:
        if self._inbox is None:
            self._inbox = InboxReader(self)
        return self._inbox

    @property
    def _ending(self) -> RunCompletion:
        if self._completion is None:
            self._completion = RunCompletion(self)
        return self._completion

    # Replay

    def begin(self) -> None:
        """Replay the history. Called from a plain callback of the process's loop."""
        if self.closed:
            return
        claimed = self.claimed
        try:
            if self._guard is not None and self.services.settings.is_deadly_to_replay(claimed.crashes):
                self.park(self._guard.error("the workflow's own code, on replay"))
                return
            try:
                args, kwargs = self.workflow.signature.decode_input(self.services.codec, claimed.input)
            except Exception as error:  # the stored input does not fit the code: the code must change, the run is kept
                self.park(error)
                return
            execution = self._execution = self._new_execution(args, kwargs)
            if self.writes.committed == 0 and self.epoch == 1:  # inserted by a process that did not run it
                self._notify_started()
            try:
                execution.start()
            except Exception as error:  # code that does not fit, spins, or a history that cannot be read: keep the run
                self.park(error)
                return
            stored = claimed.entries or claimed.inbox or claimed.step_commits or claimed.waits
            if stored or claimed.deadline is not None:
                self._apply_since_last_entry(execution)
            else:
                self._advance()
        except Exception as error:  # see `_entry`
            self.fail(error)

    def _new_execution(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Execution:
        claimed, codec = self.claimed, self.services.codec

        def main() -> Coroutine[Any, Any, Any]:
            current_app.set(self.worker.client)
            current_context.set(self.context)
            return self.workflow.fn(self.context, *args, **kwargs)

        execution = Execution(
            self.run_id,
            main,
            claimed.entries,
            started_at=claimed.created_at,
            resumed=self._is_resumed,
            real_loop=self.worker.loop,
            on_abandon=self.on_command_cancelled,
            same=codec.equal,
            encode=self._encode_result,
        )
        self.context.attach(execution)
        self.context.on_value_set = self.on_value_set
        if claimed.entries and claimed.entries[0].kind is EntryKind.RECUR:
            self.context.subscriptions = carried_subscriptions(codec, claimed.entries[0].value)
        if self.hooks is not None:
            execution.on_replayed = self.hooks.step_replayed
        return execution

    def _apply_since_last_entry(self, execution: Execution) -> None:
        """Apply step commits and inbox items that have no entry yet."""
        claimed = self.claimed
        if claimed.waits:
            self.waits.cancel_stale(execution.pending)
        for commit in claimed.step_commits:
            try:
                self.activities.record_committed(execution, commit)
            except Exception as error:  # a value that cannot be read: keep the run
                self.park(error)
                return
        if claimed.entries and claimed.entries[-1].kind in STOPS:
            self._child_runs.cancel_dependents(len(claimed.entries))
        for item in claimed.inbox:
            self._inbox_reader.read(item, execution)
        if claimed.deadline is not None:  # before any step starts: a run that is claimed too late must not act
            self._accept_issued(execution)
            self._deliver_due()
        else:
            self._advance()

    def _encode_result(self, result: Any) -> bytes:
        """Raises `PayloadError` if what the workflow returned cannot be stored."""
        try:
            return self.services.codec.encode(result, self.workflow.signature.returns, self._log_mismatch)
        except PayloadError as error:
            name = f"{self.claimed.workflow} {self.run_id}"
            raise PayloadError(f"the result of {name} cannot be stored: {error}") from None

    def _log_mismatch(self, mismatch: TypeMismatchError) -> None:
        self.log.write("result_mismatch", step=self.claimed.workflow, path=mismatch.path, error=mismatch.reason)

    @property
    def is_stored(self) -> bool:
        return self.writes.committed >= 0

    @property
    def signal_targets(self) -> frozenset[RunId]:
        return self.writes.signal_targets

    @property
    def is_idle(self) -> bool:
        """In memory, with nothing to do but wait for its alarm."""
        is_busy = self.activities.is_busy or self._is_reading or self.writes.transition is not None
        return self.alarm_at is not None and not is_busy

    @property
    def _active_execution(self) -> Execution | None:
        """None if the run has left memory, or is about to: what its parts report is ignored then."""
        return None if self.writes.transition is not None else self._execution

    @property
    def _is_reading(self) -> bool:
        """Whether waits or children wait for an answer of the database."""
        waits, children = self._waits, self._children
        return (waits is not None and waits.is_busy) or (children is not None and children.is_busy)

    @_entry
    def advance(self) -> None:
        self._advance()

    def _advance(self) -> None:
        """Do all that can be done now; called after every change."""
        execution, writes = self._execution, self.writes
        if execution is None or writes.transition is not None:
            return
        if execution.loop.forbidden_call is not None:
            self.park(execution.loop.forbidden_call)
            return
        if execution.length >= self._watched_from:
            self._ending.check_history_length(execution)
        if execution.issued:
            self._accept_issued(execution)
        children, waits = self._children, self._waits
        if (children is not None and children.to_create) or (waits is not None and waits.backlog_waits):
            self._create_children_and_read_backlog(execution)
        if self.activities.uncertain:
            self.activities.resolve_uncertain(execution)
        if writes.transition is None:
            self._start_work(execution)

    def _start_work(self, execution: Execution) -> None:
        """Start the steps whose history is committed, then decide whether the run stays in memory."""
        activities, children, writes = self.activities, self._children, self.writes
        begun_at = execution.compensator.begun_at
        if begun_at is not None and not self.is_compensating:
            self.is_compensating = True
            if begun_at >= self._replayed_entries:  # else it is recorded
                writes.mark_compensating()
        if not self._draining:
            if self._guard is not None and not self._may_start(execution, self._guard):
                return
            if activities.waiting_for_journal and writes.committed >= 0:
                activities.start_ready(writes.committed, execution.pending)
            if children is not None and children.to_resolve:
                children.resolve_ready(writes.committed, execution.pending)
        is_active = activities.running or activities.waiting_for_journal or activities.waiting_for_slot
        if not is_active or not execution.in_memory or self._draining:
            self._decide_next_state(execution)
        elif self.timers.dues or self.alarm_at is not None or self.claimed.deadline is not None:
            self._set_alarm()
        if writes.has_more and writes.transition is None:
            self.worker.journal.enqueue(self)

    def _may_start(self, execution: Execution, guard: CrashGuard) -> bool:
        """Whether to go on with the steps that were in flight when the process died."""
        activities, pending = self.activities, execution.pending
        if guard.see(activities.may_have_been_in_flight(pending.values(), self.services.clock.now())):
            self._deaths_are_void()
            return True
        begun = [one for one in activities.in_flight_before() if pending.get(one.id) is one]
        for command in begun:
            failure = guard.count(command, activities.policy)
            if failure is not None:
                self.activities.record(execution, command, failure)
                self._advance()
                return False
        error = guard.refused(begun, activities.policy)
        if error is not None:
            self.park(error)
        return error is None

    def _deaths_are_void(self) -> None:
        self._guard = None
        self.worker.run_progressed(self)

    def _accept_issued(self, execution: Execution) -> None:
        for command in execution.take_issued():
            if execution.pending.get(command.id) is not command:
                continue
            if command.kind in WAITS:
                self.waits.register(command)
            elif command.target is not None:
                self._child_runs.accept(command)
            elif command.due is not None:
                self.timers.add(command.due, command)
            elif command.kind is EntryKind.STEP and command.retry_at is not None:
                self.activities.schedule_retry(command)
            elif command.kind is EntryKind.STEP:
                self.activities.enqueue(command)

    def _decide_next_state(self, execution: Execution) -> None:
        """End, suspend, park, or stay in memory."""
        is_busy = self.activities.is_busy or self._is_reading
        if is_busy and (execution.in_memory or not self._late_attempts_expired(execution)):
            if self._draining and not self.activities.running:
                self.release_to_others()
            else:
                self._set_alarm()
            return
        idle = execution.idle
        if idle is IdleState.DONE:
            self._ending.complete(execution)
        elif self._draining:
            self.release_to_others()
        elif self._can_quiesce(execution):
            self.activities.resolve_uncertain(execution, at_last=True)
            self.append_entry(EntryKind.SETTLED, execution.compensator.quiesce_step or "", "settled")
            self._advance()
        elif idle is IdleState.STUCK:
            self.park(DeadlockError(f"every branch waits for another one: {execution.loop.stacks()}"))
        elif execution.in_memory > len(self.activities.waiting_for_retry):
            self.release_to_others()  # an attempt ended without an outcome: it has to run again
        else:
            self._wait_or_suspend()

    def _can_quiesce(self, execution: Execution) -> bool:
        """Compensation waits until all outcomes are known, also those of cancelled children."""
        return execution.compensator.quiesce_step in execution.pending and not execution.cancelled_children

    def _late_attempts_expired(self, execution: Execution) -> bool:
        """Only attempts that were given up are still running, and `late_grace` is over."""
        if execution.idle is not IdleState.DONE and not self._can_quiesce(execution):
            return False
        if self.activities.has_active_attempts or self._is_reading:
            return False
        if self._late_grace is None:
            self._late_grace = self.worker.loop.call_later(self.services.settings.late_grace, self._end_late_grace)
        return self._is_late_grace_over

    @_entry
    def _end_late_grace(self) -> None:
        self._is_late_grace_over = True
        self._advance()

    @_entry
    def drain(self) -> None:
        """Start nothing more, let attempts finish, then hand the run back."""
        if self.closed:
            return
        self._draining = True
        self.activities.drain()
        self._advance()

    @_entry
    def abandon_attempts(self) -> None:
        """The grace is over: hand the run back without waiting for its attempts."""
        if not self.closed and self.writes.transition is None:
            self.release_to_others()

    def fail(self, error: Exception) -> None:
        """An unexpected error of the engine; see `_entry`."""
        if not self.closed:
            self.worker.run_failed(self, error)

    def abandon(self) -> None:
        """The run is no longer this worker's: drop it without writing anything."""
        self._close()
        if not self.stored.done():
            self.stored.set_exception(LeaseLostError(f"run {self.run_id} is no longer this worker's"))
            self.stored.exception()  # else asyncio logs that it was never retrieved

    def _close(self) -> None:
        """Drop the parts. Each of them refers to this run, so without this only the garbage collector would free them.
        An attempt in a thread may go on: what it reports is ignored."""
        if self.closed:
            return
        self.closed = True
        self._cancel_timers()
        if self._execution is not None:
            with no_current_task():
                self._execution.drop()
            self.context.attach(None)
            self.context.on_value_set = None
        self._execution = self._waits = self._children = self._inbox = self._completion = self._late_grace = None
        del self.activities

    def _cancel_timers(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = self.alarm_at = None
        if self._late_grace is not None:
            self._late_grace.cancel()
        for part in (self._waits, self._children):
            if part is not None:
                part.cancel_tasks()
        if self.activities.running or self.activities.waiting_for_slot:
            self.activities.cancel_tasks()

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
        inbox_no: int | None = None,
        event: int | None = None,
    ) -> None:
        execution = self._execution
        if execution is None:
            return
        time = max(self.services.clock.now() if at is None else at, execution.now)
        entry = Entry(execution.length + 1, kind, step, name, ok, time, input, value, attempt, inbox_no, event)
        self.writes.add(entry)
        self.worker.journal.enqueue(self)
        if kind in STOPS:
            self.stop_entries.append(kind)
            self._child_runs.cancel_dependents(entry.seq)
            if kind is EntryKind.CANCEL:
                self.log.write_at(entry.seq, "cancel_received", reason=name)
            elif kind is EntryKind.TIMEOUT:
                self.log.write_at(entry.seq, "deadline_passed")
        try:
            execution.deliver(entry)
        except Exception as error:  # code that does not fit, spins, or a value that cannot be read: keep the run
            self.park(error)

    @_entry
    def _apply(self, action: Callable[[Execution], None]) -> None:
        """Do what a part or the worker reports, unless the run has left memory, or is about to."""
        execution = self._active_execution
        if execution is not None:
            with no_current_task():
                action(execution)
                self._advance()

    def read_inbox_item(self, item: InboxItem) -> None:
        self._apply(lambda execution: self._inbox_reader.read(item, execution))

    def inbox_checked(self) -> None:
        """The inbox is read: waits that were refused for it can be registered now."""

        def register(execution: Execution) -> None:
            if self._waits is not None:
                self._waits.retry_unregistered(execution.pending)

        self._apply(register)

    def on_wait_indexed(self, command: Command, failure: Exception | None) -> None:
        """A wait can be registered now, or cannot be."""

        def register(execution: Execution) -> None:
            if execution.pending.get(command.id) is not command:
                return
            if failure is None:
                self.waits.register(command)
            else:
                value = encode_failure(self.services.codec, failure)
                self.append_entry(EntryKind.EVENT, command.id, command.name, ok=False, input=command.input, value=value)

        self._apply(register)

    def on_child_resolved(self, command: Command, found: RunRecord | EddaError) -> None:
        """A run with a chosen id was started or found, or could not be."""

        def record(execution: Execution) -> None:
            if execution.pending.get(command.id) is command:
                self._child_runs.record(command, found)

        self._apply(record)

    def _create_children_and_read_backlog(self, execution: Execution) -> None:
        """Append the entries of new children and of messages that were read. After `MAX_STEPS_PER_TURN` of them other
        runs get the loop."""
        for _ in range(MAX_STEPS_PER_TURN):
            if self.writes.transition is not None or not (
                (self._children is not None and self._children.create_next(execution))
                or self._append_from_backlog(execution)
            ):
                return
            self._accept_issued(execution)
        self.worker.loop.call_soon(self.advance)

    def _append_from_backlog(self, execution: Execution) -> bool:
        found = self._waits.next_from_backlog(execution.pending) if self._waits is not None else None
        if found is None:
            return False
        command, message = found
        body = message.event.body
        if (error := find_misfit(command, body)) is not None:
            self._inbox_reader.reject(execution, command, error, message.seq)
            return True
        self.append_entry(command.kind, command.id, command.name, input=command.input, value=body, event=message.seq)
        return True

    # Steps

    def on_step_finished(self, command: Command, outcome: Outcome | Unready | None) -> None:
        """An attempt is over; None if there is nothing to record."""
        execution = self._execution
        if execution is None or self.writes.transition is not None:
            return
        try:
            with no_current_task():
                if isinstance(outcome, Unready):
                    self.park(ConfigurationError(f"step {command.id!r}: {outcome.error}"))
                    return
                if outcome is not None:
                    self.activities.record(execution, command, outcome)
                self._advance()
        except Exception as error:  # see `_entry`
            self.fail(error)

    @_entry
    def on_step_heartbeat(self, command: Command, value: bytes) -> None:
        execution = self._active_execution
        if execution is not None and execution.pending.get(command.id) is command:
            with no_current_task():
                self.append_entry(EntryKind.HEARTBEAT, command.id, command.name, value=value, attempt=command.attempt)

    def on_value_set(self, value: RunValue) -> None:
        """On replay a value that was set before the last recorded entry is stored already."""
        execution = self._execution
        if execution is not None and execution.length >= self._replayed_entries:
            self.writes.attach(value, execution.length)

    def on_command_cancelled(self, command: Command) -> None:
        execution = self._execution
        assert execution is not None
        if command.kind in WAITS:
            self.waits.cancel(command.id)
        elif command.target is not None:
            self._child_runs.abandon(command, execution, is_new=execution.length >= self._replayed_entries)
        elif command.kind is EntryKind.STEP:
            self.activities.abandon(command, execution.now)

    # Time

    def _next_due(self) -> int | None:
        execution = self._execution
        assert execution is not None
        due = self.timers.next_due(execution.pending)
        deadline = None if self.claimed.deadline is None else self._deadline
        return min((one for one in (due, deadline) if one is not None), default=None)

    @property
    def _deadline(self) -> int | None:
        """None for a run that compensates or whose code is done, which may be about to recur."""
        deadline, execution = self.claimed.deadline, self._execution
        if deadline is None or execution is None or execution.idle is IdleState.DONE:
            return None
        return None if EntryKind.TIMEOUT in self.stop_entries or execution.compensator.has_begun else deadline

    def _set_alarm(self) -> None:
        due = self._next_due()
        if due == self.alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self.alarm_at = due
        if due is not None:
            self._alarm = self.services.clock.call_at(due, self._deliver_due)

    @_entry
    def _deliver_due(self) -> None:
        """Deliver what is due: earliest first, one entry each, run to idle in between."""
        self._alarm = self.alarm_at = None
        while self._active_execution is not None:
            due = self._next_due()
            if due is None or due > self.services.clock.now():
                break
            self._deliver_due_one(due)
            if self._execution is not None:
                self._accept_issued(self._execution)
        self._advance()

    def _deliver_due_one(self, due: int) -> None:
        if self._deadline is not None and self._deadline <= due:
            self.append_entry(EntryKind.TIMEOUT, name="the run passed its deadline", at=due)
            return
        command = heapq.heappop(self.timers.dues)[2]
        now = max(due, self.services.clock.now())
        if command.kind is EntryKind.TIMER:
            self.append_entry(EntryKind.TIMER, command.id, command.name, at=now)
        elif command.kind in WAITS:
            self.waits.cancel(command.id)
            self.append_entry(command.kind, command.id, command.name, at=now, ok=False, input=command.input)
        else:
            self.activities.enqueue(command)

    def _wait_or_suspend(self) -> None:
        wait_due = self._waits.next_due if self._waits is not None else None
        due = min((due for due in (self._next_due(), wait_due) if due is not None), default=None)
        if due is not None and due - self.services.clock.now() <= self.services.settings.linger * MICROSECONDS:
            self._set_alarm()
            return
        assert self._execution is not None
        first = next(iter(self._execution.pending.values()))
        reason = repr(first)
        if first.kind in WAITS:
            reason = first.call.describe(values=not self.services.codec.is_sealing)
        if self.is_verbose:
            self.waits_for = first.call.describe(values=False) if first.kind in WAITS else repr(first)
        status = RunStatus.COMPENSATING if self.is_compensating else _WAITING[first.kind]
        self.leave(Suspend(self.writes.inbox_read, due, status, reason), waiting=True)

    # Leaving memory

    def park(self, error: Exception) -> None:
        if self.writes.transition is not None:
            return
        if self.claimed.end_if_parked and not (self.claimed.compensating or self.is_compensating):
            self._ending.end_unread(error)
            return
        due: int | None = None  # its process would die again: not before it is resumed
        if not isinstance(error, ProcessDiedError):
            rest = self.services.settings.parked_rest(self.claimed.attempts)
            due = self.services.clock.now() + int(rest * MICROSECONDS)
        self.leave(Suspend(self.writes.inbox_read, due, RunStatus.PARKED, f"{type(error).__name__}: {error}"[:2000]))

    def release_to_others(self) -> None:
        self.leave(Suspend(self.writes.inbox_read, 0, RunStatus.RUNNING))

    def leave(self, transition: FinalTransition, signals: tuple[RunSignal, ...] = (), *, waiting: bool = False) -> None:
        """From here on no entry is appended; the run leaves memory when the transition is committed."""
        writes = self.writes
        if writes.transition is None and not isinstance(transition, End):
            self.activities.flush_heartbeats()
        if writes.transition is None:
            writes.leave(transition, signals, waiting=waiting)
            self._cancel_timers()
            self.worker.journal.enqueue(self)

    # What the journal asks for and reports

    def next_write(self, limit: int) -> RunWrite | None:
        try:
            return None if self.closed else self.writes.take(limit)
        except Exception as error:  # see `_entry`
            self.fail(error)
            return None

    def on_committed(self, write: RunWrite, result: BatchResult) -> None:
        try:
            self._apply_write(write, result)
            transition = write.transition
            is_refused = self.run_id in result.refused and isinstance(transition, End | Recur)
            if self.hooks is not None:
                is_ended = isinstance(transition, End) and not is_refused
                self.hooks.on_committed(AFTER_LAST_ENTRY if is_ended else self.writes.committed)
            if is_refused:
                self._keep_running(transition)
            elif transition is not None and self._apply_transition(transition, result):
                return
            elif self.writes.transition is None and self._execution is not None:
                self._start_work(self._execution)
            elif self.writes.has_more:
                self.worker.journal.enqueue(self)
        except Exception as error:  # see `_entry`
            self.fail(error)

    def _apply_write(self, write: RunWrite, result: BatchResult) -> None:
        writes, pending = self.writes, self._execution.pending if self._execution is not None else {}
        writes.committed = max(writes.committed, 0) + len(write.entries)
        if self._log is not None:
            self._log.flushed(writes.committed)
        if write.compensating:
            self.log.write("compensation_begun")
        if self._guard is not None and self._guard.note(write, pending):
            self._deaths_are_void()
        if write.start is not None:
            if not self.stored.done():
                self.stored.set_result(None)
            if self.is_verbose or self.hooks is not None:
                self._notify_started()
        if write.waits and self.waits.apply_result(write, result, pending):
            writes.cancel_suspend()
            self.worker.request_inbox(self)
        if write.children or write.signals or write.staged_events or write.outbox_events:
            self.worker.on_written(write)

    def _apply_transition(self, transition: Transition, result: BatchResult) -> bool:
        if isinstance(transition, Recur):
            if self.is_verbose:
                self.log.write("run_recurred", generation=self.generation + 1)
            next_generation = self._ending.next_generation(transition)
            self._close()
            self.worker.run_recurred(self, next_generation)
        elif isinstance(transition, End):
            self._ending.log_end(transition, self._execution)
            self._close()
            self.worker.run_ended(self, transition)
        elif isinstance(transition, Suspend) and self.writes.transition is not None:
            self._ending.log_suspended(transition)
            self._close()
            self.worker.run_suspended(self, transition, self.run_id in result.ready)
        else:
            return False
        return True

    def _keep_running(self, transition: Transition | None) -> None:
        """The End or Recur was refused: a run began to watch this one, or an inbox item arrived."""
        self.writes.cancel_transition()
        if self._ending.ends_unread is not None:  # the next claim reads the whole inbox
            self.leave(Suspend(self.writes.inbox_read, 0, RunStatus.PARKED, self._ending.ends_unread))
            return
        if isinstance(transition, End):
            self.worker.fetch_watchers(self)
        else:
            self.worker.request_inbox(self)

    @_entry
    def watchers_loaded(self, watchers: tuple[EndWatcher, ...]) -> None:
        self._ending.watchers = watchers
        if self.may_have_exclusive_messages:
            self.worker.request_inbox(self)
        else:
            self._advance()

    def _notify_started(self) -> None:
        if self.is_verbose:
            self.log.write("run_started")
        if self.hooks is not None:
            self.hooks.run_started(self.services.codec.decode(self.claimed.input))

    @_entry
    def on_rejected(self, write: RunWrite, error: StorageRejectedError) -> None:
        """The database refuses a record of this run. A run that was never stored fails its caller; a stored one ends as
        failed, without the record. If that end is refused too, the fault is not in the records: the run stays open,
        is released and tried again, ever more rarely."""
        if write.start is not None:
            if not self.stored.done():
                self.stored.set_exception(error)
            self._close()
            self.worker.run_unstored(self)
            return
        if self._is_refused:
            self.fail(error)
            return
        self._is_refused = True
        self.writes.replace_with_failure(*self._ending.failed(error))
        self._cancel_timers()
        if self._execution is not None:  # its code is over, even if it cannot end at once
            with no_current_task():
                self._execution.drop()
        self.worker.journal.enqueue(self)
