"""Three nodes of a Galera cluster that all take writes, and are killed and rejoin in turn."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

from edda import EddaApp, WorkflowContext, wait_event, workflow
from edda.errors import EddaError
from faults.hammer import Hammer, Task
from faults.ledger_hammer import LedgerHammer
from faults.target_databases import Place
from tests.databases import MySQLServer
from tests.galera import Cluster, Node

from .trial import PATIENCE, folder

EVENTS = 10_000
RUNS = 100
PART = EVENTS // RUNS
NOISE = 60.0
"""Seconds of each hammer."""
# What SQLAlchemy says when the hammer's own web handler loses its connection in the middle of a handshake.
_HANDLERS_OWN = ("NullPool: The garbage collector", "SAWarning", "return info.func(")


class Killer:
    """Kills a node that is not the first, which the checks talk to, and lets it rejoin."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._turns = cycle(cluster.nodes[1:])
        self._node: Node = cluster.nodes[0]
        self.kills = 0

    def crash(self) -> None:
        self._node = next(self._turns)
        self._node.kill()
        self.kills += 1

    def restart(self) -> None:
        self._cluster.rejoin(self._node)


@workflow(name="cluster_listening")
async def listening(ctx: WorkflowContext, number: int) -> list[int]:
    """All events of a number, in the order in which it got them."""
    got: list[int] = []
    while len(got) < PART:
        event = await wait_event(ctx, "counted", match={"number": number})
        got.append(event.data["n"])
    return got


def run() -> dict[str, object]:
    cluster = Cluster(3)
    server = MySQLServer(cluster.nodes[0].url)
    server.execute("CREATE DATABASE edda")
    try:
        figures = asyncio.run(_send_events(cluster))
        for kind in (Hammer, LedgerHammer):
            figures["kills"] = int(str(figures["kills"])) + _hammer(cluster, server, kind, figures)
        return figures
    finally:
        cluster.stop()


async def _send_events(cluster: Cluster) -> dict[str, object]:
    """To all nodes in turn, while nodes are killed: none is lost, none comes twice, all in order."""
    apps = [EddaApp(f"node-{n}", url, workflows=[listening]) for n, url in enumerate(cluster.urls("edda"))]
    for app in apps:
        await app.initialize()
    killer, over = Killer(cluster), asyncio.Event()
    killing = asyncio.create_task(_kill_nodes(killer, over))
    try:
        began = time.monotonic()
        runs = [await _again(apps[n % 3].start, listening.options(id=f"listener-{n}"), n) for n in range(RUNS)]
        await asyncio.gather(*(_send(apps, number) for number in range(RUNS)))
        over.set()
        await killing
        sent = time.monotonic()
        async with asyncio.timeout(10 * PATIENCE):
            heard = [await apps[0].client.await_result(run, list[int], None) for run in runs]
    finally:
        over.set()
        await asyncio.gather(killing, return_exceptions=True)
        for app in apps:
            await app.shutdown()
    for number, got in enumerate(heard):
        extra = [n for n, times in Counter(got).items() if times > 1]
        assert not extra, f"run {number} got events {extra} twice"
        assert sorted(got) == list(range(PART)), f"run {number} lost {sorted(set(range(PART)) - set(got))}"
        assert got == sorted(got), f"run {number} got its events out of order"
    return {
        "done": "3 nodes take writes; killed with SIGKILL and rejoined in turn",
        "runs": RUNS,
        "events": EVENTS,
        "recovered": f"{time.monotonic() - sent:.1f}",
        "kills": killer.kills,
        "events/s": round(EVENTS / (time.monotonic() - began)),
    }


async def _send(apps: list[EddaApp], number: int) -> None:
    """One after the other, each to the next node; what is refused is sent again, under the same id."""
    for n in range(PART):
        await _again(
            apps[(number + n) % 3].send_event,
            "counted",
            "/counter",
            {"number": number, "n": n},
            id=f"{number}-{n}",
        )


async def _again(call: Any, *args: Any, **options: Any) -> Any:
    give_up = time.monotonic() + 3 * PATIENCE
    while True:
        try:
            return await call(*args, **options)
        except EddaError:
            assert time.monotonic() < give_up, "the cluster takes nothing"
            await asyncio.sleep(0.2)


async def _kill_nodes(killer: Killer, over: asyncio.Event) -> None:
    while not over.is_set():
        await asyncio.sleep(5)
        if not over.is_set():
            await asyncio.to_thread(killer.crash)
            await asyncio.sleep(1)
            await asyncio.to_thread(killer.restart)


def _hammer(cluster: Cluster, server: MySQLServer, kind: type[Hammer], figures: dict[str, object]) -> int:
    """Starts, claims, take-overs, children, undos; then users' rows, messages and the outbox."""
    name = kind.__name__.lower()
    server.execute(f"CREATE DATABASE {name}")
    is_ledger = kind is LedgerHammer
    task = Task("mysql", None, NOISE, 7, crashes=True, events=not is_ledger, trades=is_ledger)
    urls, killer = cluster.urls(name), Killer(cluster)
    with folder() as place:
        report = asyncio.run(kind(task, Place("mysql", urls[0], urls), killer, Path(place)).strike(lambda _: None))
    found = [one for one in report.violations if not any(own in one for own in _HANDLERS_OWN)]
    assert not found, f"{name}: {len(found)} violations, such as: {found[0]}"
    figures[name] = f"{report.counts['runs']} runs, {report.counts['takeovers']} take-overs"
    return killer.kills
