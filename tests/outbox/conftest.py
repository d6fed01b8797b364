from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from edda.engine.clock import DatabaseClock
from edda.engine.outbox.relayer import Relayer, RelaySettings
from edda.engine.outbox.sinks import Sink
from edda.storage.ports import Storage

QUICK = RelaySettings(poll=0.1, first_pause=0.05, longest_pause=0.2)
"""What failed is tried again soon."""


class MakeRelayer(Protocol):
    async def __call__(
        self, sink: Sink, settings: RelaySettings = QUICK, *, on: Storage | None = None, **options: Any
    ) -> Relayer: ...


@pytest.fixture
async def make_relayer(storage: Storage) -> AsyncIterator[MakeRelayer]:
    """Started, on the test's storage or on another process's."""
    made: list[tuple[Relayer, Sink]] = []

    async def make(
        sink: Sink, settings: RelaySettings = QUICK, *, on: Storage | None = None, **options: Any
    ) -> Relayer:
        relayer = Relayer(on or storage, sink, clock=DatabaseClock(), settings=settings, **options)
        made.append((relayer, sink))
        relayer.start()
        return relayer

    yield make
    for relayer, sink in made:
        await relayer.stop(0.0)
        await sink.close()
