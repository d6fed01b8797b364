"""Whatever part of the engine ends with an error that it does not expect is logged and goes on, or a new worker does.

Every place that starts a task, a thread or a callback is in the tables below; one that is not fails the first test.
"""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edda
from edda import EddaApp, WorkflowContext, activity, publish, receive, sleep, subscribe, wait_event, workflow
from edda.engine.definitions import DefinitionPublisher
from edda.engine.engine import Engine
from edda.engine.events import EventIngest, StagedEventMover
from edda.engine.hooks import HookCaller, HooksBase
from edda.engine.journal import JournalWriter
from edda.engine.outbox.relayer import Relayer
from edda.engine.run.run import LiveRun
from edda.engine.run.waits import EventWaits
from edda.engine.settings import Settings
from edda.engine.worker import supervision
from edda.engine.worker.claims import ClaimLoop
from edda.engine.worker.heartbeat import Heartbeat
from edda.engine.worker.maintenance import Pruner, TakeOver
from edda.engine.worker.watchdog import Watchdog
from edda.engine.worker.worker import InboxPoller, Worker
from edda.errors import EddaError

from .conditions import until
from .conftest import MakeApp

ROOT = Path(edda.__file__).parent

STARTED = {
    # Through the supervision
    "engine/worker/supervision.py:start": "kept: begun anew after a growing pause",
    "engine/worker/supervision.py:attempt": "",
    "engine/worker/supervision.py:start_once": "its failure is logged; the next call begins it anew",
    # The bodies of steps, and what runs ask for: their errors reach the run, or `LiveRun.fail`
    "engine/run/attempt.py:_commit_effects": "awaited by the attempt",
    "engine/run/attempt.py:_run_in_thread": "callbacks of an attempt's clock",
    "engine/run/attempt.py:_check_timeouts": "callbacks of an attempt's clock",
    "engine/run/attempt.py:cancel": "tells the run that the body is gone",
    "engine/run/waits.py:_begin": "EventWaits._prepare reports every error to its run",
    "engine/run/children.py:_start_resolving": "ChildRuns._resolve_task reports every error to its run",
    "engine/run/run.py:_create_children_and_read_backlog": "LiveRun.advance is an entry: see `_entry`",
    "engine/run/run.py:_set_alarm": "LiveRun._deliver_due is an entry: see `_entry`",
    "engine/worker/worker.py:begin": "LiveRun.begin reports every error, as an entry does",
    "engine/worker/worker.py:_add": "LiveRun.begin reports every error, as an entry does",
    "engine/worker/worker.py:start": "Worker._journal_ended gives the worker up",
    "engine/run/run.py:_late_attempts_expired": "LiveRun._end_late_grace is an entry: see `_entry`",
    "engine/run/attempt.py:heartbeat": "records details of a body; the body goes on without",
    "engine/run/attempt.py:_schedule_flush": "records details of a body; the body goes on without",
    "engine/run/activity_limits.py:run": "awaited by the attempt",
    # Callbacks that only set an event
    "engine/worker/claims.py:_wait_for_work": "wakes the loop",
    "engine/worker/worker.py:run_failed": "ends the rest of a run",
    "engine/worker/worker.py:_run_in_background": "forgets a task that is kept",
    "engine/outbox/relayer.py:_rest": "wakes the loop",
    "engine/outbox/relayer.py:stop": "cancels",
    "engine/outbox/relayer.py:_start_key": "counts",
    "engine/hooks.py:_run": "awaited",
    "engine/definitions.py:add_event_schema": "begins a task that is supervised",
    "engine/definitions.py:_begin": "forgets a task",
    # The heartbeat's thread: `Heartbeat._run` reports its end, and `TakeOver.run` sees it
    "engine/worker/heartbeat.py:__init__": "the thread",
    "engine/worker/heartbeat.py:stop": "joins it",
    "engine/worker/heartbeat.py:kill": "wakes it",
    "engine/worker/heartbeat.py:_call_on_loop": "tells the worker",
    "engine/worker/watchdog.py:tick": "sets a time",
    # Awaited where they are started
    "engine/outbox/sinks.py:_shield_from_cancel": "awaited",
    "engine/definitions.py:_describe_all": "awaited",
    "storage/sqlite/journal.py:_set_timer": "only logs",
    "engine/definitions.py:_save_event_schema": "awaited",
    "engine/clock.py:call_at": "the callers are in this table",
    "storage/postgres/connection.py:connect": "awaited",
    "storage/shared/pool.py:kill": "drops a connection",
    # SQLite's threads: `JobQueue.run_jobs` answers every job
    "storage/sqlite/threads.py:__init__": "the thread",
    "storage/sqlite/threads.py:close": "joins it",
    "storage/sqlite/threads.py:_run_job": "answers",
    "storage/sqlite/threads.py:_answer_at_last": "answers when that failed",
    "storage/sqlite/notifications.py:_poll": "an error ends one poll; the next caller begins another",
    "storage/sqlite/transactions.py:begin": "forgets a held transaction",
}
CALLS = {
    "create_task",
    "ensure_future",
    "Thread",
    "call_later",
    "call_soon",
    "call_soon_threadsafe",
    "call_at",
    "run_in_executor",
    "to_thread",
    "add_done_callback",
}


