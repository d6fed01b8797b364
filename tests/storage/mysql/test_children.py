"""Children, watchers, signals and generations on MariaDB and MySQL: the number of messages to the server, the locks,
and the rows that statements read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest
from msgspec.structs import replace

from edda.core.model import (
    AckInbox,
    BatchResult,
    EndWatcher,
    Fence,
    RunId,
    RunSignal,
    RunWrite,
    Start,
    Transition,
    WorkerId,
)
from edda.core.states import RunStatus
from edda.errors import StorageRejectedError
from edda.storage.mysql import MySQLStorage
from edda.storage.mysql.batch_sql import COUNT_EXISTING, FIND_EXISTING, READ_LAST_EVENT, LockedRun
from edda.storage.mysql.claims import READ_WATCHERS
from edda.storage.mysql.connection import BEGIN, COMMIT, MySQLSession
from edda.storage.mysql.decisions import BatchDecision
from edda.storage.mysql.journal import build_batch
from edda.storage.mysql.pruning import DELETE_GENERATIONS, DELETE_OF_RUNS, FIND_OLD_GENERATIONS
from edda.storage.mysql.runs import (
    COUNT_WATCHERS,
    INSERT_WATCHER,
    LOCK_WATCHED,
    NEWEST_FIRST,
    NEWEST_OF_ID,
    RECORDS,
    WATCHERS,
)
from edda.storage.mysql.statement import bind, join_values, quote_text
from tests.storage.probes import Listener
from tests.storage.records import (
    SUSPENDED,
    cancel_signal,
    child,
    done,
    end_signal,
    entry,
    new_run,
    next_generation,
    run_write,
    start,
)
from tests.storage.worker import Worker

from .locks import LOCK_RUN, connection_of, waiting
from .test_plans import OWNED_BY_SMALL, look, look_at
from .test_plans import SEEDS as OPEN_RUNS

T = TypeVar("T")

REFUSED = frozenset[str]()
WATCHER = EndWatcher(RunId("curious"), "child:1")


@pytest.fixture
async def elsewhere(url: str, storage: MySQLStorage) -> AsyncIterator[MySQLStorage]:
    """The storage of another process."""
    other = MySQLStorage(url, pool_size=1)
    await other.open()
    yield other
    await other.close()


@pytest.fixture
async def colleague(elsewhere: MySQLStorage) -> Worker:
    worker = Worker(elsewhere, "worker-2")
    await worker.register()
    return worker


async def numbers(storage: MySQLStorage, worker: Worker) -> list[tuple[RunId, int]]:
    return [(item.run_id, item.inbox_no) for item in await storage.read_inboxes(worker.id)]


# Messages


async def test_a_batch_takes_a_second_message_only_if_something_depends_on_what_is_found(
    storage: MySQLStorage, worker: Worker, listener: Listener
) -> None:
    await worker.write(*(new_run(run) for run in ("a", "b", "c", "d", "mother")))
    await storage.add_watcher(RunId("c"), WATCHER)

    async def messages(*batch: RunWrite) -> int:
        listener.heard.clear()
        written = await worker.send(*batch)
        assert written is not None
        assert not written.refused
        return len(listener.heard) // 2

    assert await messages(run_write("a", entry(1), transition=done())) == 1
    assert (
        await messages(
            run_write("mother", transition=AckInbox(0), children=[child("kid", "mother")], compensating=True)
        )
        == 1
    )
    assert await messages(new_run("e", transition=next_generation())) == 1
    assert await messages(run_write("b", transition=done(), signals=[end_signal("mother")])) == 2
    assert await messages(run_write("c", transition=done(watchers=1))) == 2
    assert await messages(run_write("d", transition=next_generation())) == 2


@pytest.mark.parametrize("signals", [[], [end_signal("other")]])
async def test_a_batch_that_hoped_in_vain_is_taken_back_and_written_with_care(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession, signals: list[RunSignal]
) -> None:
    await worker.write(new_run("run", entry(1)), new_run("other"), new_run("third"))
    await storage.add_watcher(RunId("run"), WATCHER)
    await storage.start([start("old")])
    ending = run_write(
        "run", entry(2), transition=done(), signals=signals, children=[child("old", "run"), child("new", "run")]
    )
    written = await worker.send(ending, run_write("third", entry(1), transition=SUSPENDED))
    assert written == BatchResult(refused={RunId("run"): REFUSED})
    assert [line.seq for line in await storage.history(RunId("run"))] == [1, 2]
    assert await storage.read_fence(worker.id) == worker.fence
    assert await numbers(storage, worker) == []
    assert {run.run_id: run.parent for run in (await worker.claim()).runs} == {"old": None, "new": "run"}
    assert await storage.owned_runs(worker.id) == {"run": 1, "other": 1, "old": 1, "new": 1}


async def test_a_lost_fence_is_told_whatever_the_batch_hopes_for(storage: MySQLStorage, worker: Worker) -> None:
    await worker.write(new_run("run"))
    late = Worker(storage, "worker-1")
    assert await late.send(run_write("run", transition=done(), children=[child("kid", "run")])) is None
    assert await storage.get(RunId("kid")) is None


# Packets


async def test_a_generation_larger_than_a_packet_is_refused_and_costs_no_connection(
    storage: MySQLStorage, worker: Worker
) -> None:
    await worker.write(new_run("run"))
    packet = (await storage._pool.run(b"SELECT @@max_allowed_packet")).rows[0][0]
    before = await connection_of(storage._journal)
    with pytest.raises(StorageRejectedError, match="max_allowed_packet"):
        await worker.send(run_write("run", entry(1), transition=replace(next_generation(), input=b"x" * packet)))
    assert await connection_of(storage._journal) == before
    assert await storage.history(RunId("run"), 0) == ()
    assert await worker.send(run_write("run", entry(1), transition=next_generation())) == BatchResult()


async def test_items_and_inputs_larger_than_a_packet_together_are_one_commit(
    storage: MySQLStorage, worker: Worker
) -> None:
    size = (await storage._pool.run(b"SELECT @@max_allowed_packet")).rows[0][0] // 3
    runs = [f"run{i}" for i in range(5)]
    await worker.write(new_run("mother"), *(new_run(run) for run in runs))
    large = replace(next_generation(), input=b"i" * size)
    batch = [
        run_write(run, transition=large, signals=[end_signal("mother", run.encode() + b"v" * size)]) for run in runs
    ]
    assert await worker.send(*batch) == BatchResult()
    item = await storage.read_inboxes(worker.id)
    assert [(m.inbox_no, m.value[:4], len(m.value)) for m in item] == [
        (n, run.encode(), size + 4) for n, run in enumerate(runs, 1)
    ]
    records = [await storage.get(RunId(run)) for run in runs]
    assert [(record.generation, record.input) for record in records if record] == [(1, large.input)] * 5


async def test_a_thousand_children_and_their_ends_fit_into_batches(storage: MySQLStorage, worker: Worker) -> None:
    kids = [f"kid{i:04}" for i in range(1000)]
    await worker.write(new_run("mother", children=[child(kid, "mother") for kid in kids]))
    assert len((await worker.claim(limit=1000)).runs) == 1000
    ends = [run_write(kid, entry(1), transition=done(), signals=[end_signal("mother", kid.encode())]) for kid in kids]
    assert await worker.send(*ends) == BatchResult()
    assert [m.value.decode() for m in await storage.read_inboxes(worker.id)] == kids
    assert await storage.owned_runs(worker.id) == {"mother": 1}


# Locks


async def test_an_end_sees_a_watcher_that_was_first(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("run"), new_run("mother"))
    watch = (bind(INSERT_WATCHER, WATCHER.run_id, WATCHER.step, "run"), bind(COUNT_WATCHERS, "run", "run"))
    await stranger.send(bind(BEGIN), bind(LOCK_WATCHED, "run"), *watch)
    ending = await waiting(stranger, storage._journal, worker.send(run_write("run", entry(1), transition=done())))
    await stranger.run(COMMIT)
    assert await ending == BatchResult(refused={RunId("run"): REFUSED})
    record = await storage.get(RunId("run"))
    assert record is not None
    assert record.status is RunStatus.RUNNING
    assert await storage.watchers(RunId("run")) == (WATCHER,)
    told = run_write("run", transition=done(watchers=1), signals=[end_signal("mother")])
    assert await worker.send(told) == BatchResult()
    assert await storage.watchers(RunId("run")) == ()


async def test_a_watcher_sees_an_end_that_was_first(
    storage: MySQLStorage, elsewhere: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("run"), new_run("run that is locked later"))
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "run that is locked later"))
    batch = [run_write("run", transition=done()), run_write("run that is locked later", transition=done())]
    ending = await waiting(stranger, storage._journal, worker.send(*batch))
    watching = await waiting(stranger, elsewhere._pool, elsewhere.add_watcher(RunId("run"), WATCHER))
    await stranger.run(COMMIT)
    assert await ending == BatchResult()
    record = await watching
    assert record is not None
    assert record.status is RunStatus.COMPLETED
    assert await storage.watchers(RunId("run")) == ()


async def test_a_watcher_that_asks_twice_at_once_counts_once(
    storage: MySQLStorage, elsewhere: MySQLStorage, worker: Worker
) -> None:
    await worker.write(*(new_run(f"run{i}") for i in range(20)))
    runs = [RunId(f"run{i}") for i in range(20)]
    await asyncio.gather(*(by.add_watcher(run, WATCHER) for run in runs for by in (storage, elsewhere)))
    assert await worker.send(*(run_write(run, transition=done(watchers=1)) for run in runs)) == BatchResult()


async def test_a_release_sees_a_item_that_was_first(
    storage: MySQLStorage, elsewhere: MySQLStorage, worker: Worker, colleague: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("run"))
    await colleague.write(new_run("sender"), new_run("z"))
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "z"))
    sent = run_write("sender", transition=done(), signals=[end_signal("run"), end_signal("z")])
    sending = await waiting(stranger, elsewhere._journal, colleague.send(sent))
    releasing = await waiting(stranger, storage._journal, worker.send(run_write("run", transition=SUSPENDED)))
    await stranger.run(COMMIT)
    assert await sending == BatchResult()
    assert await releasing == BatchResult(ready=frozenset({RunId("run")}))
    assert [(run.run_id, len(run.inbox)) for run in (await worker.claim()).runs] == [("run", 1)]


async def test_a_item_wakes_a_run_whose_release_was_first(
    storage: MySQLStorage, elsewhere: MySQLStorage, worker: Worker, colleague: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("run"), new_run("z"))
    await colleague.write(new_run("sender"))
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "z"))
    released = [run_write("run", transition=SUSPENDED), run_write("z", transition=SUSPENDED)]
    releasing = await waiting(stranger, storage._journal, worker.send(*released))
    sent = run_write("sender", transition=done(), signals=[end_signal("run")])
    sending = await waiting(stranger, elsewhere._journal, colleague.send(sent))
    await stranger.run(COMMIT)
    assert await releasing == BatchResult()
    assert await sending == BatchResult()
    assert [(run.run_id, len(run.inbox)) for run in (await worker.claim()).runs] == [("run", 1)]


async def test_of_a_item_with_a_cancel_and_a_cancel_at_once_one_goes_in(
    storage: MySQLStorage, elsewhere: MySQLStorage, worker: Worker, colleague: Worker
) -> None:
    runs = [f"run{i:02}" for i in range(20)]
    await worker.write(*(new_run(run) for run in runs))
    await colleague.write(new_run("sender"))
    signals = run_write("sender", transition=AckInbox(0), signals=[cancel_signal(run) for run in runs])
    await asyncio.gather(colleague.send(signals), *(storage.cancel(RunId(run), b"stop") for run in runs))
    assert await numbers(storage, worker) == [(run, 1) for run in runs]


async def test_batches_that_write_to_each_others_runs_do_not_deadlock(
    storage: MySQLStorage, worker: Worker, colleague: Worker
) -> None:
    mine, theirs = ([f"run{i:02}" for i in range(first, 20, 2)] for first in (0, 1))
    await worker.write(*(new_run(run) for run in mine))
    await colleague.write(*(new_run(run) for run in theirs))

    def batch(own: list[str], others: list[str], n: int) -> list[RunWrite]:
        pairs = zip(own, reversed(others), strict=True)
        return [run_write(run, entry(n), transition=AckInbox(0), signals=[end_signal(other)]) for run, other in pairs]

    for n in range(1, 26):  # a deadlock is a conflict, and raised
        await asyncio.gather(worker.send(*batch(mine, theirs, n)), colleague.send(*batch(theirs, mine, n)))
    for owner, runs in ((worker, mine), (colleague, theirs)):
        assert await numbers(storage, owner) == [(run, n) for run in runs for n in range(1, 26)]


async def test_a_item_waits_for_nobodys_run_but_the_one_it_is_for(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(*(new_run(run) for run in ("a", "b", "c", "theirs", "x", "y")))
    await storage.add_watcher(RunId("y"), WATCHER)
    await storage._journal.run(b"SET SESSION innodb_lock_wait_timeout = 1")
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "theirs"))
    batch = [
        run_write("a", transition=done(), signals=[end_signal("b"), cancel_signal("x")]),
        run_write("c", entry(1), transition=next_generation(), compensating=True),
        run_write("y", transition=done(watchers=1), children=[child("kid", "y")]),
    ]
    assert await worker.send(*batch) == BatchResult()
    await stranger.rollback()


async def test_a_child_that_somebody_else_is_starting_is_left_to_him(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("mother"))
    theirs = b"INSERT INTO edda_run (id, generation, workflow, input, created_at) VALUES ('kid', 0, 'refund', '', 1)"
    open_run = b"""INSERT INTO edda_open_run (run_id, workflow, status, epoch, generation, event_cursor, ready_at)
        VALUES ('kid', 'refund', 'running', 0, 0, 0, 1)"""
    await stranger.send(bind(BEGIN), bind(theirs), bind(open_run))
    kids = [child("kid", "mother"), child("other kid", "mother")]
    starting = await waiting(
        stranger, storage._journal, worker.send(run_write("mother", entry(1), transition=AckInbox(0), children=kids))
    )
    await stranger.run(COMMIT)
    assert await starting == BatchResult()
    assert len(await storage.history(RunId("mother"))) == 1
    claimed = (await worker.claim("checkout", "refund")).runs
    assert {(run.run_id, run.workflow, run.parent) for run in claimed} == {
        ("kid", "refund", None),
        ("other kid", "checkout", "mother"),
    }


async def test_a_generation_that_two_prune_at_once_is_counted_once(
    storage: MySQLStorage, elsewhere: MySQLStorage, worker: Worker
) -> None:
    runs = [f"run{i:02}" for i in range(20)]
    await worker.write(*(new_run(run, entry(1), transition=next_generation(at=100)) for run in runs))
    pruned = await asyncio.gather(*(by.prune_runs(1_000, 100) for by in (storage, elsewhere)))
    assert sum(pruned) == 20
    assert [await storage.history(RunId(run), 0) for run in runs] == [()] * 20


# Plans: 100,000 open runs, all watched, nearly all with an old generation, and one in its thousandth generation


SEEDS = (
    *OPEN_RUNS,
    "INSERT INTO edda_watcher SELECT run_id, 'curious', 'child:1' FROM edda_open_run",
    "UPDATE edda_open_run SET watchers = 1",
    "INSERT INTO edda_old_generation SELECT id, 0, created_at FROM edda_run WHERE id NOT LIKE '%35'",
    """INSERT INTO edda_run (id, generation, workflow, input, created_at)
    SELECT id, 1, workflow, '', created_at FROM edda_run WHERE id LIKE 'run00001%4_'""",
    """INSERT INTO edda_run (id, generation, workflow, input, created_at)
    SELECT 'tireless', created_at - 1, workflow, '', 1000000 + created_at FROM edda_run
        WHERE generation = 0 LIMIT 1000""",
    """INSERT INTO edda_history (run_id, generation, seq, epoch, kind, step, name, ok, at, attempt, input, value)
    SELECT id, generation, 1, 1, 'step', '1', 'pay', TRUE, 1, 1, '', '' FROM edda_run WHERE id LIKE 'run00001%4_'""",
    "ANALYZE TABLE edda_open_run, edda_run, edda_history, edda_watcher, edda_old_generation",
)
FOLLOWED = [f"run{10040 + i:08}" for i in range(10)]
SELECTED = [b"SELECT %b AS run_id, 0 AS generation" % quote_text(run) for run in FOLLOWED]


async def test_a_batch_with_children_items_and_generations_touches_the_runs_it_is_about(session: MySQLSession) -> None:
    transitions: list[Transition] = [next_generation(), done(watchers=1), AckInbox(0)]
    targets = [RunId(f"run{i * 10000 + 36:08}") for i in range(10)]
    batch = [
        run_write(
            run,
            transition=transitions[i % 3],
            compensating=True,
            children=[Start(RunId(f"kid{i}"), "workflow0", b"", 1)],
            signals=[end_signal(targets[i]), cancel_signal(targets[-i])],
        )
        for i, run in enumerate(OWNED_BY_SMALL)
    ]
    judgement = BatchDecision(batch, {run: LockedRun(0, 1, 0) for run in (*OWNED_BY_SMALL, *targets)}, [])
    statements = [*build_batch(Fence(WorkerId("busy0"), 0, 0), batch, 1_000_000), *judgement.statements(1_000_000)]
    touching = [s for s in statements if "edda_" in s.label and "edda_fence" not in s.label and "@edda" not in s.label]
    assert len({statement.label for statement in touching}) == 18
    await session.run(READ_LAST_EVENT)
    for seen in await look_at(session, *touching):
        assert seen.reads <= 100


@pytest.mark.parametrize("template", [FIND_EXISTING, COUNT_EXISTING.replace(b" INTO @edda_existing", b"")])
async def test_whether_children_exist_is_looked_up_one_by_one(session: MySQLSession, template: bytes) -> None:
    seen = await look(session, template, [*OWNED_BY_SMALL, "kid"])
    assert "ALL" not in seen.plan
    assert seen.reads <= 40


async def test_watching_touches_one_run(session: MySQLSession) -> None:
    run = OWNED_BY_SMALL[0]
    for template, values in (
        (LOCK_WATCHED, (run,)),
        (INSERT_WATCHER, ("another", "child:1", run)),
        (COUNT_WATCHERS, (run, run)),
        (RECORDS + NEWEST_OF_ID, (run, run)),
    ):
        assert (await look(session, template, *values)).reads <= 10


async def test_a_run_is_looked_up_without_its_older_generations(session: MySQLSession) -> None:
    seen = await look(session, RECORDS + NEWEST_OF_ID, "tireless", "tireless")
    assert seen.rows == 1
    assert seen.reads <= 10


async def test_a_page_of_runs_steps_over_older_generations(session: MySQLSession) -> None:
    seen = await look(session, RECORDS + NEWEST_FIRST, 10)
    assert seen.rows == 10
    assert seen.reads <= 1000 * 5


async def test_watchers_are_read_run_by_run(session: MySQLSession) -> None:
    assert (await look(session, WATCHERS, OWNED_BY_SMALL[0])).reads <= 2
    seen = await look(session, READ_WATCHERS, OWNED_BY_SMALL)
    assert seen.rows == 10
    assert seen.reads <= 30


async def test_old_generations_are_found_from_the_oldest_on_and_deleted_one_by_one(session: MySQLSession) -> None:
    seen = await look(session, FIND_OLD_GENERATIONS, 50_000, 10)
    assert seen.rows == 10
    assert "edda_old_generation_ended" in seen.plan
    assert seen.reads <= 40
    for template in (*DELETE_GENERATIONS, *DELETE_OF_RUNS):
        (deleted,) = await look_at(session, *join_values(template, SELECTED))
        assert deleted.reads <= 80


async def test_looking_for_old_generations_ends_where_the_young_ones_begin(session: MySQLSession) -> None:
    assert (await look(session, FIND_OLD_GENERATIONS, 0, 10)).reads <= 2
