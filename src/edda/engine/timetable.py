"""When the commands of a run are due: the earliest first, and of two at once the one that was issued first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count

from edda.workflow.execution import Command


class Timetable:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Command]] = []
        self._order = count()

    def add(self, due: int, command: Command) -> None:
        heapq.heappush(self._heap, (due, next(self._order), command))

    def next_due(self, pending: Mapping[str, Command]) -> int | None:
        """Commands that are not pending any more are forgotten on the way."""
        while self._heap and pending.get(self._heap[0][2].id) is not self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Command:
        return heapq.heappop(self._heap)[2]