def started() -> Iterator[str]:
    for folder in ("engine", "storage"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield from _started_in(ast.parse(file.read_text()), f"{file.relative_to(ROOT)}:", "")


def _started_in(node: ast.AST, file: str, function: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call):
            called = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
            if called in CALLS:
                yield file + function
        yield from _started_in(child, file, inner)


def test_every_task_thread_and_callback_of_the_engine_is_in_the_table() -> None:
    unknown = sorted(set(started()) - STARTED.keys())
    assert not unknown, "say in the table what happens when it raises, and test it below"


# One fault in each part

BRISK = Settings(
    linger=0.0, sweep=0.05, takeover_grace=0.0, poll=0.1, heartbeat=0.1, lease=2.0, prune_every=0.02, orphan_sweep=0.2
)

PARTS: dict[str, tuple[type, str]] = {
    "heartbeat thread": (Heartbeat, "_run_tasks"),
    "heartbeat": (Heartbeat, "_beat"),
    "watchdog": (Watchdog, "check"),
    "journal": (JournalWriter, "_make_batch"),
    "claim": (ClaimLoop, "claim_ready"),
    "adopting a claimed run": (Worker, "add_claimed_run"),
    "sweep": (TakeOver, "take_over_lapsed"),
    "neighbours": (TakeOver, "remove_dead_local_workers"),
    "listen": (InboxPoller, "read"),
    "prune": (Pruner, "prune"),
    "mail": (InboxPoller, "read"),
    "announce": (Engine, "_notify"),
    "watchers": (Worker, "_fetch_watchers"),
    "forwarder": (StagedEventMover, "move_batch"),
    "relayer": (Relayer, "_claim_if_due"),
    "outbox line": (Relayer, "_try"),
    "intake": (EventIngest, "_take"),
    "definitions": (DefinitionPublisher, "_describe_all"),
    "hooks": (HookCaller, "watch"),
    "wait": (Worker, "ensure_wait_indexed"),
    "child": (Worker, "start_or_watch"),
    "begin": (LiveRun, "_new_execution"),
    "advance": (LiveRun, "_start_work"),
    "timer": (LiveRun, "_deliver_due_one"),
    "on_committed": (LiveRun, "_apply_transition"),
    "registering waits": (EventWaits, "apply_result"),
    "body settled": (LiveRun, "_accept_issued"),
}


class Fault:
    """Raises in a method, so many times; it counts how often it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, method: str, times: float) -> None:
        self.calls = 0
        self.raised = 0
        self.times = times
        real = getattr(kind, method)

        def strike() -> None:
            self.calls += 1
            if self.raised < self.times:
                self.raised += 1
                raise MemoryError("injected")

        if asyncio.iscoroutinefunction(real):

            async def faulty(*args: Any, **kwargs: Any) -> Any:
                strike()
                return await real(*args, **kwargs)

            monkeypatch.setattr(kind, method, faulty)
        else:

            def faulty_now(*args: Any, **kwargs: Any) -> Any:
                strike()
                return real(*args, **kwargs)

            monkeypatch.setattr(kind, method, faulty_now)


class Sink:
    async def send(self, event: object) -> None: ...

    async def close(self) -> None: ...


async def everything(app: EddaApp) -> Callable[[], Awaitable[None]]:
    """A workflow that uses every part; called, it runs one to its end."""

    @activity
    async def add(ctx: WorkflowContext, number: int) -> int:
        return number + 1

    @workflow
    async def child(ctx: WorkflowContext) -> str:
        await sleep(ctx, 0.01)
        return "child"

    @workflow
    async def whole(ctx: WorkflowContext, name: str) -> str:
        await subscribe(ctx, "news")
        assert await add(ctx, 1) == 2
        await sleep(ctx, 0.01)
        assert await child.options(id=f"child-{name}").run() == "child"
        event = await wait_event(ctx, "paid", match={"name": name})
        await publish(ctx, "news", event.data["name"])
        assert (await receive(ctx, "news")).data == name
        return name

    count = iter(range(1000))

    async def run_one() -> None:
        name = f"n{next(count)}"

        async def send() -> None:
            while True:  # an event that an injected fault refused is sent again, as a sender would
                try:
                    await app.send_event("paid", "/test", {"name": name}, id=name)
                except (EddaError, MemoryError):
                    continue
                return

        run = await app.start(whole, name)
        await send()
        assert await app.handle(run).result(timeout=30) == name

    return run_one


@pytest.fixture(autouse=True)
def quick_supervision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.02)


@pytest.mark.parametrize("database", ["memory", "sqlite"], indirect=True)
@pytest.mark.parametrize("part", PARTS)
async def test_after_one_unexpected_error_runs_go_on(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault(monkeypatch, *PARTS[part], times=1)
    app = await make_app(settings=BRISK, hooks=HooksBase(), outbox_enabled=True, sink=Sink())
    run_one = await everything(app)
    with caplog.at_level(logging.WARNING):
        await run_one()
        if fault.raised:
            await run_one()
    told = [record for record in caplog.records if "injected" in record.getMessage()]
    if fault.raised and part not in {"hooks", "definitions", "outbox line"}:  # which have their own words for it
        assert told
    assert len(told) <= 3


ALWAYS = ("claim", "neighbours", "prune", "forwarder", "relayer", "heartbeat", "watchdog", "journal", "begin")


@pytest.mark.parametrize("database", ["memory"], indirect=True)
@pytest.mark.parametrize("part", ALWAYS)
async def test_a_part_that_always_fails_rests_longer_each_time_and_fills_no_log(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return "done"

    app = await make_app(settings=BRISK, outbox_enabled=True, sink=Sink())
    fault = Fault(monkeypatch, *PARTS[part], times=float("inf"))
    with caplog.at_level(logging.INFO):
        starting = asyncio.create_task(app.start(order))
        await until(lambda: fault.raised >= 4, "it failed four times")
        raised, lines = fault.raised, len(caplog.records)
        await asyncio.sleep(1.0)
        # Pauses of 0.16 s, 0.32 s, 0.64 s, ... leave no room for many more.
        assert fault.raised - raised <= 8
        assert len(caplog.records) - lines <= 30
        assert lines <= 40
    starting.cancel()
    fault.times = 0
    async with asyncio.timeout(30):
        assert await app.run(order) == "done"


def test_a_pause_grows_to_its_limit_and_starts_over_after_a_long_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.1)
    now = 1000.0
    monkeypatch.setattr("edda.engine.worker.supervision.time.monotonic", lambda: now)
    failures = supervision.Failures("part", max_pause=1.0)
    pauses = [failures.record(ValueError("x"), "again") for _ in range(6)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert [record.exc_info is not None for record in caplog.records] == [True] + [False] * 5
    now += 1000
    assert failures.record(ValueError("x"), "again") == 0.1


async def test_an_answer_of_a_sqlite_thread_that_cannot_be_handed_over_is_said_to_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from edda.storage.sqlite import threads
    from edda.storage.sqlite.connection import MEMORY, Connection

    real, failures = threads._run_job, iter([True, True])

    def perform(*job: Any) -> None:
        if next(failures, False):
            raise MemoryError("injected")
        real(*job)

    monkeypatch.setattr(threads, "_run_job", perform)
    one = threads.ConnectionThread("test", Connection(MEMORY, "FULL"))
    try:
        async with asyncio.timeout(20):
            for _ in range(2):
                with pytest.raises(EddaError, match="the answer was lost"):
                    await one.read(lambda db: 1)
            assert await one.read(lambda db: 1) == 1
    finally:
        await one.close()
