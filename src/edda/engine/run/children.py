"""The runs that one run starts or waits for.

A child with an id of Edda's own is born in the very commit that records its start, so there is one of it however often
the parent is replayed. What may exist already (a chosen id, a run that somebody else started) is looked for first and
watched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from edda.core.codec import Codec
from edda.core.exceptions import encode_failure
from edda.core.model import ClaimedRun, EndWatcher, EntryKind, RunId, RunRecord, RunSignal, Start
from edda.core.states import ENDED
from edda.engine.clock import Clock
from edda.engine.settings import Settings
from edda.engine.tasks import start_task
from edda.errors import (
    ArgumentError,
    ChildDepthError,
    EddaError,
    MigrationError,
    StorageConflictError,
    StorageUnavailableError,
)
from edda.workflow.children import ChildCall, ChildStarted, RunEnded
from edda.workflow.execution import Command, Execution

from .host import AppendEntry
from .writes import RunWriteBuffer

CANCELLED = "the run that started it was cancelled"


class ChildServices(Protocol):
    """What children need of the worker."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    codec: Codec
    settings: Settings

    def start_or_watch(self, start: Start | None, run_id: RunId, watcher: EndWatcher | None) -> Awaitable[RunRecord]:
        """Start a run that may exist, if there is one to start, and have its end told, if somebody waits for it."""
        ...


