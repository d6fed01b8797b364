"""Many messages, a few runs that compete for them, and workers that die all the time: each message counts once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct

from edda import EddaApp
from edda.core.channels import ChannelMode, channel_key, unpack_message
from edda.core.codec import Codec
from edda.core.model import EntryKind
from edda.errors import StorageError

from .competing_workload import CHANNEL, CONTESTANTS, contestant
from .final_state import FinalState, Record, read_remains
from .invariants import history_violations
from .ledger_table import COUNT_ITEMS, Row, open_till, read_till
from .sql_client import Line
from .target_databases import Place
from .worker import Orders
from .worker_fleet import Fleet, complaints
from .workload import LEASE

WORKERS = 4
PUBLISHERS = 4
GROUP = 100
"""Messages that a publisher puts at once, at most."""
STANDSTILL = 90.0
"""Seconds without one more message in the till, after which nobody hopes any more."""
PATIENCE = 60.0
HOPELESS = 5.0
"""Seconds for workers that are broken on purpose."""
COUNT_OPEN = "SELECT count(*) FROM edda_open_run"
LEFTOVERS = ("edda_staged_event", "edda_step_commit")
_KEYS = "SELECT count(*) FROM edda_event_key WHERE {column} = {key}"


class Contest(Struct, frozen=True):
    database: str
    messages: int
    consumers: int
    kills: int
    stops: int
    takeovers: int
    given_back: int
    """Letters whose wait was over: their messages were offered again."""
    generations: int
    violations: tuple[str, ...]
    seconds: float
    seed: int

    def __str__(self) -> str:
        noise = f"kills={self.kills} stops={self.stops} takeovers={self.takeovers}"
        work = f"messages={self.messages} consumers={self.consumers} given_back={self.given_back}"
        rate = f"generations={self.generations} per_second={self.messages / self.seconds:.0f}"
        end = f"violations={len(self.violations)} seconds={self.seconds:.0f} seed={self.seed}"
        return f"competing {self.database} {work} {rate} {noise} {end}"


class Attack:
    """Kills and stops in bursts, with a rest between them in which something can be done."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self._fleet = fleet
        self._rng = rng
        self.kills = self.stops = 0

    async def go_on(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_sleepers())
            group.create_task(self._strike_in_bursts())

    async def _wake_sleepers(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self._fleet.wake()

    async def _strike_in_bursts(self) -> None:
        while True:
            for _ in range(self._rng.randint(1, 8)):
                await asyncio.sleep(self._rng.uniform(0.005, 0.5))
                self._rng.choice((self._kill, self._kill, self._stop))()
            await asyncio.sleep(self._rng.uniform(0.5, 4.0))

    def _kill(self) -> None:
        self._fleet.kill(self._rng.choice(self._fleet.members))
        self._fleet.launch()
        self.kills += 1

    def _stop(self) -> None:
        if len(awake := self._fleet.awake) > 1:
            self._fleet.stop(self._rng.choice(awake), LEASE * self._rng.choice((0.2, 1.5, 2.5)))
            self.stops += 1


class Publishers:
    """From outside, several at once, in groups."""

    def __init__(self, client: EddaApp, messages: int, seconds: float, rng: random.Random) -> None:
        """`seconds`: how long it takes at least."""
        self._client = client
        self._pause = seconds * PUBLISHERS / messages
        self._rng = rng
        self._numbers = iter(range(messages))
        self.stored: list[str] = []
        """Ids of the messages whose publisher was told that they are."""

    async def publish_all(self) -> None:
        await asyncio.gather(*(self._publish_groups() for _ in range(PUBLISHERS)))

    async def _publish_groups(self) -> None:
        while group := list(islice(self._numbers, self._rng.randint(1, GROUP))):
            await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.1, 0.5)) + self._pause * len(group))
            self.stored += await asyncio.gather(*map(self._publish, group))

    async def _publish(self, number: int) -> str:
        while True:
            with suppress(StorageError):  # what became of it nobody knows; if it is there it counts like any other
                return await self._client.publish(CHANNEL, number)
            await asyncio.sleep(0.1)


