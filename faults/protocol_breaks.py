"""The protocol broken on purpose, in one way at a time. The checker must notice, and see in it what was broken."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from unittest.mock import patch

from msgspec import Struct
from msgspec.structs import replace

from edda.core.model import (
    AcceptResult,
    BatchResult,
    End,
    Fence,
    NewEvent,
    Recur,
    RunId,
    RunWrite,
    Transition,
    WorkerId,
    WorkerInfo,
)
from edda.engine.client import Ids
from edda.storage.ports import HeartbeatConnection, SharedTransaction, Storage
from edda.storage.shared import step_commit
from edda.storage.shared.step_commit import StepCommitWrite
from edda.storage.sqlite.transactions import SQLiteTransaction
from edda.workflow.compensation import Compensator

_ANEW = ("COMMIT", "BEGIN IMMEDIATE")
_LEASE = 1_000_000
"""Of the fence made for one batch: what that batch left owned is soon somebody else's."""


def break_fence(storage: Storage) -> None:
    """What the fence refuses is written all the same, and nobody hears that he was taken over."""
    write, pulse = storage.write, storage.open_heartbeat

    async def write_anyway(fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        answer = await write(fence, batch, token)
        if answer is not None:
            return answer
        ghost = Ids().worker()
        await storage.register(WorkerInfo(ghost, "ghost", "nowhere", 0), _LEASE)
        return await write(Fence(ghost, 0, 0), batch)

    async def deaf_pulse() -> HeartbeatConnection:
        return DeafPulse(storage, await pulse())

    patch.object(storage, "write", write_anyway).start()
    patch.object(storage, "open_heartbeat", deaf_pulse).start()


class DeafPulse:
    def __init__(self, storage: Storage, pulse: HeartbeatConnection) -> None:
        self._storage = storage
        self._pulse = pulse
        self._last = 0

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        self._last = await self._pulse.beat(worker, lease) or self._last
        return self._last

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        return await self._pulse.hand_over(worker, keep)

    async def close(self) -> None:
        await self._pulse.close()


def break_locks(storage: Storage) -> None:
    """Acceptors and registrars no longer exclude each other, so both may look before either writes."""
    match type(storage).__name__:
        case "PostgresStorage":
            from edda.storage.postgres import events, journal, locks

            patch.object(journal, "lock_wait_keys", lambda keys: locks.lock_wait_keys(())).start()
            patch.object(events, "lock_event_keys", lambda types, keys: locks.lock_event_keys(types, ())).start()
        case "MySQLStorage":
            from edda.storage.mysql import locks as mysql_locks

            patch.object(mysql_locks, "of_keys", lambda keys: set()).start()
        case _:
            _forget_keys(storage)  # one lock there is everybody's: the nearest is to do what the missing ones lead to


def _forget_keys(storage: Storage) -> None:
    """Now and then an event is stored that no wait can find."""
    accept = storage.accept

    async def accept_badly(
        post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int] = ()
    ) -> AcceptResult | None:
        forgetful = [replace(one, keys=()) if random.random() < 0.05 else one for one in post]
        return await accept(forgetful, versions, forwarded)

    patch.object(storage, "accept", accept_badly).start()


def break_promise(storage: Storage) -> None:
    """What is not stored yet is said to be."""
    accept, under_way = storage.accept, set[asyncio.Task[None]]()

    async def store(post: Sequence[NewEvent], versions: Mapping[str, int]) -> None:
        await asyncio.sleep(0.05)
        await accept(post, versions)

    async def accept_later(
        post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int] = ()
    ) -> AcceptResult:
        under_way.add(asyncio.create_task(store(post, versions)))
        return AcceptResult(frozenset(range(len(post))), woke=True)

    patch.object(storage, "accept", accept_later).start()


def break_ends(storage: Storage) -> None:
    """A run ends though it does not know all who wait for it: those are never told."""

    async def overlook(bundle: RunWrite, worker: WorkerId) -> RunWrite:
        if not isinstance(bundle.transition, End) or bundle.start is not None:
            return bundle
        return replace(
            bundle, transition=replace(bundle.transition, watchers=len(await storage.watchers(bundle.run_id)))
        )

    _write_otherwise(storage, overlook)


def break_recurs(storage: Storage) -> None:
    """A run begins anew though there is mail, and takes its time: there often is."""
    match type(storage).__name__:
        case "PostgresStorage":
            from edda.storage.postgres import batch_sql

            guard, known = "u.inbox_read <> s.inbox_count", batch_sql.SECTIONS
            blind = {name: replace(one, text=one.text.replace(guard, "false")) for name, one in known.items()}
            patch.dict(known, blind).start()
        case "MySQLStorage":
            from edda.storage.mysql import decisions
            from edda.storage.shared.batches import is_refused

            def refuse_ends(move: Transition | None, watchers: int, inbox_count: int) -> bool:
                return not isinstance(move, Recur) and is_refused(move, watchers, inbox_count)

            patch.object(decisions, "is_refused", refuse_ends).start()
        case _:
            from edda.storage.sqlite import journal

            patch.object(journal, "_OTHER_INBOX_COUNT", f"{journal._OTHER_INBOX_COUNT} AND false").start()

    async def hesitate(bundle: RunWrite, worker: WorkerId) -> RunWrite:
        if isinstance(bundle.transition, Recur):
            await asyncio.sleep(random.uniform(0, 0.3))
        return bundle

    _write_otherwise(storage, hesitate)


