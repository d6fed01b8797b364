"""The very statements the SQLite storage sends, explained on 100,000 runs."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from edda.core.model import RunFilter, RunId, WorkerId
from edda.storage.sqlite import SQLiteStorage

from .probes import Listener
from .processes import opened
from .records import HOUR
from .worker import Worker

SEED = """
WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 100000)
INSERT INTO edda_sched (run_id, workflow, status, owner, epoch, gen, ready_at, delivered, absorbed)
SELECT printf('run-%06d', n), 'wf' || (n % 20), 'running', CASE WHEN n % 2 THEN 'w' || (n % 7) END, 1, 0,
       CASE WHEN n % 2 = 0 THEN n END, 0, 0 FROM i"""
SEED_RUNS = """
INSERT INTO edda_run (id, gen, workflow, input, created_at) SELECT run_id, 0, workflow, x'', epoch FROM edda_sched"""

CALLS: dict[str, tuple[Callable[[SQLiteStorage], Coroutine[Any, Any, object]], set[str]]] = {
    "claim": (lambda s: s.claim(WorkerId("here"), ["wf2", "wf4"], 10), {"edda_sched_ready"}),
    "next_due": (lambda s: s.next_due(["wf2", "wf4"]), {"edda_sched_ready"}),
    "unpark": (lambda s: s.unpark(["wf2", "wf4"]), {"edda_sched_parked"}),
    "mail": (lambda s: s.mail(WorkerId("w1")), {"edda_sched_mail"}),
    "owned": (lambda s: s.owned(WorkerId("w1")), {"edda_sched_owner"}),
    "take_over": (lambda s: s.take_over(WorkerId("other")), {"edda_sched_owner"}),
    "get": (lambda s: s.get(RunId("run-000001")), set()),
    "history": (lambda s: s.history(RunId("run-000001")), set()),
}


@pytest.fixture(scope="module", params=["fresh", "analyzed"])
def seeded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("seeded") / "edda.db")
    asyncio.run(close_after_migration(path))
    db = sqlite3.connect(path)
    with db:
        db.execute(SEED)
        db.execute(SEED_RUNS)
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
    # Workers are few. Lists of ids come as a virtual table.
    scans = [p for p in plans if p.startswith("SCAN") and "VIRTUAL TABLE" not in p and "edda_worker" not in p]
    assert not scans
    assert not [p for p in plans if "AUTOMATIC" in p]
    assert {i for i in indexes if any(i in p for p in plans)} == indexes


async def plans_of(path: str, call: Callable[[SQLiteStorage], Coroutine[Any, Any, object]]) -> list[str]:
    probe = Listener()
    storage = await opened(path, probe)
    await Worker(storage, "here").register(-HOUR)
    probe.heard.clear()
    await call(storage)
    statements = {sql for _, sql in probe.heard if sql not in {"BEGIN IMMEDIATE", "COMMIT"}}
    await storage.close()
    db = sqlite3.connect(path)
    plans = [plan for sql in statements for plan in explain(db, sql)]
    db.close()
    return plans


def explain(db: sqlite3.Connection, sql: str) -> list[str]:
    named = dict.fromkeys(("run_id", "now"))
    values = named if ":now" in sql else (None,) * (5 if "?5" in sql else 2 if "?2" in sql else sql.count("?"))
    return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", values)]


async def test_pages_of_runs_come_from_the_index_however_far_back(crowded: str) -> None:
    storage = await opened(crowded)
    first = await storage.find(RunFilter(limit=3))
    second = await storage.find(RunFilter(limit=3, before=(first[-1].created_at, first[-1].run_id)))
    assert [r.run_id for r in (*first, *second)] == [f"run-{n:06d}" for n in range(100_000, 99_994, -1)]
    await storage.close()
