"""Steps of one run that may not begin yet: first they wait for the journal, then for a slot if they need one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from edda.workflow.execution import Command

from .slots import ConcurrencyLimiter, Slot


class StartGate(Protocol):
    """What the worker lets through."""

    slots: ConcurrencyLimiter
    draining: bool

    @property
    def may_start_steps(self) -> bool:
        """False when the lease may have lapsed: start nothing in the world."""
        ...


Begin = Callable[[Command, Slot | None], None]


class StepQueue:
    def __init__(self, gate: StartGate) -> None:
        self._gate = gate
        self.waiting_for_journal: deque[Command] = deque()
        """In the order they were issued."""
        self.waiting_for_slot: set[Command] = set()
        """For a slot."""

    def add(self, command: Command) -> None:
        self.waiting_for_journal.append(command)

    def start_ready(self, committed: int, pending: Mapping[str, Command], begin: Begin) -> None:
        """Those whose history is durable."""
        waiting_for_journal = self.waiting_for_journal
        while waiting_for_journal and waiting_for_journal[0].after_entry <= committed and self._gate.may_start_steps:
            command = waiting_for_journal.popleft()
            if pending.get(command.id) is not command:
                continue
            most = command.call.limits.max_concurrent
            if most is None:
                begin(command, None)
            else:
                self.waiting_for_slot.add(command)
                self._gate.slots.acquire(command.name, most, command, partial(self._on_slot, command, begin))

    def _on_slot(self, command: Command, begin: Begin, slot: Slot) -> bool:
        self.waiting_for_slot.discard(command)
        if self._gate.draining or not self._gate.may_start_steps:
            self.waiting_for_journal.appendleft(command)
            return False
        begin(command, slot)
        return True

    @property
    def held(self) -> list[Command]:
        """Those that have not begun."""
        return [*self.waiting_for_journal, *self.waiting_for_slot]

    def remove(self, command: Command) -> None:
        """It is not to begin any more; those that wait for the journal are looked at when it is their turn."""
        if command in self.waiting_for_slot:
            self.waiting_for_slot.discard(command)
            self._gate.slots.cancel(command.name, command)

    def close(self) -> None:
        for command in tuple(self.waiting_for_slot):
            self.remove(command)
