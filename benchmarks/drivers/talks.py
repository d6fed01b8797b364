"""Workflows that talk: over channels, and out of the outbox. The same for every system."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from benchmarks.figures import Emitted, Flow, Waiting

from .driver import Mode, Probe, Talker, until_still, until_told
from .pipe import Operation
from .waits import SETTLING, each_of


class Talks:
    def __init__(self, talker: Talker, probe: Probe, is_quiet: Callable[[], Awaitable[bool]]) -> None:
        self.talker = talker
        self.probe = probe
        self.is_quiet = is_quiet

    @property
    def operations(self) -> dict[str, Operation]:
        return {"listen": self.listen, "talk": self.talk, "emit": self.emit}

    async def listen(self, channel: str, mode: Mode, count: int) -> Waiting:
        """One after the other: the reference breaks when a workflow it has not seen is started twice at once."""
        began = time.monotonic()
        for number in range(count):
            await self.talker.listen(number, channel, mode)
        await until_told(self.is_quiet, SETTLING)
        return Waiting(count, time.monotonic() - began)

    async def talk(self, channel: str, first: int, count: int, copies: int, in_flight: int, stall: float) -> Flow:
        """Messages from outside of any workflow, until each is recorded by as many as are to get it."""
        numbers, known = range(first, first + count), len(self.probe.heard)
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(
            each_of(numbers, lambda number: self.talker.publish(channel, number), in_flight),
            until_still(lambda: len(self.probe.heard) - known, count * copies, stall),
        )
        heard = {pair: at for pair, at in self.probe.heard.items() if pair[1] in numbers}
        if len(heard) == count * copies:
            # Heard is not recorded yet: who waits again has written down what it heard.
            await until_told(self.is_quiet, stall)
            ended = time.monotonic()
        else:
            ended = max(heard.values(), default=began)
        cpu = time.process_time() - cpu
        different = len(heard) if copies > 1 else len({number for _, number in heard})
        return Flow(count * copies, different, ended - began, cpu, len(heard) - different, copies)

    async def emit(self, count: int, events: int, in_flight: int) -> Emitted:
        began = time.monotonic()
        await each_of(range(count), lambda _: self.talker.emit(events), in_flight)
        return Emitted(began, time.monotonic() - began)
