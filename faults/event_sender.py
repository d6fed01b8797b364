"""Events as a worker under fire takes them in: alone and in posts, again and again, some for one run alone."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

from edda import EddaApp
from edda.cloudevents import json_format
from edda.cloudevents.event import TARGET, CloudEvent, make
from edda.errors import StorageUnavailableError

from .effect_log import Ledger
from .wait_workload import BEGUN, GROUPS, KEYS, SUBJECTS, TYPES, Match

ATTEMPTS = 3
"""A sender that is told to come again does."""
AGAIN = 0.25
ADDRESSED = 0.15
MOST = 10
NEW_TYPE_EVERY = 2.0
"""Seconds; nobody has waited for a new type before, so every shape of it is learned while its events come in."""
SHARED_EVERY = 0.25


def new_type() -> str:
    return f"faults.new.{int(time.time() / NEW_TYPE_EVERY)}"


def fitting(event_type: str, match: Match, source: str, id: str, target: str | None = None) -> CloudEvent:
    """An event that a wait for this gets; what the match leaves open is made up."""
    data = {"k": random.randrange(KEYS), "g": random.randrange(GROUPS)}
    data |= {path: value for path, value in match.items() if not path.startswith("@")}
    subject = match.get("@subject", random.choice(SUBJECTS))
    extensions = {} if target is None else {TARGET: target}
    return make(event_type, source, id, data, subject=subject, extensions=extensions)


class Sender:
    """Of one process. Writes down what it was told is stored."""

    def __init__(self, name: str, ledger: Ledger, runs: Sequence[str]) -> None:
        self._source = f"/{name}"
        self._ledger = ledger
        self._runs = runs
        """Started lately; some events are for one of them alone."""
        self._numbers = count(1)
        self._sent: deque[CloudEvent] = deque(maxlen=50)

    async def send(self, app: EddaApp) -> None:
        post = self._compose()
        for _ in range(ATTEMPTS):
            try:
                await app.receive(post)
            except StorageUnavailableError as error:
                refused = error
            else:
                for event in post:
                    self._ledger.note("posted", event.source, event.id)
                break
        else:
            self._ledger.note("refused", len(post), repr(refused))
        self._sent += post

    def _compose(self) -> list[CloudEvent]:
        """A sent event may be among them again, and so may one of this very post."""
        post: list[CloudEvent] = []
        for _ in range(random.randint(1, MOST) if random.random() < 0.6 else 1):
            known = [*self._sent, *post]
            again = known and random.random() < AGAIN
            post.append(random.choice(known) if again else self._new())
        return post

    def _new(self) -> CloudEvent:
        if random.random() < 0.05:
            return _shared()
        event_type = random.choices((*TYPES, new_type(), BEGUN), weights=(30, 30, 30, 10))[0]
        target = random.choice(self._runs) if self._runs and random.random() < ADDRESSED else None
        return fitting(event_type, {}, self._source, str(next(self._numbers)), target)


def _shared() -> CloudEvent:
    """The same in every process for a moment: several of them bring it at once, each with a body of its own."""
    return fitting(random.choice(TYPES), {}, "/shared", str(int(time.time() / SHARED_EVERY)))


def values_of(body: bytes) -> dict[str, Any]:
    """What a match can ask of a stored event, by path."""
    event = json_format.parse_stored(body)
    data = json_format.value_of(event)
    paths: dict[str, Any] = dict(data) if isinstance(data, dict) else {}
    return paths | {"@subject": event.subject}
