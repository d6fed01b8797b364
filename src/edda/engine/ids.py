"""Ids that sort by time: a database's index grows at its end and not everywhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from uuid import UUID

from edda.core.model import RunId, WorkerId


class Ids:
    """UUIDs of version 7. The clock and the randomness can be given by tests."""

    def __init__(self, now: Callable[[], int] = time.time_ns, randomness: Callable[[int], bytes] = os.urandom) -> None:
        self._now = now
        self._randomness = randomness

    def run(self) -> RunId:
        return RunId(str(self._uuid7()))

    def worker(self) -> WorkerId:
        return WorkerId(f"w{self._uuid7().hex}")

    def event(self) -> str:
        return str(self._uuid7())

    def _uuid7(self) -> UUID:
        milliseconds = self._now() // 1_000_000
        random = int.from_bytes(self._randomness(10), "big")
        value = (milliseconds & (1 << 48) - 1) << 80 | random
        value = value & ~(0xF << 76) | 7 << 76  # version
        value = value & ~(0x3 << 62) | 2 << 62  # variant
        return UUID(int=value)
