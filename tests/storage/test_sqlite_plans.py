"""EXPLAIN of the statements that the SQLite storage sends, on 100,000 runs, events, waits and inbox items."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from edda.core.model import (
    AckInbox,
    End,
    EndWatcher,
    Event,
    EventKey,
    Fence,
    NewEvent,
    OutboxState,
    Rejected,
    RunFilter,
    RunId,
    RunValue,
    SendLater,
    SendResult,
    Sent,
    Wait,
    WorkerId,
)
from edda.core.queries import Audit, EventQuery, RunQuery
from edda.core.states import RunStatus
from edda.storage.sqlite import SQLiteStorage

from .probes import Listener
from .processes import opened
from .records import (
    HOUR,
    LATER,
    SUSPENDED,
    cancel_signal,
    child,
    done,
    end_signal,
    entry,
    key,
    new_run,
    next_generation,
    outbox_event,
    run_write,
    staged_event,
    start,
    wait,
)
from .worker import Worker

pytestmark = pytest.mark.databases("sqlite")

SEED = """
WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 100000)
INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor, ready_at, inbox_count,
    inbox_read,
                        watchers)
SELECT printf('run-%06d', n), 'wf' || (n % 20), 'running', CASE WHEN n % 2 THEN 'w' || (n % 7) END, 1, n % 4 = 0, 0,
       CASE WHEN n % 2 = 0 THEN n END, 1, 1, 1 FROM i"""
SEED_RUNS = """
INSERT INTO edda_run (id, generation, workflow, input, created_at) SELECT run_id, 0, workflow, x'', epoch
    FROM edda_open_run"""
SEED_GENERATIONS = """
INSERT INTO edda_run (id, generation, workflow, input, created_at, parent)
SELECT run_id, 1, workflow, x'', epoch, 'run-000001' FROM edda_open_run WHERE generation = 1"""
SEED_WATCHERS = """
INSERT INTO edda_watcher (run_id, watcher, step) SELECT run_id, 'run-000001', run_id FROM edda_open_run"""
SEED_EVENTS = """
WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 100000)
INSERT INTO edda_event (seq, source, id, type, received_at, body)
SELECT n, '/shop', n, 't' || (n % 20), n, x'' FROM i"""
SEED_KEYS = """
INSERT INTO edda_event_key (key, seq) SELECT CAST(printf('%016d', seq % 1000) AS BLOB), seq FROM edda_event"""
SEED_LETTERS = """
INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value, event)
SELECT printf('run-%06d', seq), 1, 'event', 'w', seq, x'', seq FROM edda_event"""
SEED_WAITS = """
INSERT INTO edda_wait (run_id, step, key, target_key, type, match)
SELECT printf('run-%06d', seq), 'w', CAST(printf('%016d', seq) AS BLOB), CAST(printf('%016d', -seq) AS BLOB),
       type, x'' FROM edda_event"""
SEED_RESULTS = """
INSERT INTO edda_result (run_id, generation, status, value, ended_at)
SELECT printf('old-%06d', seq), 0, 'completed', x'', seq FROM edda_event"""
SEED_SHAPES = """
INSERT INTO edda_match_paths (type, paths, filled_from) SELECT 'u' || (seq % 1000), seq, 0 FROM edda_event"""
SEED_DONE = """
INSERT INTO edda_step_commit (run_id, generation, step, attempt, value, at) SELECT run_id, generation, 'x', 1, x'',
    1 FROM edda_open_run"""
SEED_FACTS = """
INSERT INTO edda_run_value (run_id, name, value, at) SELECT run_id, 'place', x'', 1 FROM edda_open_run"""
SEED_DISPATCHES = """
INSERT INTO edda_staged_event (seq, kind, body, due) SELECT seq, 'message', x'', 0 FROM edda_event"""
# A third of each state. The first pending events are not due, nor is any other event of their keys.
SEED_OUTBOX = f"""
INSERT INTO edda_outbox (seq, id, order_key, type, source, body, created_at, due, attempts, state, ended_at)
SELECT seq, seq, CASE WHEN seq < 90000 THEN 'busy' ELSE 'key' END || (seq % 1000), type, source, x'', seq,
       CASE WHEN seq < 90000 THEN {LATER} ELSE seq END, 1,
       CASE seq % 3 WHEN 0 THEN 'pending' WHEN 1 THEN 'sent' ELSE 'dead' END, seq FROM edda_event"""
SEEDS = (
    SEED,
    SEED_RUNS,
    SEED_GENERATIONS,
    SEED_WATCHERS,
    SEED_EVENTS,
    SEED_KEYS,
    SEED_LETTERS,
    SEED_WAITS,
    SEED_RESULTS,
    SEED_SHAPES,
    SEED_DONE,
    SEED_FACTS,
    SEED_DISPATCHES,
    SEED_OUTBOX,
)

KEY = b"%016d" % 77
R1 = RunId("run-000001")
BATCH = [
    run_write(R1, entry(1), transition=AckInbox(1), waits=[Wait("x", KEY, key("own"), "t1", b"")]),
    run_write("run-000002", transition=AckInbox(1), released_items=[1], cancelled_waits=["w"]),
    run_write("run-000003", entry(1), transition=done(watchers=1), children=[child("run-child", "run-000003")]),
    run_write(
        "run-000006",
        entry(1),
        transition=next_generation(1),
        signals=[end_signal("run-000008"), cancel_signal("run-000010")],
        compensating=True,
    ),
    new_run("run-new", transition=SUSPENDED, waits=[wait("run-new", "w", "order")]),
    new_run("run-taker", transition=SUSPENDED, waits=[Wait("w", KEY, key("own"), "t1", b"", exclusive=True)]),
    run_write("run-000012", transition=End(RunStatus.COMPLETED, b"", 1, watchers=1, expected_inbox_count=1)),
    run_write(
        "run-000014",
        staged_events=[staged_event("a")],
        outbox_events=[outbox_event("o")],
        values=[RunValue("place", b"")],
        recorded_steps=["x"],
    ),
]
POST = [
    NewEvent(Event("/shop", "new", "t1", None, b""), (EventKey(KEY, KEY),), (start("run-started"),)),
    NewEvent(Event("/shop", "newer", "t1", RunId("run-000078"), b""), (EventKey(b"%016d" % 78, KEY),)),
    NewEvent(Event("/shop", "single", "t1", None, b""), (EventKey(b"%016d" % 79, KEY, exclusive=True),)),
    NewEvent(Event("/shop", "sole", "t1", RunId("run-000080"), b""), (EventKey(b"%016d" % 80, KEY, exclusive=True),)),
]
RECEIPTS: list[SendResult] = [Sent(90_000), Rejected(90_003, 1, "no"), SendLater(90_006, 1, LATER, "later")]

CALLS: dict[str, tuple[Callable[[SQLiteStorage], Coroutine[Any, Any, object]], set[str]]] = {
    "claim": (lambda s: s.claim(WorkerId("here"), ["wf2", "wf4"], 10), {"edda_open_run_ready"}),
    "next_due": (lambda s: s.next_due(["wf2", "wf4"]), {"edda_open_run_ready"}),
    "unpark": (lambda s: s.wake_parked(["wf2", "wf4"]), {"edda_open_run_parked"}),
    "mail": (lambda s: s.read_inboxes(WorkerId("w1")), {"edda_open_run_inbox"}),
    "owned": (lambda s: s.owned_runs(WorkerId("w1")), {"edda_open_run_owner"}),
    "take_over": (lambda s: s.take_over(WorkerId("other")), {"edda_open_run_owner"}),
    "free_orphans": (lambda s: s.free_orphans(), {"edda_open_run_owner"}),
    "get": (lambda s: s.get(RunId("run-000001")), set()),
    "history": (lambda s: s.history(RunId("run-000001")), set()),
    "watch": (lambda s: s.add_watcher(R1, EndWatcher(RunId("run-000002"), "w")), set()),
    "watchers": (lambda s: s.watchers(R1), set()),
    "write": (lambda s: s.write(Fence(WorkerId("here"), 0, 0), BATCH), {"edda_inbox_event"}),
    "accept": (lambda s: s.accept(POST, {}, [1, 50_000]), {"edda_wait_key"}),
    "dispatches": (lambda s: s.staged_events(10), {"edda_staged_event_due"}),
    "take": (lambda s: s.take_message(KEY, HOUR), set()),
    "done": (lambda s: s.find_step_commit(R1, 0, "x"), set()),
    "facts": (lambda s: s.run_values(R1), set()),
    "facts by name": (lambda s: s.run_values(R1, "place"), set()),
    "enqueue": (lambda s: s.enqueue([outbox_event("o")]), set()),
    "claim_outgoing": (
        lambda s: s.claim_outbox(10, HOUR),
        {"edda_outbox_pending", "edda_outbox_due", "edda_outbox_key"},
    ),
    "settle_outgoing": (lambda s: s.record_send_results(RECEIPTS), {"edda_outbox_key"}),
    "next_outgoing": (lambda s: s.next_outbox_due(), {"edda_outbox_due"}),
    "find_outgoing": (lambda s: s.find_outbox(after=50_000, limit=10), set()),
    "find_outgoing of a state": (lambda s: s.find_outbox(OutboxState.DEAD, 50_000, 10), {"edda_outbox_dead"}),
    "retry_outgoing": (lambda s: s.retry_outbox(["2", "5"]), {"edda_outbox_dead"}),
    "prune_outgoing": (lambda s: s.prune_outbox(50_000, 10), {"edda_outbox_sent"}),
    "shapes": (lambda s: s.match_paths(["u1", "u2"]), set()),
    "learn": (lambda s: s.register_match_paths("t1", "order"), set()),
    "fill": (lambda s: s.backfill_keys("u1", "1001", [(KEY, 1), (KEY, 2)], 5), set()),
    "log": (lambda s: s.events_of_type("t1", 50_000, 90_000, 10), {"edda_event_by_type"}),
    "page": (lambda s: s.events_under_key(KEY, 50_000, 10), set()),
    "last_event": (lambda s: s.last_event(), set()),
    "last_event before": (lambda s: s.last_event(50_000), {"edda_event_received"}),
    "find_event": (lambda s: s.find_event("/shop", "77"), {"edda_event_identity"}),
    "waits": (lambda s: s.waits(RunId("run-000001")), set()),
    "prune_events": (
        lambda s: s.prune_events(HOUR + 50_000, 10),
        {"edda_event_key_seq", "edda_event_received", "edda_inbox_event"},
    ),
    "prune_letters": (lambda s: s.prune_inbox(50_000, 10), {"edda_inbox_at"}),
    "prune_runs": (lambda s: s.prune_runs(50_000, 10), {"edda_result_ended", "edda_run_followed"}),
}


@pytest.fixture(scope="module", params=["fresh", "analyzed"])
def seeded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("seeded") / "edda.db")
    asyncio.run(close_after_migration(path))
    db = sqlite3.connect(path)
    with db:
        for statement in SEEDS:
            db.execute(statement)
        if request.param == "analyzed":
            db.execute("ANALYZE")
    db.close()
    return path


@pytest.fixture
def crowded(seeded: str, tmp_path: Path) -> str:
    return str(shutil.copy(seeded, tmp_path / "edda.db"))


async def close_after_migration(path: str) -> None:
    await (await opened(path)).close()


@pytest.mark.parametrize("name", CALLS)
def test_no_statement_reads_more_of_a_crowded_table_than_it_must(crowded: str, name: str) -> None:
    call, indexes = CALLS[name]
    plans = asyncio.run(plans_of(crowded, call))
    # There are few workers. Lists of ids are a virtual table.
    scans = [p for p in plans if p.startswith("SCAN") and "VIRTUAL TABLE" not in p and "edda_worker" not in p]
    assert not scans
    assert not [p for p in plans if "AUTOMATIC" in p]
    assert {i for i in indexes if any(i in p for p in plans)} == indexes


async def plans_of(path: str, call: Callable[[SQLiteStorage], Coroutine[Any, Any, object]]) -> list[str]:
    heard = await statements_of(path, {"it": call})
    db = sqlite3.connect(path)
    plans = [plan for sql in heard["it"] for plan in explain(db, sql)]
    db.close()
    return plans


async def statements_of(
    path: str, calls: Mapping[str, Callable[[SQLiteStorage], Coroutine[Any, Any, object]]]
) -> dict[str, set[str]]:
    probe = Listener()
    storage = await opened(path, probe)
    await Worker(storage, "here").register(-HOUR)
    heard: dict[str, set[str]] = {}
    for name, call in calls.items():
        probe.heard.clear()
        await call(storage)
        heard[name] = {sql for _, sql in probe.heard if sql not in {"BEGIN IMMEDIATE", "COMMIT"}}
    await storage.close()
    return heard


def explain(db: sqlite3.Connection, sql: str) -> list[str]:
    named = re.findall(r":([a-z_]+)", sql)
    numbered = [int(number) for number in re.findall(r"\?(\d)", sql)]
    values = dict.fromkeys(named) if named else (None,) * max([*numbered, 0 if numbered else sql.count("?")])
    return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", values)]


RARE = frozenset({RunStatus.PARKED, RunStatus.FAILED})
BROADLY = {"edda_run_created", "edda_result_unusual"}
# Full scans that are allowed: of open runs, which are few among all, and those that end at a limit.
OPEN_RUNS = {"SCAN s", "SCAN edda_open_run"}
# The keys of a page, before its records are joined.
PLACES = {"SCAN k"}
SURVEYS: dict[str, tuple[Callable[[SQLiteStorage], Coroutine[Any, Any, object]], set[str], set[str]]] = {
    "search": (lambda s: s.search(RunQuery(limit=10)), {"edda_run_created"}, PLACES),
    "search far back": (lambda s: s.search(RunQuery(after=(1, R1))), {"edda_run_created"}, PLACES),
    "search rare": (lambda s: s.search(RunQuery(statuses=RARE)), BROADLY, OPEN_RUNS | PLACES),
    "search workflow": (lambda s: s.search(RunQuery(workflow="wf3")), {"edda_run_workflow"}, PLACES),
    "search id": (lambda s: s.search(RunQuery(id_prefix="run-0000")), {"sqlite_autoindex_edda_run_1"}, PLACES),
    "search parent": (lambda s: s.search(RunQuery(parent=RunId("run-000002"))), {"edda_run_parent"}, PLACES),
    "search text": (lambda s: s.search(RunQuery(text="x")), {"edda_run_created"}, PLACES),
    "count": (lambda s: s.count(RunQuery()), BROADLY | {"edda_result_ended"}, OPEN_RUNS | {"SCAN edda_result"}),
    "count workflow": (lambda s: s.count(RunQuery(workflow="wf3")), {"edda_run_workflow"}, OPEN_RUNS),
    "count text": (lambda s: s.count(RunQuery(text="x")), BROADLY, OPEN_RUNS),
    "generations": (lambda s: s.generations(R1), set(), set()),
    "find_events": (lambda s: s.find_events(EventQuery()), set(), set()),
    "find_events type": (lambda s: s.find_events(EventQuery(type="t1")), {"edda_event_by_type"}, set()),
    "find_events id": (lambda s: s.find_events(EventQuery(source="/shop", id="7")), {"edda_event_identity"}, set()),
    "find_events id alone": (
        lambda s: s.find_events(EventQuery(id="7")),
        {"edda_event_identity"},
        {"SCAN edda_event USING"},
    ),
    "find_events time": (
        lambda s: s.find_events(EventQuery(received_from=5, received_to=9)),
        {"edda_event_received"},
        set(),
    ),
    "event": (lambda s: s.event(7), set(), set()),
    "consumers": (lambda s: s.consumers(7, 10), {"edda_inbox_event"}, set()),
    "standing": (lambda s: s.list_waits(None, ("run-000007", "w"), 10), set(), set()),
    "crew": (lambda s: s.list_workers(), {"edda_open_run_owner"}, {"SCAN w"}),
    "backlog": (
        lambda s: s.backlog(),
        {"edda_open_run_ready", "edda_open_run_parked", "edda_outbox_pending", "edda_outbox_dead"},
        OPEN_RUNS | {"SCAN edda_outbox", "SCAN edda_staged_event"},
    ),
    "buckets": (
        lambda s: s.throughput(0, 10, 2),
        {"edda_run_created", "edda_run_followed", "edda_result_ended"},
        set(),
    ),
    "latency": (lambda s: s.latency(0, 10), {"edda_result_ended"}, set()),
    "forms": (lambda s: s.event_schemas("wf3"), set(), set()),
    "definitions": (lambda s: s.definitions(), set(), {"SCAN edda_definition"}),
    "pulse_mark": (lambda s: s.change_token(), set(), set()),
    "reopen": (lambda s: s.reopen(RunId("old-000001"), 0, 1), set(), {"SCAN h", "SCAN d"}),
    "resume": (lambda s: s.resume(R1), set(), set()),
    "delete": (lambda s: s.delete(RunId("old-000001")), set(), set()),
    "drop_outgoing": (lambda s: s.delete_outbox(["2"]), {"edda_outbox_dead"}, set()),
    "note": (lambda s: s.add_audit(Audit(1, "me", "cancel", "run-1")), set(), set()),
    "audits": (lambda s: s.audits(7, 10), set(), set()),
}


@pytest.fixture(scope="module")
def surveyed(seeded: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The plans of all of them, on one copy."""
    path = str(shutil.copy(seeded, tmp_path_factory.mktemp("surveyed") / "edda.db"))
    heard = asyncio.run(statements_of(path, {name: call for name, (call, _, _) in SURVEYS.items()}))
    db = sqlite3.connect(path)
    plans = {name: [plan for sql in statements for plan in explain(db, sql)] for name, statements in heard.items()}
    db.close()
    return plans


@pytest.mark.parametrize("name", SURVEYS)
def test_what_people_ask_reads_no_more_of_a_crowded_table_than_it_must(
    surveyed: dict[str, list[str]], name: str
) -> None:
    _, indexes, allowed = SURVEYS[name]
    plans = surveyed[name]
    few = (*allowed, "SCAN (subquery", "SCAN json_each", "SCAN CONSTANT ROW")
    assert not [p for p in plans if p.startswith("SCAN") and "VIRTUAL TABLE" not in p and not p.startswith(few)]
    assert not [p for p in plans if "AUTOMATIC" in p]
    assert {i for i in indexes if any(i in p for p in plans)} == indexes


async def test_pages_of_runs_come_from_the_index_however_far_back(crowded: str) -> None:
    storage = await opened(crowded)
    first = await storage.find(RunFilter(limit=3))
    second = await storage.find(RunFilter(limit=3, before=(first[-1].created_at, first[-1].run_id)))
    assert [r.run_id for r in (*first, *second)] == [f"run-{n:06d}" for n in range(100_000, 99_994, -1)]
    await storage.close()
