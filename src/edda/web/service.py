"""What the HTTP side needs of the app behind it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from edda.cloudevents.event import CloudEvent


class State(Enum):
    STOPPED = "stopped"
    """Not started yet, or shut down."""
    STARTED = "started"
    DRAINING = "draining"
    """Finishing what is under way; takes nothing new."""


class Service(Protocol):
    @property
    def state(self) -> State: ...

    async def initialize(self) -> None: ...

    async def shutdown(self) -> None: ...

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        """All of them are stored when it returns, or none is when it raises."""

    async def cancel(self, instance_id: str, reason: str = ...) -> bool:
        """False if the run has ended already."""

    async def ping(self) -> None:
        """One round trip to the database."""
