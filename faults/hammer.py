"""The hammer: workers that start runs and take in events without end, and somebody who lets nothing of theirs be."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct, structs

from edda.core.model import EntryKind
from edda.core.states import RunStatus

from .audit_triggers import COUNT_TAKEOVERS
from .effect_log import Testimony, read_ledgers
from .end_invariants import UNDO
from .event_invariants import Mail, event_violations, read_mail
from .fault_injector import WORKERS, FaultInjector
from .final_state import FinalState, read_remains
from .invariants import success, violations
from .live_invariants import LiveInvariants
from .protocol_breaks import CONTROLS
from .target_databases import Crasher, Place, crashable, fresh
from .worker import Orders
from .worker_fleet import Fleet, complaints

COUNT_OPEN = "SELECT count(*) FROM edda_open_run"
COUNT_ENTRIES = "SELECT count(*) FROM edda_history"


class Task(Struct, frozen=True):
    """What a run of the hammer is to do, and when it has done enough."""

    database: str
    takeovers: int | None = None
    seconds: float = 3600.0
    seed: int = 0
    crashes: bool = False
    """The database server itself crashes every few seconds."""
    control: str = ""
    """What the workers do wrong on purpose."""
    events: bool = False
    """There are events, runs that wait for them, runs that begin anew, children, and undos, beside the others."""
    trades: bool = False
    """Instead of all these: runs that write users' rows, publish and send, and handlers who start them."""

    @property
    def patience(self) -> float:
        """Seconds without any progress after which open runs count as stuck; broken workers get only a few."""
        return 5.0 if self.control else 60.0