class ChildRuns:
    """`found` is told of a run that had to be looked for, or what is wrong with it."""

    def __init__(
        self,
        nursery: ChildServices,
        claimed: ClaimedRun,
        draft: RunWriteBuffer,
        *,
        deliver: AppendEntry,
        found: Callable[[Command, RunRecord | EddaError], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._nursery = nursery
        self._claimed = claimed
        self._draft = draft
        self._deliver = deliver
        self._on_resolved = found
        self._failed = failed
        self.to_create: deque[Command] = deque()
        self.to_resolve: deque[Command] = deque()
        """They wait for the journal, in the order they were issued."""
        self._searches: dict[Command, asyncio.Task[None]] = {}
        self._cancel_on_resolve: dict[Command, int] = {}
        """Abandoned while it was not known whether they exist, with the number of entries it was decided after."""
        self._started: list[ChildStarted] = []
        """By this incarnation; the others are in the history."""

    @property
    def is_busy(self) -> bool:
        return bool(self.to_create or self.to_resolve or self._searches)

    def accept(self, command: Command) -> None:
        call: ChildCall = command.call
        if command.started:
            return
        (self.to_resolve if call.has_custom_id else self.to_create).append(command)

    # Births

    def create_next(self, execution: Execution) -> bool:
        """The child's rows go in with the entry that records its start. False if there is none to be born."""
        while self.to_create:
            command = self.to_create.popleft()
            if execution.pending.get(command.id) is command:
                self._create(command, execution.length + 1)
                return True
        return False

    def _create(self, command: Command, needs: int) -> None:
        if self._is_deepest:
            self._fail(command, self._too_deep())
            return
        self._draft.start_child(self._to_start(command), needs)
        self._record_start(command, is_ours=True)

    @property
    def _is_deepest(self) -> bool:
        return self._claimed.depth >= self._nursery.settings.child_depth

    def _too_deep(self) -> ChildDepthError:
        return ChildDepthError(
            f"run {self._claimed.run_id} is a child of a child, {self._claimed.depth} times over: a workflow that "
            "starts itself has to end somewhere. Use ctx.recur() to go on for ever, or raise Settings(child_depth=...)."
        )

    def _to_start(self, command: Command) -> Start:
        call: ChildCall = command.call
        assert call.workflow is not None
        assert call.options is not None
        now, options = self._nursery.clock.now(), call.options
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
        """To start a run, and to watch one, is an effect: what it was decided on has to be durable."""
        while self.to_resolve and self.to_resolve[0].after_entry <= committed:
            command = self.to_resolve.popleft()
            if pending.get(command.id) is command:
                self._start_resolving(command)

    def _start_resolving(self, command: Command) -> None:
        self._searches[command] = start_task(self._resolve_task(command), loop=self._nursery.loop, name="edda-child")

    async def _resolve_task(self, command: Command) -> None:
        outcome: RunRecord | EddaError
        try:
            outcome = await self._resolve(command)
        except EddaError as error:
            if isinstance(error, StorageUnavailableError | StorageConflictError | MigrationError):
                self._failed(error)  # the database's fault, never the run's: the search begins anew
                return
            outcome = error
        except Exception as error:  # not the child's: the run would wait for an answer that never comes
            self._failed(error)
            return
        finally:
            del self._searches[command]
        needs = self._cancel_on_resolve.pop(command, None)
        if needs is not None and isinstance(outcome, RunRecord) and outcome.parent == self._claimed.run_id:
            self._cancel(outcome.run_id, needs)
        self._on_resolved(command, outcome)

    async def _resolve(self, command: Command) -> RunRecord:
        call: ChildCall = command.call
        run_id = RunId(command.target or "")
        if command in self._cancel_on_resolve:
            return await self._nursery.start_or_watch(None, run_id, None)
        if run_id == self._claimed.run_id:
            raise ArgumentError(f"run {run_id} waits for its own end: it would wait for ever")
        if call.workflow is not None and self._is_deepest:
            raise self._too_deep()
        start = None if call.workflow is None else self._to_start(command)
        watcher = EndWatcher(self._claimed.run_id, command.id) if call.is_awaited else None
        return await self._nursery.start_or_watch(start, run_id, watcher)

    # What is recorded

    def record(self, command: Command, found: RunRecord | EddaError) -> None:
        """What came of the search."""
        if isinstance(found, EddaError):
            self._fail(command, found)
        elif command.kind is EntryKind.CHILD and found.status in ENDED and found.value is not None:
            ended = RunEnded(found.run_id, found.status, found.value)
            self._deliver_for(command, command.kind, ended.outcome(self._nursery.codec), ok=ended.is_ok)
        else:
            self._record_start(command, is_ours=found.parent == self._claimed.run_id)

    def _record_start(self, command: Command, *, is_ours: bool) -> None:
        """A run that somebody else started is not ours to cancel."""
        call: ChildCall = command.call
        assert command.target is not None
        started = ChildStarted(
            command.target, cancel_with_parent=call.cancel_with_parent and is_ours, is_awaited=call.is_awaited
        )
        self._started.append(started)
        self._deliver_for(command, EntryKind.START, self._nursery.codec.encode(started))

    def _fail(self, command: Command, error: Exception) -> None:
        self._deliver_for(command, command.kind, encode_failure(self._nursery.codec, error), ok=False)

    def _deliver_for(self, command: Command, kind: EntryKind, value: bytes, *, ok: bool = True) -> None:
        self._deliver(kind, command.id, command.name, ok=ok, input=command.input, value=value)

    # Cancelling

    def abandon(self, command: Command, execution: Execution, *, is_new: bool) -> None:
        """Nobody waits for it any more; what was recorded before was sent before."""
        if command.last_heartbeat is None:
            self._cancel_when_known(command, execution.length)
            return
        started = self._nursery.codec.decode(command.last_heartbeat, ChildStarted)
        if started.cancel_with_parent:
            execution.cancelled_children.add(started.run_id)
            if is_new:
                self._cancel(started.run_id, execution.length)

    def _cancel_when_known(self, command: Command, needs: int) -> None:
        """It may be there, for it is just being started, or was before a crash."""
        call: ChildCall = command.call
        if call.has_custom_id and call.workflow is not None and call.cancel_with_parent:
            if command in self._searches:
                self._cancel_on_resolve[command] = needs
            elif command.is_replay:
                self._cancel_on_resolve[command] = needs
                self._start_resolving(command)

    def cancel_dependents(self, needs: int) -> None:
        """Those that nobody waits for, but that are to end with their parent."""
        recorded = (e.value for e in self._claimed.entries if e.kind is EntryKind.START and e.ok)
        for started in (*(self._nursery.codec.decode(value, ChildStarted) for value in recorded), *self._started):
            if started.cancel_with_parent and not started.is_awaited:
                self._cancel(started.run_id, needs)

    def _cancel(self, run_id: str, needs: int) -> None:
        letter = RunSignal(RunId(run_id), EntryKind.CANCEL, value=self._nursery.codec.encode(CANCELLED))
        self._draft.add_signal(letter, needs)

    def cancel(self) -> None:
        for task in self._searches.values():
            task.cancel()

    def close(self) -> None:
        """Forget who wanted to know: the two would keep each other in memory."""
        self._on_resolved = self._failed = _nobody
        del self._deliver


def _nobody(*_: object) -> None:
    pass
