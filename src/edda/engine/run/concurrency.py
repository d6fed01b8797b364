"""How many bodies of one activity run in this process at once: `@activity(max_concurrent=...)`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

OnGranted = Callable[["Slot"], bool]
"""Takes the slot and answers True, or has no use for it now."""


class Slot:
    """The right to run one body; given back once, however often it is freed."""

    __slots__ = ("_line",)

    def __init__(self, line: SlotQueue) -> None:
        self._line: SlotQueue | None = line

    def free(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.taken -= 1
            line.grant_next()


class SlotQueue:
    """Those who wait for a slot of one activity, first come first served."""

    __slots__ = ("most", "taken", "waiting")

    def __init__(self) -> None:
        self.most = 1
        self.taken = 0
        self.waiting: OrderedDict[Hashable, OnGranted] = OrderedDict()

    def grant_next(self) -> None:
        while self.waiting and self.taken < self.most:
            _, grant = self.waiting.popitem(last=False)
            self.taken += 1
            if not grant(Slot(self)):
                self.taken -= 1


class ConcurrencyLimiter:
    def __init__(self) -> None:
        self._lines: dict[str, SlotQueue] = {}

    def acquire(self, name: str, most: int, who: Hashable, grant: OnGranted) -> None:
        """At once if one is free and nobody waits, else when it is their turn."""
        line = self._lines.setdefault(name, SlotQueue())
        line.most = most
        line.waiting[who] = grant
        line.grant_next()

    def cancel(self, name: str, who: Hashable) -> None:
        self._lines[name].waiting.pop(who, None)
