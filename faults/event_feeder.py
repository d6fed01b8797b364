"""When the noise is over: every key that somebody waits for gets an event, until nobody waits any more."""

from __future__ import annotations

from itertools import count

from edda import EddaApp
from edda.cloudevents.event import CloudEvent
from edda.core.codec import Codec
from edda.errors import EddaError

from .event_sender import fitting
from .sql_client import Line, text

WAITS = "SELECT * FROM edda_wait"
_TYPE, _MATCH = 4, 5
"""Columns; one database does not let us name the second one without quotes, and another has other quotes."""
MOST = 50


class Feeder:
    def __init__(self, app: EddaApp, line: Line) -> None:
        self._app = app
        self._line = line
        self._numbers = count(1)
        self._codec = Codec()
        self.faults: list[str] = []

    async def feed(self) -> None:
        wanted = {(text(row[_TYPE]), bytes(row[_MATCH])) for row in await self._line.rows(WAITS)}
        events = [self._event(event_type, match) for event_type, match in sorted(wanted)]
        for first in range(0, len(events), MOST):
            await self._send(events[first : first + MOST])

    def _event(self, event_type: str, match: bytes) -> CloudEvent:
        return fitting(event_type, self._codec.decode(match), "/feeder", str(next(self._numbers)))

    async def _send(self, events: list[CloudEvent]) -> None:
        try:
            await self._app.receive(events)
        except EddaError:  # what still waits is fed again
            return
        except Exception as error:  # nothing else may come out of there
            self.faults.append(f"taking in events failed with {error!r}")
