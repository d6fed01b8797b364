"""Waiting for events as it should be, in plain Python: a log, and runs that read it.

It follows what runs got and says what is wrong with it. Only where two waits of one run could both be served does it
leave open which of them is first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SECOND = 1_000_000

Match = dict[str, Any]


class AskKind(StrEnum):
    ONE = "one"
    BOTH = "both"
    """Two waits at once; each has its own end."""
    ANY = "any"
    """Two waits at once; the first ends both."""
    NAP = "nap"


@dataclass(frozen=True)
class Ask:
    kind: AskKind
    type: str
    matches: tuple[Match, Match]
    seconds: int | None
    """Of a nap, or until the first wait gives up; the second one waits a second longer."""


@dataclass(frozen=True)
class Event:
    id: str
    type: str
    data: Match
    target: str | None


@dataclass(frozen=True)
class Outcome:
    """How one wait ended: with an event, or without."""

    step: str
    event: str | None
    at: int


@dataclass
class Wait:
    step: str
    type: str
    match: Match
    due: int | None


@dataclass
class Run:
    id: str
    asks: tuple[Ask, ...]
    world: World
    start: int
    """Events before this place in the log are none of its business."""
    place: int = -1
    waits: list[Wait] = field(default_factory=list)
    nap: int | None = None
    had: set[str] = field(default_factory=set)
    followed: int = 0

    @property
    def is_over(self) -> bool:
        return self.place == len(self.asks)

    def follow(self, outcomes: list[Outcome], now: int) -> None:
        """All outcomes so far; those that are new are judged, and then whether anything is missing."""
        for outcome in outcomes[self.followed :]:
            self._wake(outcome.at)
            self._judge(outcome)
        self.followed = len(outcomes)
        self._wake(now)
        for wait in self.waits:
            assert wait.due is None or self.world.moment(wait.due) > now, f"{self.id}: {wait} has not ended"
            assert (missed := self._first_for(wait)) is None, f"{self.id}: {wait} did not get {missed}"

    def _judge(self, outcome: Outcome) -> None:
        wait = next((wait for wait in self.waits if wait.step == outcome.step), None)
        assert wait is not None, f"{self.id} does not wait as {outcome}, but as {self.waits}"
        if outcome.event is None:
            assert wait.due is not None, f"{self.id}: {outcome} of {wait}, which has no end"
            assert outcome.at == self.world.moment(wait.due), f"{self.id}: {outcome} is not the end of {wait}"
        else:
            assert outcome.event == self._first_for(wait), f"{self.id}: {outcome}, not {self._first_for(wait)}"
            self.had.add(outcome.event)
        self.waits.remove(wait)
        if self.asks[self.place].kind is AskKind.ANY:
            self.waits.clear()
        if not self.waits:
            self.go_on(outcome.at)

    def _first_for(self, wait: Wait) -> str | None:
        return next((event.id for event in self.world.log[self.start :] if self._fits(wait, event)), None)

    def _fits(self, wait: Wait, event: Event) -> bool:
        if event.type != wait.type or event.target not in (None, self.id) or event.id in self.had:
            return False
        return all(path in event.data and event.data[path] == value for path, value in wait.match.items())

    def _wake(self, now: int) -> None:
        while self.nap is not None and (moment := self.world.moment(self.nap)) <= now:
            self.nap = None
            self.go_on(moment)

    def go_on(self, now: int) -> None:
        """To the next part."""
        self.place += 1
        if self.is_over:
            return
        ask = self.asks[self.place]
        if ask.kind is AskKind.NAP:
            self.nap = now + (ask.seconds or 1) * SECOND
            return
        for number, match in enumerate(ask.matches[: 1 if ask.kind is AskKind.ONE else 2]):
            due = None if ask.seconds is None else now + (ask.seconds + number) * SECOND
            self.waits.append(Wait(f"{self.place:02}-{number}", ask.type, match, due))


class World:
    def __init__(self) -> None:
        self.log: list[Event] = []
        self.runs: dict[str, Run] = {}
        self.absences: list[tuple[int, int]] = []
        """When nobody was there to look at the clock."""

    def moment(self, due: int) -> int:
        """When it is seen that something is due."""
        return next((back for gone, back in self.absences if gone < due <= back), due)

    def start(self, id: str, asks: tuple[Ask, ...], now: int) -> None:
        self.runs[id] = Run(id, asks, self, len(self.log))
        self.runs[id].go_on(now)

    def send(self, event: Event) -> None:
        if all(event.id != known.id for known in self.log):
            self.log.append(event)
