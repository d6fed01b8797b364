"""The hammer on runs that trade: what their steps wrote, said and sent is what their histories say, once each."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from edda.core.channels import Message, event_type, unpack_message
from edda.core.codec import Codec
from edda.core.model import EntryKind
from edda.core.states import RunStatus

from .competing_consumers import count_untaken
from .effect_log import Testimony, read_ledgers
from .end_invariants import UNDO
from .external_services import guest_place, read_arrivals
from .final_state import FinalState, Record, read_remains
from .hammer import COUNT_OPEN, Hammer, Report
from .invariants import history_violations, lost_starts
from .ledger_table import Row, open_till, read_till
from .sql_client import Line, text
from .transactional_workload import DOING, END, NEWS, UNDOABLE, Deed, Way, listener
from .worker_fleet import complaints

LISTENERS = 4
"""From the beginning; others come later."""
COUNT_TRADING = f"{COUNT_OPEN} WHERE workflow <> '{listener.name}'"
COUNT_UNSENT = "SELECT count(*) FROM edda_outbox WHERE state <> 'sent'"
LEFTOVERS = ("edda_staged_event", "edda_step_commit", "edda_wait")
OUTBOX = "SELECT id, order_key FROM edda_outbox ORDER BY seq"
MESSAGES = f"SELECT seq, body FROM edda_event WHERE type = '{event_type(NEWS)}' ORDER BY seq"
W = TypeVar("W", str, tuple[str, str])

_UNDONE = frozenset({RunStatus.FAILED, RunStatus.CANCELLED})


class Books(Struct, frozen=True):
    """All that is left of what was done."""

    rows: Sequence[Row]
    messages: dict[int, Message]
    """What was said, by its number in the log; not what was offered again."""
    untaken: int
    """Messages that a step could still take."""
    sent: Sequence[tuple[str, str]]
    """Ids and keys of the events in the outbox, in their order."""
    arrivals: Sequence[str]
    """Ids of the events that the receiver got, in the order of their coming."""


async def read_books(kind: str, line: Line, folder: Path) -> Books:
    codec = Codec()
    logged = {seq: unpack_message(codec, bytes(body)) for seq, body in await line.rows(MESSAGES)}
    return Books(
        await read_till(line),
        {seq: message for seq, message in logged.items() if not message.offer},
        (await line.rows(count_untaken(kind, NEWS)))[0][0],
        [(text(id), text(key)) for id, key in await line.rows(OUTBOX)],
        read_arrivals(folder),
    )


class LedgerHammer(Hammer):
    async def _prepare(self) -> None:
        await super()._prepare()
        await open_till(self._place)

    async def _make_noise(self, progress: Callable[[str], None]) -> None:
        for _ in range(LISTENERS):
            await self._noise.client.start(listener)
        await super()._make_noise(progress)

    async def _let_finish(self) -> float:
        """Listeners go on until nobody says anything any more."""
        self._fleet.calm_down()
        await self._place.speed_up()
        began = time.monotonic()
        await self._until_none(COUNT_TRADING)
        for table in LEFTOVERS[:2]:
            await self._until_none(f"SELECT count(*) FROM {table}")
        await self._noise.client.publish(NEWS, END)
        await self._until_none(COUNT_OPEN)
        await self._until_none(COUNT_UNSENT)
        return time.monotonic() - began

    async def _until_none(self, count: str) -> None:
        await self._line.until(count, lambda left: left == 0, self._task.patience)

    async def _judge(self, seconds: float, rest: float) -> Report:
        await self._glance.look(self._line, time.time_ns() // 1000)
        await self._glance.look_back(self._line)
        remains, told = await read_remains(self._line), read_ledgers(self._folder)
        books = await read_books(self._place.kind, self._line, self._folder)
        found = [*self._found, *self._glance.violations, *complaints(self._folder), *await self._left_over()]
        found += [*lost_starts(remains, told), *history_violations(remains), *book_violations(books, remains, told)]
        counts = await self._noise_counts(remains, told) | self._book_counts(books, remains, told)
        counts |= {"seconds": round(seconds), "rest": round(rest, 1)}
        return Report(self._task, counts, (*found, *self._deadlock_violations(counts)))

    async def _left_over(self) -> list[str]:
        counts = {table: f"SELECT count(*) FROM {table}" for table in LEFTOVERS}
        counts["the outbox"] = COUNT_UNSENT
        found = {table: (await self._line.rows(count))[0][0] for table, count in counts.items()}
        return [f"{left} rows are left in {table}" for table, left in found.items() if left]

    def _book_counts(self, books: Books, remains: FinalState, told: Testimony) -> dict[str, object]:
        kinds = Counter(record.kind for record in remains.records)
        ends = Counter(result.status for result in remains.results.values())
        return {
            "rows": len(books.rows),
            "messages": len(books.messages),
            "heard": kinds[EntryKind.MESSAGE],
            "taken": len(books.messages) - books.untaken,
            "sent": len(books.sent),
            "repeated": len(books.arrivals) - len(set(books.arrivals)),
            "hosted": len(told.hosted),
            "shunned": len(told.shunned),
            "retries": kinds[EntryKind.RETRY],
            "late": kinds[EntryKind.LATE],
            "undone": sum(record.step.startswith(UNDO) for record in remains.records),
            **{status.value: ends[status] for status in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)},
        }


# What must hold


def book_violations(books: Books, remains: FinalState, told: Testimony) -> Iterator[str]:
    deeds = list(_deeds(remains))
    yield from _unended(remains)
    yield from _wrong_rows(books, deeds)
    yield from _wrong_messages(books, deeds)
    yield from _wrong_takings(books, deeds)
    yield from _wrong_events(books, deeds)
    yield from _wrong_undos(remains, deeds)
    yield from _wrong_recorders(remains, deeds)
    yield from _wrong_guests(books, remains, told)
    for run_id, births in remains.births.items():
        if births[0].workflow == listener.name:
            yield from _wrong_hearing(books, run_id, remains)


def _unended(remains: FinalState) -> Iterator[str]:
    """With what it did last, for the database is gone when somebody reads this."""
    for run_id, status, owner in remains.open:
        last = [(row.kind, row.step, row.attempt, row.epoch) for row in remains.history.get(run_id, ())[-5:]]
        yield f"run {run_id} did not end: {status}, owned by {owner}, after {last}"


def _deeds(remains: FinalState) -> Iterator[tuple[Record, Deed]]:
    """What the histories say was done, also by steps that nobody waited for any more."""
    codec = Codec()
    for record in remains.records:
        if record.is_outcome and record.ok and record.name in DOING:
            yield record, codec.decode(record.value)


def _place(record: Record) -> str:
    return f"{record.run_id}/{record.generation}/{record.step}"


def _wrong_rows(books: Books, deeds: Sequence[tuple[Record, Deed]]) -> Iterator[str]:
    expected = Counter((_place(record), deed["token"]) for record, deed in deeds if deed["way"] != Way.NONE)
    found = Counter((row.place, row.item) for row in books.rows if row.item)
    yield from _differences("in the till", found, expected)


def _wrong_messages(books: Books, deeds: Sequence[tuple[Record, Deed]]) -> Iterator[str]:
    expected = Counter(_place(record) for record, deed in deeds if deed["says"])
    expected.update(row.place for row in books.rows if not row.item)
    found = Counter(message.data for message in books.messages.values() if message.data != END)
    yield from _differences("on the channel", found, expected)


def _wrong_takings(books: Books, deeds: Sequence[tuple[Record, Deed]]) -> Iterator[str]:
    """Nobody takes what another has, and what an attempt took in vain is there again."""
    taken = Counter(deed["took"] for _, deed in deeds if deed["took"])
    for id, times in taken.items():
        if times > 1:
            yield f"message {id} was taken {times} times"
    if len(books.messages) != books.untaken + len(taken):
        yield f"of {len(books.messages)} messages {len(taken)} were taken, and {books.untaken} are left"


def _differences(where: str, found: Counter[W], expected: Counter[W]) -> Iterator[str]:
    for what in found.keys() | expected.keys():
        if found[what] != expected[what]:
            yield f"{what} is {where} {found[what]} times, but the history has it {expected[what]} times"


def _wrong_events(books: Books, deeds: Sequence[tuple[Record, Deed]]) -> Iterator[str]:
    expected = Counter(record.run_id for record, deed in deeds if deed["sends"])
    yield from _differences("in the outbox", Counter(key for _, key in books.sent), expected)
    for id, times in Counter(id for id, _ in books.sent).items():
        if times > 1:
            yield f"event {id} is in the outbox {times} times"
    first = list(dict.fromkeys(books.arrivals))
    keys = dict(books.sent)
    for id in {*first} - keys.keys():
        yield f"event {id} arrived, but was never sent"
    yield from _wrong_arrivals(_by_key(keys, [id for id, _ in books.sent]), _by_key(keys, first))


def _by_key(keys: dict[str, str], ids: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for id in ids:
        found[keys.get(id, "")].append(id)
    return found


def _wrong_arrivals(sent: dict[str, list[str]], arrived: dict[str, list[str]]) -> Iterator[str]:
    for key, ids in sent.items():
        if arrived.get(key, []) != ids:
            yield f"events of {key} were sent as {ids}, and arrived as {arrived.get(key, [])}"


def _wrong_undos(remains: FinalState, deeds: Sequence[tuple[Record, Deed]]) -> Iterator[str]:
    """A run that did not succeed has taken back all of it, any other nothing."""
    tokens: dict[str, list[str]] = defaultdict(list)
    undone: dict[str, list[str]] = defaultdict(list)
    for record, deed in deeds:
        if record.step.startswith(UNDO):
            undone[record.run_id].append(deed["token"].removeprefix("-"))
        elif record.name in UNDOABLE:
            tokens[record.run_id].append(deed["token"])
    for run_id, result in remains.results.items():
        expected = tokens[run_id] if result.status in _UNDONE else []
        if sorted(undone[run_id]) != sorted(expected):
            yield f"run {run_id} is {result.status}: it did {tokens[run_id]} and undid {undone[run_id]}"


def _wrong_recorders(remains: FinalState, deeds: Sequence[tuple[Record, Deed]]) -> Iterator[str]:
    """A step's record is written once, by who owns the run then. Who goes on with the run may find it later."""
    claims = {_place(record): deed["claim"] for record, deed in deeds}
    notes = [(f"{note.run_id}/{note.generation}/{note.step}", note) for note in remains.notes if note.what == "done"]
    for place, times in Counter(place for place, _ in notes).items():
        if times > 1:
            yield f"{place} was recorded {times} times"
    for place, note in notes:
        owner = f"{note.old_owner}/{note.old_epoch}"
        if claims.get(place, owner) != owner:
            yield f"{place} was recorded under the claim {claims[place]} when the run was {owner}'s"


