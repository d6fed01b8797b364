"""Steps of one run that may not begin yet: first they wait for the journal, then for a slot if they need one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from edda.workflow.execution import Command

from .slots import Slot, ConcurrencyLimiter


class StartGate(Protocol):
    """What the worker lets through."""

    slots: ConcurrencyLimiter
    draining: bool

    @property
    def may_act(self) -> bool:
        """False when the lease may have lapsed: start nothing in the world."""
        ...


Begin = Callable[[Command, Slot | None], None]


class StepQueue:
    def __init__(self, gate: StartGate) -> None:
        self._gate = gate
        self.blocked: deque[Command] = deque()
        """In the order they were issued."""
        self.waiting: set[Command] = set()
        """For a slot."""

    def add(self, command: Command) -> None:
        self.blocked.append(command)

    def start(self, committed: int, pending: Mapping[str, Command], begin: Begin) -> None:
        """Those whose history is durable."""
        blocked = self.blocked
        while blocked and blocked[0].needs <= committed and self._gate.may_act:
            command = blocked.popleft()
            if pending.get(command.id) is not command:
                continue
            most = command.call.limits.max_concurrent
            if most is None:
                begin(command, None)
            else:
                self.waiting.add(command)
                self._gate.slots.ask(command.name, most, command, partial(self._take, command, begin))

    def _take(self, command: Command, begin: Begin, slot: Slot) -> bool:
        self.waiting.discard(command)
        if self._gate.draining or not self._gate.may_act:
            self.blocked.appendleft(command)
            return False
        begin(command, slot)
        return True

    @property
    def held(self) -> list[Command]:
        """Those that have not begun."""
        return [*self.blocked, *self.waiting]

    def leave(self, command: Command) -> None:
        """It is not to begin any more; those that wait for the journal are looked at when it is their turn."""
        if command in self.waiting:
            self.waiting.discard(command)
            self._gate.slots.leave(command.name, command)

    def close(self) -> None:
        for command in tuple(self.waiting):
            self.leave(command)
