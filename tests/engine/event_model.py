"""Waiting for events as it should be, in plain Python: a log, and runs that read it.

It follows what runs got and says what is wrong with it. Only where two waits of one run could both be served does it
leave open which of them is first. That a run begins anew changes nothing of what it gets; a child is a run of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    RECUR = "recur"
    """The rest is asked for by the next generation."""
    CHILD = "child"
    """Another run asks for one, and is waited for."""


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


class OutcomeKind(StrEnum):
    EVENT = "event"
    RECUR = "recur"
    CHILD = "child"


@dataclass(frozen=True)
class Outcome:
    """How one wait ended: with an event, or without. Or when the run began anew, or heard of its child."""

    kind: OutcomeKind
    at: int
    step: str = ""
    event: str | None = None
    ok: bool = True


@dataclass(frozen=True)
class Story:
    """What is known of a run from outside."""

    created_at: int
    outcomes: tuple[Outcome, ...]


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
    is_recurring: bool = False
    unborn: Ask | None = None
    """What the child is to ask for that is started as soon as its story is known."""
    child: Run | None = None
    children: int = 0
    """How many it had so far."""
    is_cancelled: bool = False
    had: set[str] = field(default_factory=set)
    followed: int = 0

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or self.place == len(self.asks)

    def cancel(self) -> None:
        """With the child that it waits for."""
        if self.is_over:
            return
        assert self.unborn is None
        if self.child is not None:
            self.child.cancel()
        self.is_cancelled = True
        self.waits.clear()
        self.nap = self.child = None

    def follow(self, now: int) -> None:
        """What is new in its story is judged, and then whether anything is missing."""
        outcomes = self.world.stories[self.id].outcomes
        while self.followed < len(outcomes):
            outcome = outcomes[self.followed]
            self.followed += 1
            assert not self.is_cancelled, f"{self.id} was cancelled, and then: {outcome}"
            self._wake(outcome.at)
            self._judge(outcome, now)
        self._wake(now)
        self._bear()
        self._miss(now)

    def _bear(self) -> None:
        if self.unborn is not None:
            self.child, self.unborn = self.world.bear(self, self.unborn), None

    def _miss(self, now: int) -> None:
        assert not self.is_recurring, f"{self.id} has not begun anew"
        if self.child is not None:
            self.child.follow(now)
            assert not self.child.is_over, f"{self.id} was not told that {self.child.id} has ended"
        for wait in self.waits:
            assert wait.due is None or self.world.moment(wait.due) > now, f"{self.id}: {wait} has not ended"
            assert (missed := self._first_for(wait)) is None, f"{self.id}: {wait} did not get {missed}"

    def _judge(self, outcome: Outcome, now: int) -> None:
        match outcome.kind:
            case OutcomeKind.EVENT:
                self._judge_wait(outcome)
            case OutcomeKind.RECUR:
                assert self.is_recurring, f"{self.id} began anew at part {self.place}"
                self.is_recurring = False
                self.go_on(outcome.at)
            case OutcomeKind.CHILD:
                self._judge_child(outcome, now)

    def _judge_child(self, outcome: Outcome, now: int) -> None:
        self._bear()
        assert self.child is not None, f"{self.id} waits for no child: {outcome}"
        self.child.follow(now)
        assert self.child.is_over, f"{self.id} heard of the end of {self.child.id}"
        assert outcome.ok is not self.child.is_cancelled, f"{self.id} was told {outcome} of {self.child.id}"
        self.child = None
        self.go_on(outcome.at)

    def _judge_wait(self, outcome: Outcome) -> None:
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
        match ask.kind:
            case AskKind.NAP:
                self.nap = now + (ask.seconds or 1) * SECOND
            case AskKind.RECUR:
                self.is_recurring = True
            case AskKind.CHILD:
                self.unborn = ask
            case _:
                self._wait(ask, now)

    def _wait(self, ask: Ask, now: int) -> None:
        for number, match in enumerate(ask.matches[: 1 if ask.kind is AskKind.ONE else 2]):
            due = None if ask.seconds is None else now + (ask.seconds + number) * SECOND
            self.waits.append(Wait(f"{self.place:02}-{number}", ask.type, match, due))


def child_id(parent: str, number: int) -> str:
    """The model's own name for it."""
    return f"{parent}#{number}"


class World:
    def __init__(self) -> None:
        self.log: list[Event] = []
        self.runs: dict[str, Run] = {}
        self.stories: dict[str, Story] = {}
        self.absences: list[tuple[int, int]] = []
        """When nobody was there to look at the clock."""

    def moment(self, due: int) -> int:
        """When it is seen that something is due."""
        return next((back for gone, back in self.absences if gone < due <= back), due)

    def start(self, id: str, asks: tuple[Ask, ...], now: int) -> None:
        self.runs[id] = Run(id, asks, self, len(self.log))
        self.runs[id].go_on(now)

    def bear(self, parent: Run, ask: Ask) -> Run:
        """As late as everything else that is done in the same moment."""
        id = child_id(parent.id, parent.children)
        parent.children += 1
        assert id in self.stories, f"{id} was not started"
        self.start(id, (replace(ask, kind=AskKind.ONE),), self.stories[id].created_at)
        return self.runs[id]

    def send(self, event: Event) -> None:
        if all(event.id != known.id for known in self.log):
            self.log.append(event)