async def compete(
    place: Place,
    folder: Path,
    messages: int,
    consumers: int,
    seed: int,
    progress: Callable[[str], None] = lambda line: None,
    seconds: float = 0.0,
    control: str = "",
) -> Contest:
    """`seconds`: how long publishing takes at least, for there must be time to kill somebody."""
    began, rng = time.monotonic(), random.Random(seed)
    await place.prepare()
    await open_till(place)
    orders = Orders(place.url, str(folder), "c", seed=seed * 100_000, control=control)
    client = EddaApp("client", place.url, workflows=CONTESTANTS, worker=False, auto_migrate=False)
    with closing(Fleet(orders)) as fleet, closing(place.line()) as line:
        async with client:
            run_ids = [await client.start(contestant) for _ in range(consumers)]
            for _ in range(WORKERS):
                fleet.launch()
            fleet.wait_until_ready()
            attack, publishers = Attack(fleet, rng), Publishers(client, messages, seconds, rng)
            found = await _fight(line, attack, publishers, messages, progress)
            fleet.wake(all=True)
            await _let_finish(line, client, run_ids, HOPELESS if control else PATIENCE)
        found += [f"worker {member.orders.name} ended by itself" for member in fleet.deserters()]
        remains, rows = await read_remains(line), await read_till(line)
        found += [*_violations(remains, rows, publishers.stored), *complaints(folder), *await _left_over(place, line)]
    return Contest(
        place.kind,
        messages,
        consumers,
        attack.kills,
        attack.stops,
        remains.takeovers,
        sum(record.kind == EntryKind.LATE_EVENT for record in remains.records),
        sum(map(len, remains.births.values())),
        tuple(found),
        time.monotonic() - began,
        seed,
    )


async def _fight(
    line: Line, attack: Attack, publishers: Publishers, messages: int, progress: Callable[[str], None]
) -> list[str]:
    attacking = asyncio.create_task(attack.go_on())
    publishing = asyncio.create_task(publishers.publish_all())
    try:
        done = await _watch(line, attack, messages, progress)
        return [] if done >= messages else [f"only {done} of {messages} messages are in the till, and no more come"]
    finally:
        publishing.cancel()
        attacking.cancel()
        await asyncio.gather(publishing, attacking, return_exceptions=True)


async def _watch(line: Line, attack: Attack, messages: int, progress: Callable[[str], None]) -> int:
    """How many messages are in the till, when all are or no more come."""
    done, moved, reported = 0, time.monotonic(), time.monotonic()
    while done < messages and time.monotonic() < moved + STANDSTILL:
        await asyncio.sleep(0.5)
        now = (await line.rows(COUNT_ITEMS))[0][0]
        if now > done:
            done, moved = now, time.monotonic()
        if time.monotonic() > reported + 10:
            reported = time.monotonic()
            progress(f"{done} of {messages} messages, {attack.kills} kills, {attack.stops} stops")
    return done


async def _let_finish(line: Line, client: EddaApp, run_ids: Sequence[str], within: float) -> None:
    """What is left of the last messages goes its way first: the entries of steps, offers of what nobody took."""
    for table in LEFTOVERS:
        await line.until(f"SELECT count(*) FROM {table}", lambda left: left == 0, within)
    for run_id in run_ids:
        await client.cancel(run_id)
    await line.until(COUNT_OPEN, lambda open: open == 0, within)


def _violations(remains: FinalState, rows: Sequence[Row], stored: Sequence[str]) -> Iterator[str]:
    yield from history_violations(remains)
    codec = Codec()
    receipts = [(unpack_message(codec, record.value).id, record) for record in remains.records if _is_receipt(record)]
    received, put = Counter(id for id, _ in receipts), Counter(row.item for row in rows)
    for id in sorted({*stored, *received, *put}):
        if (received[id], put[id]) != (1, 1):
            yield f"message {id} was received {received[id]} times, and is in the till {put[id]} times"
    by = {id: record.run_id for id, record in receipts}
    for row in rows:
        if not row.place.startswith(f"{by.get(row.item)}/"):
            yield f"message {row.item} was put into the till by {row.place}, but {by.get(row.item)} received it"


def _is_receipt(record: Record) -> bool:
    return record.kind == EntryKind.MESSAGE and record.ok


async def _left_over(place: Place, line: Line) -> list[str]:
    counts = {table: f"SELECT count(*) FROM {table}" for table in (*LEFTOVERS, "edda_open_run", "edda_wait")}
    counts["edda_event_key"] = count_untaken(place.kind, CHANNEL)
    found = {table: (await line.rows(count))[0][0] for table, count in counts.items()}
    return [f"{left} rows are left in {table}" for table, left in found.items() if left]


def count_untaken(kind: str, channel: str) -> str:
    """Messages that nobody who competes has yet."""
    key = channel_key(channel, ChannelMode.COMPETING).hex()
    return _KEYS.format(
        column="`key`" if kind == "mysql" else "key", key=rf"'\x{key}'::bytea" if kind == "postgres" else f"x'{key}'"
    )
