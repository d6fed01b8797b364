"""When the commands of a run are due: the earliest first, and of two at once the one that was issued first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count

from edda.workflow.execution import Command


class TimerQueue:
    def __init__(self) -> None:
        self.dues: list[tuple[int, int, Command]] = []
        """A heap: it also holds commands that are not pending any more."""
        self._order = count()

    def add(self, due: int, command: Command) -> None:
        heapq.heappush(self.dues, (due, next(self._order), command))

    def next_due(self, pending: Mapping[str, Command]) -> int | None:
        """Commands that are not pending any more are forgotten on the way."""
        while self.dues and pending.get(self.dues[0][2].id) is not self.dues[0][2]:
            heapq.heappop(self.dues)
        return self.dues[0][0] if self.dues else None

    def pop(self) -> Command:
        return heapq.heappop(self.dues)[2]
