"""Telling the hooks about one run: what is committed, in the order it was committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from edda.cloudevents import json_format
from edda.core.model import Entry, EntryKind

from .hooks import EventReceived, AttemptStarted
from .steps import Outcome, Retry, Success

if TYPE_CHECKING:
    from edda.cloudevents.event import CloudEvent
    from edda.workflow.execution import Command

    from .hooks import Call, OnAttemptDone, HookCaller

AT_END = 1 << 62
"""Behind every entry: told when the run's end is committed."""


class RunHooks:
    def __init__(
        self, caller: HookCaller, run_id: str, workflow_name: str, read_event: Callable[[bytes], CloudEvent]
    ) -> None:
        self._caller = caller
        self._read_event = read_event
        self._run = (run_id, workflow_name)
        self._run_id = run_id
        self._waiting: deque[tuple[int, Call]] = deque()
        """With the number of the entry that has to be committed first."""
        self._watched: dict[tuple[str, int], OnAttemptDone] = {}

    def flushed(self, length: int) -> None:
        while self._waiting and self._waiting[0][0] <= length:
            self._caller.call(self._waiting.popleft()[1])

    def tell_started(self, data: Any) -> None:
        self._caller.call(lambda hooks: hooks.on_workflow_start(*self._run, data))

    def tell_completed(self, result: Any) -> None:
        self._later(AT_END, lambda hooks: hooks.on_workflow_complete(*self._run, result))

    def tell_failed(self, error: BaseException) -> None:
        self._later(AT_END, lambda hooks: hooks.on_workflow_failed(*self._run, error))

    def tell_cancelled(self) -> None:
        self._later(AT_END, lambda hooks: hooks.on_workflow_cancelled(*self._run))

    def tell_begun(self, command: Command) -> None:
        step = (self._run_id, command.id, command.name)
        self._caller.call(lambda hooks: hooks.on_activity_start(*step, False))
        ended = self._caller.watch(AttemptStarted(*self._run, command.id, command.name, command.attempt))
        if ended is not None:
            self._watched[command.id, command.attempt] = ended

    def tell_replayed(self, command: Command, entry: Entry) -> None:
        """Hooks hear of replayed steps too, marked as such."""
        if entry.kind is EntryKind.STEP and entry.ok:
            step, result = (self._run_id, command.id, command.name), command.decode(entry)
            self._caller.call(lambda hooks: hooks.on_activity_start(*step, True))
            self._caller.call(lambda hooks: hooks.on_activity_complete(*step, result, True))

    def tell_settled(self, seq: int, command: Command, outcome: Outcome) -> None:
        step, attempt = (self._run_id, command.id, command.name), command.attempt
        ended = self._watched.pop((command.id, attempt), None)

        def call(hooks: Any) -> Awaitable[None]:
            told: Awaitable[None]
            if ended is not None:
                ended(None if isinstance(outcome, Success) else outcome.error)
            if isinstance(outcome, Success):
                told = hooks.on_activity_complete(*step, outcome.result, False)
            elif isinstance(outcome, Retry):
                told = hooks.on_activity_retry(*step, outcome.error, attempt, outcome.delay)
            else:
                told = hooks.on_activity_failed(*step, outcome.error)
            return told

        self._later(seq, call)

    def tell_received(self, seq: int, command: Command, body: bytes) -> None:
        def call(hooks: Any) -> Awaitable[None]:
            data = json_format.value_of(self._read_event(body))
            told: Awaitable[None] = hooks.on_event_received(self._run_id, command.name, data)
            return told

        def watch(hooks: Any) -> Awaitable[None]:
            event = self._read_event(body)
            told: Awaitable[None] = hooks.watch_arrival(EventReceived(*self._run, event.type, event.extensions))
            return told

        self._later(seq, call)
        if self._caller.watches_arrivals:
            self._later(seq, watch)

    def _later(self, seq: int, call: Call) -> None:
        self._waiting.append((seq, call))