def break_letters(storage: Storage) -> None:
    """Now and then the end of a run is told to nobody."""

    async def lose(bundle: RunWrite, worker: WorkerId) -> RunWrite:
        return replace(bundle, signals=()) if isinstance(bundle.transition, End) and random.random() < 0.2 else bundle

    _write_otherwise(storage, lose)


def _write_otherwise(storage: Storage, change: Callable[[RunWrite, WorkerId], Awaitable[RunWrite]]) -> None:
    write = storage.write

    async def write_changed(fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        return await write(fence, [await change(bundle, fence.worker) for bundle in batch], token)

    patch.object(storage, "write", write_changed).start()


def break_undoing(storage: Storage) -> None:
    """What was given up is forgotten, and so is what it did."""
    patch.object(Compensator, "abandon", lambda compensating, command: None).start()
    patch.object(Compensator, "on_late_outcome", lambda compensating, entry: None).start()


def break_records(storage: Storage) -> None:
    """What a step wrote is committed some time before its record is."""
    record = step_commit.write_step_commit

    async def record_apart(mine: SharedTransaction, step: StepCommitWrite) -> None:
        await _commit_apart(mine)
        await asyncio.sleep(random.uniform(0, 0.3))
        await record(mine, step)

    patch.object(step_commit, "write_step_commit", record_apart).start()


async def _commit_apart(mine: SharedTransaction) -> None:
    """And begin another transaction: whoever has a joint is in one."""
    if isinstance(mine, SQLiteTransaction):
        await mine.connection.run(lambda raw: [raw.execute(one) for one in _ANEW])
    elif mine.dialect == "sqlite":
        for one in _ANEW:
            await mine.execute(one, {})
    else:
        await mine.execute("COMMIT AND CHAIN", {})


_OWNED = "AND owner = :worker AND epoch = :epoch AND generation = :generation"
_ANYBODY = step_commit._STEP_COMMIT.replace(_OWNED, "AND :worker <> '' AND :epoch >= 0 AND :generation >= 0")
assert _ANYBODY != step_commit._STEP_COMMIT


def break_owners(storage: Storage) -> None:
    """Whoever has a step's record writes it, whosever the run is by then, and often it takes its time.

    It takes its time before its transaction too: on SQLite nobody can take a run away while one is open.
    """
    begin, record = storage.begin, step_commit.write_step_commit

    async def begin_late(holder: str = "") -> SharedTransaction:
        await _dawdle()
        return await begin(holder)

    async def record_late(mine: SharedTransaction, step: StepCommitWrite) -> None:
        if mine.dialect != "sqlite":
            await _dawdle()
        await record(mine, step)

    patch.object(step_commit, "_STEP_COMMIT", _ANYBODY).start()
    patch.object(step_commit, "write_step_commit", record_late).start()
    patch.object(storage, "begin", begin_late).start()


async def _dawdle() -> None:
    await asyncio.sleep(random.choice((0.0, 0.0, 0.5)))


class Control(Struct, frozen=True):
    break_it: Callable[[Storage], None]
    symptoms: tuple[str, ...]
    """What is seen of it. Other complaints do not count: workers that are broken are given little time to finish."""

    def is_seen(self, violations: Sequence[str]) -> bool:
        return any(symptom in violation for violation in violations for symptom in self.symptoms)


_NEVER_WOKEN = ("asleep with nothing to wake it",)
_APART = ("in the till 1 times, but the history has it 0 times", "and is in the till 2 times")
CONTROLS = {
    "fence": Control(break_fence, ("rows of older epochs", "epochs go back", "ran again", "refuses its record")),
    "locks": Control(break_locks, ("but never",)),
    "promise": Control(break_promise, ("was acknowledged, but is not stored",)),
    "ends": Control(break_ends, _NEVER_WOKEN),
    "recurs": Control(break_recurs, ("letters unread",)),
    "letters": Control(break_letters, _NEVER_WOKEN),
    "undoing": Control(break_undoing, ("and undid", "nobody knows what became of it")),
    "records": Control(break_records, _APART),
    "owners": Control(break_owners, ("was recorded under the claim",)),
}
OF_EVENTS = ("fence", "locks", "promise", "ends", "recurs", "letters", "undoing")
OF_LEDGER = ("fence", "records", "owners")
"""What each hammer can see."""
