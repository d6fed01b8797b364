"""Searching and counting runs."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from edda.core.model import RunId, RunRecord
from edda.core.queries import Generation, RunQuery
from edda.core.states import RunStatus
from edda.storage.memory.storage import MemoryStorage
from edda.storage.ports import Storage
from edda.storage.sqlite import search as sqlite_search
from tests.conftest import MakeDatabase

from .records import (
    LATER,
    WORKFLOW,
    child,
    done,
    ended,
    entry,
    new_run,
    next_generation,
    parked,
    run_write,
    start,
    suspended,
)
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")
HOSTILE = (
    "100%",
    "a_b",
    "it's",
    '"quoted"',
    "back\\slash",
    "[a-z]*?",
    "'; DROP TABLE edda_run; --",
    "<script>alert(1)</script>",
    "\N{GRINNING FACE} emoji",
    "\N{LATIN SMALL LETTER SHARP S}\N{GREEK SMALL LETTER OMEGA}",
    "tab\tand\nnewline",
)


async def found(storage: Storage, query: RunQuery) -> list[str]:
    return [run.run_id for run in await storage.search(query)]


def of(*statuses: RunStatus) -> RunQuery:
    return RunQuery(statuses=frozenset(statuses))


# Searching


async def test_an_empty_database_has_no_runs(storage: Storage) -> None:
    assert await storage.search(RunQuery()) == ()
    assert await storage.search(of(*RunStatus)) == ()
    assert await storage.count(RunQuery()) == {}
    assert await storage.generations(R1) == ()


async def test_search_returns_the_record_that_get_returns(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("open"), new_run("asleep", transition=suspended()), new_run("done", transition=done()))
    await storage.start([start("ready")])
    runs = await storage.search(RunQuery())
    assert [run.run_id for run in runs] == ["ready", "open", "done", "asleep"]
    assert list(runs) == [await storage.get(run.run_id) for run in runs]


async def test_runs_come_newest_first(storage: Storage) -> None:
    await storage.start([start("b", created_at=2), start("a", created_at=2), start("c", created_at=1)])
    assert await found(storage, RunQuery()) == ["b", "a", "c"]
    assert await found(storage, RunQuery(limit=2)) == ["b", "a"]


async def test_runs_are_searched_by_several_statuses(storage: Storage, worker: Worker) -> None:
    await storage.start([start("ready")])
    await worker.write(
        new_run("asleep", transition=suspended()),
        new_run("parked", transition=parked()),
        new_run("failed", transition=ended(RunStatus.FAILED)),
        new_run("cancelled", transition=ended(RunStatus.CANCELLED)),
        new_run("done", transition=done()),
    )
    assert await found(storage, of(RunStatus.FAILED)) == ["failed"]
    assert await found(storage, of(RunStatus.FAILED, RunStatus.PARKED)) == ["parked", "failed"]
    assert await found(storage, of(RunStatus.COMPLETED, RunStatus.RUNNING)) == ["ready", "done"]
    assert await found(storage, of(RunStatus.RECURRED, RunStatus.COMPENSATING)) == []
    assert await found(storage, of(RunStatus.WAITING_FOR_EVENT)) == ["asleep"]


async def test_a_run_has_the_status_that_is_shown(storage: Storage, worker: Worker) -> None:
    await worker.write(
        new_run("due", transition=replace(suspended(), ready_at=1)),
        new_run("due after parking", transition=parked(ready_at=1)),
        new_run("undoing", compensating=True),
    )
    assert await found(storage, of(RunStatus.RUNNING)) == ["due after parking", "due"]
    assert await found(storage, of(RunStatus.COMPENSATING)) == ["undoing"]
    assert await found(storage, of(RunStatus.WAITING_FOR_EVENT, RunStatus.PARKED)) == []
    assert await storage.count(RunQuery()) == {RunStatus.RUNNING: 2, RunStatus.COMPENSATING: 1}


async def test_runs_are_searched_by_workflow_and_time(storage: Storage) -> None:
    await storage.start([start(f"a{at}", created_at=at) for at in (10, 20, 30)])
    await storage.start([start(f"b{at}", created_at=at, workflow="other") for at in (10, 20, 30)])
    assert await found(storage, RunQuery(workflow="other")) == ["b30", "b20", "b10"]
    assert await found(storage, RunQuery(workflow="none")) == []
    assert await found(storage, RunQuery(created_from=20)) == ["b30", "a30", "b20", "a20"]
    assert await found(storage, RunQuery(created_to=20)) == ["b10", "a10"]
    assert await found(storage, RunQuery(workflow=WORKFLOW, created_from=20, created_to=30)) == ["a20"]


async def test_runs_are_searched_by_the_prefix_of_their_ids(storage: Storage) -> None:
    ids = ["order-1", "order-10", "order-2", "Order-1", "order", "orders", "x-order-1"]
    await storage.start([start(id) for id in ids])
    assert await found(storage, RunQuery(id_prefix="order-1")) == ["order-10", "order-1"]
    assert await found(storage, RunQuery(id_prefix="order-10")) == ["order-10"]
    assert await found(storage, RunQuery(id_prefix="order-3")) == []
    assert len(await found(storage, RunQuery(id_prefix=""))) == len(ids)


async def test_runs_are_searched_by_text_in_id_or_reason_without_regard_to_case(
    storage: Storage, worker: Worker
) -> None:
    await worker.write(
        new_run("Order-A", transition=suspended("Payment.Completed")),
        new_run("shipment", transition=suspended("order.PAID")),
        new_run("third", transition=suspended(None)),
        new_run("fourth", transition=done()),
    )
    assert await found(storage, RunQuery(text="ORDER")) == ["shipment", "Order-A"]
    assert await found(storage, RunQuery(text="payment.c")) == ["Order-A"]
    assert await found(storage, RunQuery(text="HIR")) == ["third"]
    assert await found(storage, RunQuery(text="nowhere")) == []


async def test_ids_of_older_runs_are_not_searched_for_text_but_found_by_the_whole_and_by_their_reasons(
    storage: Storage, worker: Worker
) -> None:
    ids = ["order-1", "order-2", "order-3", "order-4"]
    await storage.start([start(id, created_at=number) for number, id in enumerate(ids)])
    asleep_at_first = run_write(
        "asleep", start=start("asleep", created_at=0), transition=suspended("waits for order-9")
    )
    await worker.write(asleep_at_first)
    recent = RunQuery(ids_after=(1, RunId("order-2")))
    assert await found(storage, replace(recent, text="ORDER")) == ["order-4", "order-3", "asleep"]
    assert await found(storage, replace(recent, text="order-1")) == ["order-1"]
    assert await found(storage, replace(recent, text="order-3")) == ["order-3"]
    assert await storage.count(replace(recent, text="order")) == {
        RunStatus.RUNNING: 2,
        RunStatus.WAITING_FOR_EVENT: 1,
    }


async def test_the_horizon_is_the_first_run_that_is_not_among_the_newest(storage: Storage) -> None:
    await storage.start([start(f"a{at}", created_at=at) for at in range(5)])
    await storage.start([start(f"b{at}", workflow="other", created_at=at) for at in range(5)])
    assert await storage.scan_boundary(RunQuery(), 3) == (3, "a3")
    assert await storage.scan_boundary(RunQuery(workflow="other", created_to=4), 1) == (2, "b2")
    assert await storage.scan_boundary(RunQuery(created_from=3), 3) == (3, "a3")
    assert await storage.scan_boundary(RunQuery(), 10) is None


async def test_children_are_searched_by_their_parent(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", children=[child("c1", "run-1"), child("c2", "run-1")]))
    await worker.write(new_run("run-2", children=[child("c3", "run-2")]))
    assert await found(storage, RunQuery(parent=R1)) == ["c2", "c1"]
    assert await found(storage, RunQuery(parent=RunId("c1"))) == []
    assert await storage.count(RunQuery(parent=R1)) == {RunStatus.RUNNING: 2}


@pytest.mark.parametrize("text", HOSTILE)
async def test_signs_that_mean_something_to_a_database_mean_themselves(
    storage: Storage, worker: Worker, text: str
) -> None:
    await storage.start([start(f"{text} run"), start("axb 100 percent back slash"), start("plain")])
    await worker.write(
        new_run("because", transition=suspended(f"waits for {text}")), new_run("other", transition=suspended("a xb"))
    )
    assert set(await found(storage, RunQuery(text=text))) == {f"{text} run", "because"}
    assert await found(storage, RunQuery(id_prefix=text)) == [f"{text} run"]
    assert await found(storage, RunQuery(workflow=text)) == []
    assert await found(storage, RunQuery(parent=RunId(text))) == []
    assert await storage.count(RunQuery(text=text)) == {RunStatus.RUNNING: 1, RunStatus.WAITING_FOR_EVENT: 1}


async def test_a_search_text_may_be_very_long(storage: Storage) -> None:
    await storage.start([start("run-1")])
    long = "x%_" * 30_000
    for query in (RunQuery(text=long), RunQuery(id_prefix=long), RunQuery(workflow=long), RunQuery(parent=RunId(long))):
        assert await storage.search(query) == ()
        assert await storage.count(query) == {}


async def test_an_id_may_begin_with_the_last_of_all_signs(storage: Storage) -> None:
    last, before = "\U0010ffff", "\ud7ff"
    await storage.start([start(f"a{last}{last}"), start(f"a{before}b"), start("b"), start(last)])
    assert await found(storage, RunQuery(id_prefix=f"a{last}")) == [f"a{last}{last}"]
    assert await found(storage, RunQuery(id_prefix=f"a{before}")) == [f"a{before}b"]
    assert await found(storage, RunQuery(id_prefix=last)) == [last]


async def test_only_the_newest_generation_of_a_run_is_found(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=next_generation(at=5_000)))
    await storage.start([start("run-2", created_at=2_000)])
    (first, second) = await storage.search(RunQuery())
    assert (first.run_id, first.generation, first.created_at, second.run_id) == (R1, 1, 5_000, R2)
    assert await found(storage, RunQuery(created_to=2_000)) == []
    assert await storage.count(RunQuery(id_prefix="run-1")) == {RunStatus.RUNNING: 1}


async def test_generations_come_with_the_length_of_their_histories(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), entry(2), transition=next_generation(at=5_000)))
    await worker.write(run_write("run-1", entry(2), entry(3), generation=1))
    assert await storage.generations(R1) == (Generation(0, 1_000, 2), Generation(1, 5_000, 3))


# Pages


async def read_pages(storage: Storage, query: RunQuery) -> list[RunRecord]:
    pages: list[RunRecord] = []
    while page := await storage.search(query):
        pages.extend(page)
        query = replace(query, after=(page[-1].created_at, page[-1].run_id))
    return pages


async def test_pages_follow_each_other_though_many_began_at_once(storage: Storage) -> None:
    await storage.start([start(f"run-{number:02}", created_at=number // 4) for number in range(22)])
    pages = await read_pages(storage, RunQuery(limit=5))
    assert [run.run_id for run in pages] == [f"run-{number:02}" for number in reversed(range(22))]


async def test_pages_leave_nothing_out_while_runs_are_added(storage: Storage) -> None:
    await storage.start([start(f"run-{number:02}", created_at=number) for number in range(20)])
    seen: list[str] = []
    query = RunQuery(limit=4)
    while page := await storage.search(query):
        seen += [run.run_id for run in page]
        await storage.start([start(f"new-{len(seen)}", created_at=100 + len(seen))])
        query = replace(query, after=(page[-1].created_at, page[-1].run_id))
    assert seen == [f"run-{number:02}" for number in reversed(range(20))]


async def test_pages_go_together_with_every_filter(storage: Storage, worker: Worker) -> None:
    await worker.write(*(new_run(f"done-{n}", transition=done()) for n in range(6)))
    await worker.write(*(new_run(f"failed-{n}", transition=ended(RunStatus.FAILED)) for n in range(6)))
    await storage.start([start(f"open-{n}") for n in range(6)])
    query = RunQuery(
        statuses=frozenset({RunStatus.FAILED, RunStatus.RUNNING}), workflow=WORKFLOW, id_prefix="", text="E", limit=5
    )
    assert [run.run_id for run in await read_pages(storage, query)] == [
        *(f"open-{n}" for n in range(5, -1, -1)),
        *(f"failed-{n}" for n in range(5, -1, -1)),
    ]


# Counting


async def test_runs_are_counted_by_status(storage: Storage, worker: Worker) -> None:
    await worker.write(
        *(new_run(f"done-{n}", transition=done()) for n in range(3)),
        *(new_run(f"failed-{n}", transition=ended(RunStatus.FAILED)) for n in range(2)),
        new_run("asleep", transition=suspended()),
    )
    assert await storage.count(RunQuery()) == {
        RunStatus.COMPLETED: 3,
        RunStatus.FAILED: 2,
        RunStatus.WAITING_FOR_EVENT: 1,
    }
    assert await storage.count(of(RunStatus.FAILED, RunStatus.CANCELLED)) == {RunStatus.FAILED: 2}
    assert await storage.count(RunQuery(id_prefix="done-", text="1")) == {RunStatus.COMPLETED: 1}


async def test_page_and_size_of_a_page_do_not_matter_for_counting(storage: Storage) -> None:
    await storage.start([start(f"run-{n}", created_at=n) for n in range(5)])
    assert await storage.count(RunQuery(limit=1, after=(2, RunId("run-2")))) == {RunStatus.RUNNING: 5}


# Any query


STATUSES = [*RunStatus]


def random_query(dice: random.Random) -> RunQuery:
    def maybe(values: list[str]) -> str | None:
        return dice.choice(values) if dice.random() < 0.3 else None

    parent = maybe(["run-01", "run-02"])
    return RunQuery(
        statuses=frozenset(dice.sample(STATUSES, dice.choice([0, 0, 1, 2, 4]))),
        workflow=maybe(["one", "two", "none"]),
        id_prefix=maybe(["r", "run-1", "run-10", "x"]),
        text=maybe(["RUN-0", "paid", "7", "run-04"]),
        ids_after=dice.choice([None, None, (7, RunId("run-22")), (3, RunId("run-99"))]),
        created_from=dice.choice([None, None, 5]),
        created_to=dice.choice([None, None, 12]),
        parent=None if parent is None else RunId(parent),
        after=dice.choice([None, None, (7, RunId("run-15"))]),
        limit=dice.choice([1, 3, 50]),
    )


async def fill(storage: Storage) -> None:
    dice = random.Random(7)
    worker = Worker(storage, "worker-1")
    await worker.register()
    transitions = [
        suspended(),
        suspended("timer", RunStatus.WAITING_FOR_TIMER),
        replace(suspended(), ready_at=LATER),
        parked(),
        done(),
        done(),
        ended(RunStatus.FAILED),
        ended(RunStatus.CANCELLED),
        next_generation(at=9),
        None,
    ]
    for number in range(40):
        first = start(f"run-{number:02}", workflow=dice.choice(["one", "two"]), created_at=number // 3)
        parent = RunId(f"run-{number % 3:02}") if number > 20 else None
        await worker.write(
            run_write(first.run_id, start=replace(first, parent=parent), transition=dice.choice(transitions))
        )


async def compare(storage: Storage, seed: int) -> None:
    model = MemoryStorage()
    await model.open()
    await fill(model)
    await fill(storage)
    dice = random.Random(seed)
    for _ in range(100):
        query = random_query(dice)
        assert await storage.search(query) == await model.search(query), query
        assert await storage.count(query) == await model.count(query), query
        assert await storage.scan_boundary(query, 7) == await model.scan_boundary(query, 7), query
    await model.close()


async def test_any_query_finds_what_the_model_finds(storage: Storage) -> None:
    await compare(storage, seed=1)


@pytest.mark.parametrize(("few", "newest"), [(1, 2), (1, 100), (5, 3)])
@pytest.mark.databases("sqlite")
async def test_every_way_of_searching_leads_to_the_same_runs(
    make_database: MakeDatabase, monkeypatch: pytest.MonkeyPatch, few: int, newest: int
) -> None:
    """SQLite chooses other indexes when there are many rows."""
    monkeypatch.setattr(sqlite_search, "SCAN_LIMIT", few)
    monkeypatch.setattr(sqlite_search, "RECENT_LIMIT", newest)
    storage = make_database("sqlite").storage()
    await storage.open()
    await storage.migrate()
    await compare(storage, seed=few + newest)
    await storage.close()