def _wrong_guests(books: Books, remains: FinalState, told: Testimony) -> Iterator[str]:
    places = {row.place for row in books.rows if not row.item}
    runs = {guest_place(run_id) for run_id in remains.runs if run_id.startswith("guest-")}
    for place in sorted(places ^ runs):
        yield f"{place} has {'a row' if place in places else 'a run'} of the handler's transaction, and not the other"
    for run_id in told.hosted:
        if guest_place(run_id) not in places:
            yield f"run {run_id}: its handler committed, but it is not there"
    for run_id in told.shunned:
        if guest_place(run_id) in places:
            yield f"run {run_id}: its handler rolled back, but it is there"


def _wrong_hearing(books: Books, run_id: str, remains: FinalState) -> Iterator[str]:
    """It received every message between its subscription and END, in order; a cancelled one received a prefix of them.

    Messages after END are not meant for it: the transaction of a handler that waited for SQLite's write lock when the
    noise ended may commit a run and its message after END was published.
    """
    rows = remains.history.get(run_id, [])
    floors = [Codec().decode(row.value) for row in rows if row.name == "subscribe" and row.generation == 0]
    heard = [row.event for row in rows if row.kind == EntryKind.MESSAGE and row.ok]
    end = min((seq for seq, message in books.messages.items() if message.data == END), default=math.inf)
    meant = [seq for seq in books.messages if floors and floors[0] < seq <= end]
    result = remains.results.get(run_id)
    is_whole = result is not None and result.status == RunStatus.COMPLETED
    if heard != (meant if is_whole else meant[: len(heard)]):
        missed = sorted(set(meant[: len(heard)]) - set(heard))
        yield f"{run_id} subscribed at {floors}, heard {len(heard)} of {len(meant)} messages, missed {missed}"
