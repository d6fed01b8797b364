"""Runs that wait for events in every way there is, and end with all that their history gave them.

Some begin anew, up to three times. The last generation asks for every key once more, and waits for as long as it takes:
an event that was lost on the way, or between two generations, shows when that wait gets a later one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from random import Random
from typing import Any

from msgspec import Struct

from edda import EventTimeoutError, ReceivedEvent, WorkflowContext, sleep, wait_any, wait_event, workflow

from .workload import digest, effect, recurrences

TYPES = ("faults.a", "faults.b")
KEYS = 5
GROUPS = 2
SUBJECTS = ("s0", "s1")
BEGUN = "faults_begun"
"""Events of this type start a run."""
LETTER = "faults.letter"

Match = dict[str, Any]


class WatchKind(StrEnum):
    ONE = "one"
    BRIEF = "brief"
    """May end without an event."""
    PAIR = "pair"
    """Two waits for one key at once, beside an activity."""
    OVERLAP = "overlap"
    """Two waits for keys that some events have both of, beside an activity."""
    RACE = "race"
    """A wait against a timer."""
    CONTEST = "contest"
    """A wait against another."""
    DUEL = "duel"
    """Two waits for one key at once, and the first may end without an event."""
    NAP = "nap"


class Watch(Struct, frozen=True):
    kind: WatchKind
    match: Match
    other: Match
    seconds: float


def watches(run_id: str, generation: int) -> tuple[Watch, ...]:
    """The same for a generation whoever asks, also at its replay."""
    if generation < recurrences(run_id):
        return tuple(_chances(run_id, generation))
    asked = {str(match): match for watch in _all_chances(run_id) for match in _matches(watch)}
    return (*_chances(run_id, generation), *(Watch(WatchKind.ONE, match, match, 0.0) for match in asked.values()))


def _chances(run_id: str, generation: int) -> list[Watch]:
    """All generations of a run ask for the same keys. Most begin anew while an event may still come for the last."""
    keys, rng = Random(run_id), Random(f"{run_id}/{generation}")
    matches = [_match(keys), _match(keys)]
    kinds = rng.choices(tuple(WatchKind), weights=(20, 20, 12, 12, 12, 12, 12, 10), k=rng.randint(1, 4))
    if generation < recurrences(run_id):
        kinds.append(rng.choice((WatchKind.RACE, WatchKind.BRIEF, WatchKind.CONTEST)))
    return [Watch(kind, rng.choice(matches), rng.choice(matches), rng.uniform(0.03, 0.5)) for kind in kinds]


def _all_chances(run_id: str) -> Iterator[Watch]:
    for generation in range(recurrences(run_id) + 1):
        yield from _chances(run_id, generation)


def is_orderly(run_id: str) -> bool:
    """What a wait of two at once gives back may come after what the other one got."""
    return all(watch.kind is not WatchKind.DUEL for watch in _all_chances(run_id))


def _match(rng: Random) -> Match:
    key, group = rng.randrange(KEYS), rng.randrange(GROUPS)
    shapes: list[Match] = [{"k": key}, {"k": key, "g": group}, {"g": group}, {"@subject": rng.choice(SUBJECTS)}, {}]
    return rng.choices(shapes, weights=(60, 15, 10, 10, 5))[0]


def _matches(watch: Watch) -> tuple[Match, ...]:
    match watch.kind:
        case WatchKind.NAP:
            return ()
        case WatchKind.OVERLAP | WatchKind.CONTEST:
            return watch.match, watch.other
        case _:
            return (watch.match,)


def token_of(source: str, id: str) -> str:
    return f"{source}#{id}"


@workflow(name="faults_vigil")
async def vigil(ctx: WorkflowContext, event_type: str, generation: int = 0, past: str = "") -> str:
    """`past` is what the generations before were given."""
    watchman = Watchman(ctx, event_type, past)
    for watch in watches(ctx.instance_id, generation):
        not_before = await watchman.keep(watch)
        if not_before is not None:
            watchman.note(await effect(ctx, watchman.link, 0.0, not_before))
    if generation < recurrences(ctx.instance_id):
        await ctx.recur(event_type, generation + 1, watchman.link)
    watchman.note(await effect(ctx, watchman.link, 0.0))
    return watchman.link


class Watchman:
    """Keeps one watch after the other, and notes what it is told."""

    def __init__(self, ctx: WorkflowContext, event_type: str, past: str) -> None:
        self._ctx = ctx
        self._type = event_type
        self._tokens = [past]

    @property
    def link(self) -> str:
        return digest(self._tokens)

    def note(self, token: str) -> None:
        self._tokens.append(token)

    async def keep(self, watch: Watch) -> datetime | None:
        """The time that must have passed, if it is time that ended it."""
        match watch.kind:
            case WatchKind.NAP:
                return await self._sleep(watch)
            case WatchKind.ONE:
                return await self._hear(watch.match)
            case WatchKind.BRIEF:
                return await self._hear(watch.match, watch.seconds)
            case WatchKind.RACE:
                return (await wait_any(self._ctx, self._hear(watch.match), self._sleep(watch))).value
            case _:
                await self._keep_two(watch)
                return None

    async def _keep_two(self, watch: Watch) -> None:
        match watch.kind:
            case WatchKind.PAIR:
                await asyncio.gather(self._hear(watch.match), self._hear(watch.match), self._work())
            case WatchKind.OVERLAP:
                await asyncio.gather(self._hear(watch.match), self._hear(watch.other), self._work())
            case WatchKind.CONTEST:
                await wait_any(self._ctx, self._hear(watch.match), self._hear(watch.other))
            case WatchKind.DUEL:
                await asyncio.gather(self._hear(watch.match, watch.seconds), self._hear(watch.match))

    async def _sleep(self, watch: Watch) -> datetime:
        due = self._ctx.now() + timedelta(seconds=watch.seconds)
        await sleep(self._ctx, watch.seconds)
        return due

    async def _work(self) -> None:
        self.note(await effect(self._ctx, self.link, 0.02))

    async def _hear(self, match: Match, timeout: float | None = None) -> datetime | None:
        due = self._ctx.now() + timedelta(seconds=timeout or 0.0)
        try:
            event = await wait_event(self._ctx, self._type, timeout, match=match)
        except EventTimeoutError:
            return due
        self.note(token_of(event.source, event.id))
        return None


@workflow(name=BEGUN, event_handler=True)
async def begun(ctx: WorkflowContext, event: ReceivedEvent[Any]) -> str:
    """Its effect tells what it was started with."""
    return digest([await effect(ctx, str(event.data), 0.0)])


@workflow(name="faults_letter")
async def await_letter(ctx: WorkflowContext, number: int) -> str:
    """Its result is the letter, as history has it too."""
    letter = await wait_event(ctx, LETTER, match={"number": number})
    return digest([token_of(letter.source, letter.id)])


VIGILS = (vigil, begun, await_letter)
