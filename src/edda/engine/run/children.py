"""The runs that one run starts or waits for.

The rows of a child whose id Edda made are in the same commit as the entry that records its start, so there is one child
however often the parent is replayed. A run that may exist already (with a chosen id, or started by another caller) is
started or read first, and watched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from edda.core.exceptions import encode_failure
from edda.core.model import EndWatcher, EntryKind, RunId, RunRecord, RunSignal, Start
from edda.core.states import ENDED
from edda.engine.tasks import TRANSIENT_ERRORS, start_task
from edda.errors import ArgumentError, ChildDepthError, EddaError
from edda.workflow.children import ChildCall, ChildStarted, RunEnded
from edda.workflow.execution import Command, Execution

if TYPE_CHECKING:
    from .run import LiveRun

CANCELLED = "the run that started it was cancelled"


class ChildRuns:
    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._services = run.services
        self._claimed = run.claimed
        self._writes = run.writes
        self.to_create: deque[Command] = deque()
        self.to_resolve: deque[Command] = deque()
        """They wait for the journal, in the order they were issued."""
        self._searches: dict[Command, asyncio.Task[None]] = {}
        self._cancel_on_resolve: dict[Command, int] = {}
        """Abandoned while it was not known whether they exist, with the length of the history at that time."""
        self._started: list[ChildStarted] = []
        """Since the run was claimed; the others are in the history."""

    @property
    def is_busy(self) -> bool:
        return bool(self.to_create or self.to_resolve or self._searches)

    def accept(self, command: Command) -> None:
        call: ChildCall = command.call
        if not command.started:
            (self.to_resolve if call.has_custom_id else self.to_create).append(command)

    # New children

    def create_next(self, execution: Execution) -> bool:
        """The child's rows are written with the entry that records its start. False if there is no child to create."""
        while self.to_create:
            command = self.to_create.popleft()
            if execution.pending.get(command.id) is command:
                try:
                    start = self._to_start(command)
                except ChildDepthError as error:
                    self._fail(command, error)
                    return True
                self._writes.start_child(start, execution.length + 1)
                self._record_start(command, is_ours=True)
                return True
        return False

    def _to_start(self, command: Command) -> Start:
        call: ChildCall = command.call
        if self._claimed.depth >= self._services.settings.child_depth:
            raise ChildDepthError(
                f"run {self._claimed.run_id} is a child of a child, {self._claimed.depth} times over: a workflow that "
                "starts itself has to end somewhere. Use ctx.recur() to go on for ever, or raise "
                "Settings(child_depth=...)."
            )
        assert call.workflow is not None
        assert call.options is not None
        now, options = self._services.clock.now(), call.options
        return Start(
            run_id=RunId(command.target or ""),
            workflow=call.workflow,
            input=call.input,
            created_at=now,
            ready_at=now + options.delay,
            deadline=None if options.timeout is None else now + options.delay + options.timeout,
            parent=self._claimed.run_id,
            parent_step=command.id if call.is_awaited and not call.has_custom_id else None,
            depth=self._claimed.depth + 1,
        )

    # Runs that may exist

    def resolve_ready(self, committed: int, pending: Mapping[str, Command]) -> None:
        """Starting or watching a run is an effect: the entries before it have to be committed."""
        while self.to_resolve and self.to_resolve[0].after_entry <= committed:
            command = self.to_resolve.popleft()
            if pending.get(command.id) is command:
                self._start_resolving(command)

    def _start_resolving(self, command: Command) -> None:
        self._searches[command] = start_task(self._resolve_task(command), loop=self._run.worker.loop, name="edda-child")

    async def _resolve_task(self, command: Command) -> None:
        outcome: RunRecord | EddaError
        try:
            outcome = await self._resolve(command)
        except EddaError as error:
            if isinstance(error, TRANSIENT_ERRORS):
                self._run.fail(error)  # the database's fault, never the run's: the run is released and tries again
                return
            outcome = error
        except Exception as error:  # of the engine: the run would wait for an answer that never comes
            self._run.fail(error)
            return
        finally:
            del self._searches[command]
        after_entry = self._cancel_on_resolve.pop(command, None)
        if after_entry is not None and isinstance(outcome, RunRecord) and outcome.parent == self._claimed.run_id:
            self._cancel(outcome.run_id, after_entry)
        self._run.on_child_resolved(command, outcome)

    async def _resolve(self, command: Command) -> RunRecord:
        call: ChildCall = command.call
        run_id = RunId(command.target or "")
        if command in self._cancel_on_resolve:
            return await self._run.worker.start_or_watch(None, run_id, None)
        if run_id == self._claimed.run_id:
            raise ArgumentError(f"run {run_id} waits for its own end: it would wait for ever")
        start = None if call.workflow is None else self._to_start(command)
        watcher = EndWatcher(self._claimed.run_id, command.id) if call.is_awaited else None
        return await self._run.worker.start_or_watch(start, run_id, watcher)

    # Recording

    def record(self, command: Command, found: RunRecord | EddaError) -> None:
        """The run was started or found, or not."""
        if isinstance(found, EddaError):
            self._fail(command, found)
        elif command.kind is EntryKind.CHILD and found.status in ENDED and found.value is not None:
            ended = RunEnded(found.run_id, found.status, found.value)
            self._append_for(command, command.kind, ended.outcome(self._services.codec), ok=ended.is_ok)
        else:
            self._record_start(command, is_ours=found.parent == self._claimed.run_id)

    def _record_start(self, command: Command, *, is_ours: bool) -> None:
        """Only a run that this one started is cancelled with it."""
        call: ChildCall = command.call
        assert command.target is not None
        started = ChildStarted(
            command.target, cancel_with_parent=call.cancel_with_parent and is_ours, is_awaited=call.is_awaited
        )
        self._started.append(started)
        self._append_for(command, EntryKind.START, self._services.codec.encode(started))

    def _fail(self, command: Command, error: Exception) -> None:
        self._append_for(command, command.kind, encode_failure(self._services.codec, error), ok=False)

    def _append_for(self, command: Command, kind: EntryKind, value: bytes, *, ok: bool = True) -> None:
        self._run.append_entry(kind, command.id, command.name, ok=ok, input=command.input, value=value)

    # Cancelling

    def abandon(self, command: Command, execution: Execution, *, is_new: bool) -> None:
        """The workflow's code does not await it any more. `is_new`: no replay, so a cancel was not sent yet."""
        if command.last_heartbeat is None:  # it may exist: it is being started right now, or was before a crash
            call: ChildCall = command.call
            is_ours = call.has_custom_id and call.workflow is not None and call.cancel_with_parent
            if is_ours and (command in self._searches or command.is_replay):
                self._cancel_on_resolve[command] = execution.length
                if command not in self._searches:
                    self._start_resolving(command)
            return
        started = self._services.codec.decode(command.last_heartbeat, ChildStarted)
        if started.cancel_with_parent:
            execution.cancelled_children.add(started.run_id)
            if is_new:
                self._cancel(started.run_id, execution.length)

    def cancel_dependents(self, after_entry: int) -> None:
        """Cancel the children that the code does not await, but that end with their parent."""
        codec = self._services.codec
        recorded = [entry.value for entry in self._claimed.entries if entry.kind is EntryKind.START and entry.ok]
        for started in (*(codec.decode(value, ChildStarted) for value in recorded), *self._started):
            if started.cancel_with_parent and not started.is_awaited:
                self._cancel(started.run_id, after_entry)

    def _cancel(self, run_id: str, after_entry: int) -> None:
        signal = RunSignal(RunId(run_id), EntryKind.CANCEL, value=self._services.codec.encode(CANCELLED))
        self._writes.add_signal(signal, after_entry)

    def cancel_tasks(self) -> None:
        for task in self._searches.values():
            task.cancel()
