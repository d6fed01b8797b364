"""The hook calls of one run: made after the commit, in the order of the history."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from edda.cloudevents import json_format
from edda.core.model import Entry, EntryKind
from edda.engine.hooks import AttemptStarted, EventReceived

from .outcomes import Outcome, Retry, Success

if TYPE_CHECKING:
    from edda.cloudevents.event import CloudEvent
    from edda.engine.hooks import Call, HookCaller, OnAttemptDone
    from edda.workflow.execution import Command

AFTER_LAST_ENTRY = 1 << 62
"""After every entry: called when the run's end is committed."""


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
        self._attempt_callbacks: dict[tuple[str, int], OnAttemptDone] = {}

    def on_committed(self, length: int) -> None:
        while self._waiting and self._waiting[0][0] <= length:
            self._caller.call(self._waiting.popleft()[1])

    def run_started(self, data: Any) -> None:
        self._caller.call(lambda hooks: hooks.on_workflow_start(*self._run, data))

    def run_completed(self, result: Any) -> None:
        self._after_commit(AFTER_LAST_ENTRY, lambda hooks: hooks.on_workflow_complete(*self._run, result))

    def run_failed(self, error: BaseException) -> None:
        self._after_commit(AFTER_LAST_ENTRY, lambda hooks: hooks.on_workflow_failed(*self._run, error))

    def run_cancelled(self) -> None:
        self._after_commit(AFTER_LAST_ENTRY, lambda hooks: hooks.on_workflow_cancelled(*self._run))

    def attempt_started(self, command: Command) -> None:
        step = (self._run_id, command.id, command.name)
        self._caller.call(lambda hooks: hooks.on_activity_start(*step, False))
        ended = self._caller.watch(AttemptStarted(*self._run, command.id, command.name, command.attempt))
        if ended is not None:
            self._attempt_callbacks[command.id, command.attempt] = ended

    def step_replayed(self, command: Command, entry: Entry) -> None:
        """Hooks are called for replayed steps too, with `is_replaying` and `cache_hit`."""
        if entry.kind is EntryKind.STEP and entry.ok:
            step, result = (self._run_id, command.id, command.name), command.decode(entry)
            self._caller.call(lambda hooks: hooks.on_activity_start(*step, True))
            self._caller.call(lambda hooks: hooks.on_activity_complete(*step, result, True))

    def step_finished(self, seq: int, command: Command, outcome: Outcome) -> None:
        step, attempt = (self._run_id, command.id, command.name), command.attempt
        ended = self._attempt_callbacks.pop((command.id, attempt), None)

        def call(hooks: Any) -> Awaitable[None]:
            called: Awaitable[None]
            if ended is not None:
                ended(None if isinstance(outcome, Success) else outcome.error)
            if isinstance(outcome, Success):
                called = hooks.on_activity_complete(*step, outcome.result, False)
            elif isinstance(outcome, Retry):
                called = hooks.on_activity_retry(*step, outcome.error, attempt, outcome.delay)
            else:
                called = hooks.on_activity_failed(*step, outcome.error)
            return called

        self._after_commit(seq, call)

    def event_received(self, seq: int, command: Command, body: bytes) -> None:
        def call(hooks: Any) -> Awaitable[None]:
            data = json_format.value_of(self._read_event(body))
            called: Awaitable[None] = hooks.on_event_received(self._run_id, command.name, data)
            return called

        def watch(hooks: Any) -> Awaitable[None]:
            event = self._read_event(body)
            called: Awaitable[None] = hooks.watch_arrival(EventReceived(*self._run, event.type, event.extensions))
            return called

        self._after_commit(seq, call)
        if self._caller.watches_arrivals:
            self._after_commit(seq, watch)

    def _after_commit(self, seq: int, call: Call) -> None:
        self._waiting.append((seq, call))