class Report(Struct, frozen=True):
    task: Task
    counts: dict[str, object]
    violations: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Nothing was found, or what was broken on purpose."""
        control = self.task.control
        return CONTROLS[control].is_seen(self.violations) if control else not self.violations

    def __str__(self) -> str:
        task = self.task
        name = f"{task.database}{'+crashes' if task.crashes else ''}{f'+broken {task.control}' if task.control else ''}"
        facts = self.counts | {"violations": len(self.violations), "seed": task.seed}
        what = "ledger" if task.trades else "everything" if task.events else "journal"
        return f"{what} {name} " + " ".join(f"{key}={value}" for key, value in facts.items())


class Hammer:
    def __init__(self, task: Task, place: Place, crasher: Crasher | None, folder: Path) -> None:
        self._task = task
        self._place = place
        self._crasher = crasher
        self._folder = folder
        self._rng = random.Random(task.seed)
        self._line = place.line()
        self._glance = LiveInvariants()
        orders = Orders(place.url, str(folder), "w", seed=task.seed * 100_000, is_wild=True)
        orders = structs.replace(orders, hears=task.events, trades=task.trades, control=task.control)
        self._fleet = Fleet(orders, place.urls)
        self._noise = FaultInjector(place, self._fleet, folder, self._rng, events=task.events, trades=task.trades)
        self._over = asyncio.Event()
        self._crashes = 0
        self._deadlocks = 0
        """That were counted before we began."""
        self._found: list[str] = []

    async def strike(self, progress: Callable[[str], None]) -> Report:
        began = time.monotonic()
        await self._prepare()
        await self._place.slow_down()
        self._deadlocks = await self._place.deadlocks()
        try:
            await self._noise.open()
            for _ in range(WORKERS):
                self._fleet.launch()
            self._fleet.wait_until_ready()
            await self._make_noise(progress)
            rest = await self._let_finish()
            return await self._judge(time.monotonic() - began, rest)
        finally:
            self._fleet.close()
            await self._noise.close()
            self._line.close()

    async def _prepare(self) -> None:
        await self._place.prepare()

    async def _make_noise(self, progress: Callable[[str], None]) -> None:
        end = time.monotonic() + self._task.seconds
        looks = asyncio.create_task(self._look_on(progress))
        crashes = asyncio.create_task(self._crash_servers())
        alarm = asyncio.create_task(self._wake_sleepers())
        try:
            while time.monotonic() < end and not looks.done():
                await asyncio.sleep(self._rng.uniform(0.01, 0.12))
                await self._noise.make()
        finally:
            self._over.set()
            looks.cancel()
            await asyncio.gather(crashes, looks, return_exceptions=True)
            alarm.cancel()

    async def _wake_sleepers(self) -> None:
        """By itself: the next deed may have to wait for a lock that a stopped process holds."""
        while True:
            await asyncio.sleep(0.02)
            self._fleet.wake()

    async def _look_on(self, progress: Callable[[str], None]) -> None:
        """Ends when there were enough takeovers."""
        reported = time.monotonic()
        while True:
            await asyncio.sleep(1)
            await self._glance.look(self._line, time.time_ns() // 1000)
            self._found += [f"worker {member.orders.name} ended by itself" for member in self._fleet.deserters()]
            takeovers: int = (await self._line.rows(COUNT_TAKEOVERS))[0][0]
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                progress(f"{takeovers} takeovers, {len(self._glance.violations) + len(self._found)} violations so far")
            if self._task.takeovers is not None and takeovers >= self._task.takeovers:
                return

    async def _crash_servers(self) -> None:
        """Never cancelled: whoever ends the noise must find a server that runs."""
        while self._crasher is not None and not await self._is_over_within(self._rng.uniform(2, 6)):
            await asyncio.to_thread(self._crasher.crash)
            await asyncio.sleep(self._rng.uniform(0, 1))
            await asyncio.to_thread(self._crasher.restart)
            self._crashes += 1

    async def _is_over_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        return self._over.is_set()

    async def _let_finish(self) -> float:
        self._fleet.calm_down()
        await self._place.speed_up()
        began = moved = time.monotonic()
        last: object = None
        while time.monotonic() < moved + self._task.patience:
            still_open = (await self._line.rows(COUNT_OPEN))[0][0]
            if still_open == 0:
                break
            # On a busy machine runs end late; what counts is that they go on.
            state = (still_open, (await self._line.rows(COUNT_ENTRIES))[0][0])
            if state != last and not self._task.control:
                last, moved = state, time.monotonic()
            await self._noise.feeder.feed()
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def _judge(self, seconds: float, rest: float) -> Report:
        await self._glance.look(self._line, time.time_ns() // 1000)
        await self._glance.look_back(self._line)
        remains, told = await read_remains(self._line), read_ledgers(self._folder)
        mail = await read_mail(self._line)
        found = [*self._found, *self._glance.violations, *violations(remains, told), *complaints(self._folder)]
        found += [*self._noise.feeder.faults, *event_violations(mail, remains, told)]
        counts = await self._noise_counts(remains, told) | {
            "steps": sum(1 for _ in remains.records),
            "effects": len(told.effects),
            **(self._whole_counts(mail, remains) if self._task.events else {}),
            "ok": f"{success(remains, told):.1%}",
            "seconds": round(seconds),
            "rest": round(rest, 1),
        }
        return Report(self._task, counts, (*found, *self._deadlock_violations(counts)))

    async def _noise_counts(self, remains: FinalState, told: Testimony) -> dict[str, object]:
        return {
            "takeovers": remains.takeovers,
            "moved": remains.moved,
            "kills": self._noise.kills,
            "stops": self._noise.stops,
            "steals": self._noise.steals,
            "cuts": self._noise.cuts + told.cuts,
            "deadlocks": await self._place.deadlocks() - self._deadlocks,
            "crashes": self._crashes,
            "runs": len(remains.runs),
        }

    def _deadlock_violations(self, counts: dict[str, object]) -> list[str]:
        is_ours = counts["deadlocks"] and self._place.counts_only_its_own
        return [f"{counts['deadlocks']} deadlocks"] if is_ours else []

    def _whole_counts(self, mail: Mail, remains: FinalState) -> dict[str, object]:
        receipts = sum(record.is_receipt for record in remains.records)
        kinds = Counter(record.kind for record in remains.records)
        ends = Counter(result.status for result in remains.results.values())
        return {
            "events": len(mail.log.events),
            "received": receipts,
            "timeouts": kinds[EntryKind.EVENT] - receipts,
            "freed": kinds[EntryKind.LATE_EVENT],
            "pruned": self._noise.pruned,
            "recurred": kinds[EntryKind.RECUR],
            "children": sum(births[0].parent is not None for births in remains.births.values()),
            "told": kinds[EntryKind.CHILD],
            "undone": sum(record.step.startswith(UNDO) for record in remains.records),
            "overdue": kinds[EntryKind.TIMEOUT],
            "cancels": self._noise.cancels,
            **{status.value: ends[status] for status in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)},
        }


def hammer(
    task: Task,
    progress: Callable[[str], None] = lambda line: None,
    keep: Path | None = None,
    kind: type[Hammer] = Hammer,
) -> Report:
    """Synchronous, and without a loop of its own until the fork server is there."""
    with (
        tempfile.TemporaryDirectory(prefix="edda_faults_", ignore_cleanup_errors=True) as folder,
        _place_for(task, Path(folder)) as (place, crasher),
    ):
        return asyncio.run(kind(task, place, crasher, keep or Path(folder)).strike(progress))


@contextmanager
def _place_for(task: Task, folder: Path) -> Iterator[tuple[Place, Crasher | None]]:
    if task.crashes:
        with crashable(task.database) as (place, crasher):
            yield place, crasher
    else:
        with fresh(task.database, folder) as place:
            yield place, None
