"""Children, watchers and signals on PostgreSQL: a batch that waited for a lock has to read the row again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from edda.core.model import AckInbox, BatchResult, CancelOutcome, EndWatcher, EntryKind, RunId, Suspend
from edda.core.states import RunStatus
from edda.storage.ports import Storage
from edda.storage.postgres.runs import WATCH
from tests.conftest import MakeStorage, OnPostgres
from tests.storage.conftest import MakeWorker
from tests.storage.other_session import WAITING, Log, Outsider, become
from tests.storage.records import (
    LATER,
    SUSPENDED,
    cancel_signal,
    child,
    done,
    end_signal,
    entry,
    incoming,
    new_run,
    next_generation,
    run_write,
    start,
    wait,
)
from tests.storage.worker import Worker

T = TypeVar("T")

A, B = RunId("a"), RunId("b")
SOMEBODY = EndWatcher(B, "child:1")
ROUNDS = 20
MANY = 200

LOCK_A = "SELECT 1 FROM edda_open_run WHERE run_id = 'a' FOR UPDATE"
FREE_TO_LOCK_B = "SELECT 1 FROM edda_open_run WHERE run_id = 'b' FOR UPDATE NOWAIT"
INBOX = "SELECT inbox_no, kind, step, value FROM edda_inbox WHERE run_id = $1 ORDER BY inbox_no"


async def wait_for(outsider: Outsider, call: Awaitable[T], *changes: str) -> T:
    """Let the call wait for a run's row that another transaction has locked and then changes."""
    transaction = outsider.transaction()
    await transaction.start()
    await outsider.execute(LOCK_A)
    waiting = asyncio.ensure_future(call)
    await become(lambda: outsider.fetchval(WAITING))
    for change in changes:
        await outsider.execute(change)
    await transaction.commit()
    return await waiting


async def rows(outsider: Outsider, statement: str, *values: object) -> list[tuple[object, ...]]:
    return [tuple(row) for row in await outsider.fetch(statement, *values)]


async def inbox(outsider: Outsider, run_id: str) -> list[tuple[object, ...]]:
    return await rows(outsider, INBOX, run_id)


# Round trips


async def test_a_batch_with_everything_between_runs_is_one_statement(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.send(*(new_run(run) for run in "abcde"))
    await storage.add_watcher(A, SOMEBODY)
    del log.sent[:]
    written = await worker.send(
        run_write("a", transition=done(watchers=1), signals=[end_signal("d"), cancel_signal("e")]),
        run_write("b", entry(1), transition=next_generation(), compensating=True),
        run_write("c", transition=AckInbox(0), children=[child("f", "c")]),
        new_run("g", transition=next_generation(), signals=[end_signal("e")]),
    )
    assert written == BatchResult()
    assert len(log.sent) == 1


async def test_a_batch_with_waits_and_items_is_one_statement_between_its_locks_and_the_commit(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker, outsider: Outsider
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.send(*(new_run(run) for run in "abcd"))
    await storage.add_watcher(B, EndWatcher(RunId("d"), "child:1"))
    del log.sent[:]
    written = await worker.send(
        run_write("a", transition=SUSPENDED, waits=[wait("a", "w", "order")], signals=[end_signal("d", b"from a")]),
        run_write("b", transition=done(), signals=[end_signal("d", b"from b")]),
        run_write("c", transition=next_generation(), signals=[end_signal("d", b"from c")], children=[child("e", "c")]),
    )
    assert len(log.sent) == 3
    assert written == BatchResult(refused={B: frozenset()})
    assert [value for *_, value in await inbox(outsider, "d")] == [b"from a", b"from c"]


# Ends and watchers


async def test_an_end_sees_who_began_to_watch_while_it_waited(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a"), new_run("b"))
    written = await wait_for(
        outsider,
        worker.send(run_write("a", entry(1), transition=done(), signals=[end_signal("b")])),
        "INSERT INTO edda_watcher VALUES ('a', 'b', 'child:1')",
        "UPDATE edda_open_run SET watchers = 1 WHERE run_id = 'a'",
    )
    assert written == BatchResult(refused={A: frozenset()})
    assert await storage.owned_runs(worker.id) == {A: 1, B: 1}
    assert await outsider.fetchval("SELECT count(*) FROM edda_result") == 0
    assert await inbox(outsider, "b") == []
    assert await storage.history(A) == (entry(1),)


async def test_who_watches_sees_the_end_it_waited_for(storage: Storage, worker: Worker, outsider: Outsider) -> None:
    await worker.send(new_run("a"))
    record = await wait_for(
        outsider,
        storage.add_watcher(A, SOMEBODY),
        "DELETE FROM edda_open_run WHERE run_id = 'a'",
        "INSERT INTO edda_result VALUES ('a', 0, 'completed', 'result', 1)",
    )
    assert record is not None
    assert (record.status, record.value) == (RunStatus.COMPLETED, b"result")
    assert await storage.watchers(A) == ()


async def test_a_run_that_starts_while_it_is_asked_for_was_not_there(
    make_storage: MakeStorage, storage: Storage, database: OnPostgres
) -> None:
    """Otherwise a watcher would wait for a run that does not know of it."""

    class Meanwhile(Log):
        def after(self, statement: str) -> None:
            if statement == WATCH:
                database.execute("INSERT INTO edda_run VALUES ('a', 0, 'w', '', 1)")
                database.execute("INSERT INTO edda_open_run VALUES ('a', 'w', 'running', NULL, 0, 0, 0, 0)")

    early = await make_storage(Meanwhile())
    assert await early.add_watcher(A, SOMEBODY) is None
    assert await storage.get(A) is not None
    assert await storage.watchers(A) == ()


async def test_ends_and_watchers_at_once_always_see_each_other(
    make_storage: MakeStorage, storage: Storage, worker: Worker
) -> None:
    other = await make_storage()
    for number in range(ROUNDS):
        run = RunId(f"run-{number}")
        await worker.send(new_run(run))
        written, record = await asyncio.gather(
            worker.send(run_write(run, transition=done())), other.add_watcher(run, SOMEBODY)
        )
        assert written is not None
        assert record is not None
        assert (record.status is RunStatus.COMPLETED) == (run not in written.refused)
        assert bool(await storage.watchers(run)) == (run in written.refused)


# Signals


async def test_a_item_is_numbered_behind_those_it_waited_for(worker: Worker, outsider: Outsider) -> None:
    await worker.send(new_run("a"))
    await wait_for(
        outsider,
        worker.send(new_run("b", signals=[end_signal("a", b"one"), end_signal("a", b"two")])),
        "INSERT INTO edda_inbox VALUES ('a', 1, 'event', 'w', 1, 'event')",
        "UPDATE edda_open_run SET inbox_count = 1 WHERE run_id = 'a'",
    )
    assert [(n, value) for n, _, _, value in await inbox(outsider, "a")] == [(1, b"event"), (2, b"one"), (3, b"two")]
    assert await outsider.fetchval("SELECT inbox_count FROM edda_open_run WHERE run_id = 'a'") == 3


async def test_a_item_wakes_a_run_that_was_released_while_it_waited(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a"))
    await wait_for(
        outsider,
        worker.send(new_run("b", signals=[end_signal("a")])),
        "UPDATE edda_open_run SET owner = NULL, status = 'waiting_for_child', ready_at = 4000000000000000,"
        " reason = 'c'",
    )
    record = await storage.get(A)
    assert record is not None
    assert (record.owner, record.status, record.ready_at, record.reason) == (None, RunStatus.RUNNING, 0, None)


async def test_a_item_to_a_run_that_ends_while_it_waits_is_dropped(worker: Worker, outsider: Outsider) -> None:
    await worker.send(new_run("a"), new_run("b"))
    written = await wait_for(
        outsider,
        worker.send(run_write("b", transition=done(), signals=[end_signal("a"), cancel_signal("a")])),
        "DELETE FROM edda_open_run WHERE run_id = 'a'",
    )
    assert written == BatchResult()
    assert await inbox(outsider, "a") == []


async def test_a_item_cancels_no_run_that_was_cancelled_while_it_waited(worker: Worker, outsider: Outsider) -> None:
    await worker.send(new_run("a"))
    await wait_for(
        outsider,
        worker.send(new_run("b", signals=[cancel_signal("a", b"late"), end_signal("a")])),
        "INSERT INTO edda_inbox VALUES ('a', 1, 'cancel', '', 1, 'first')",
        "UPDATE edda_open_run SET inbox_count = 1, cancelled = true WHERE run_id = 'a'",
    )
    assert [(n, kind) for n, kind, *_ in await inbox(outsider, "a")] == [(1, "cancel"), (2, "child")]


async def test_a_item_that_its_end_holds_back_leaves_the_cancel_to_another(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a"), new_run("b"), new_run("c"))
    await storage.add_watcher(A, SOMEBODY)
    await worker.send(
        run_write("a", transition=done(), signals=[cancel_signal("c", b"from a")]),
        run_write("b", transition=done(), signals=[cancel_signal("c", b"from b")]),
    )
    assert await inbox(outsider, "c") == [(1, "cancel", "", b"from b")]


async def test_a_item_and_a_release_at_once_leave_a_run_with_its_inbox(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker, worker: Worker
) -> None:
    other = await make_worker("worker-2", on=await make_storage())
    resting = Suspend(0, LATER, RunStatus.WAITING_FOR_CHILD)
    for number in range(ROUNDS):
        run = f"run-{number}"
        await worker.send(new_run(run))
        await asyncio.gather(
            worker.send(run_write(run, transition=resting)),
            other.send(new_run(f"child-{number}", signals=[end_signal(run)])),
        )
        (claimed,) = (await worker.claim()).runs
        assert (claimed.run_id, [item.kind for item in claimed.inbox]) == (run, [EntryKind.CHILD])


async def test_a_item_with_a_cancel_and_a_cancel_at_once_are_one(
    make_storage: MakeStorage, storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    other = await make_storage()
    for number in range(ROUNDS):
        run = RunId(f"run-{number}")
        await worker.send(new_run(run))
        sending = worker.send(new_run(f"parent-{number}", signals=[cancel_signal(run, b"by letter")]))
        _, outcome = await asyncio.gather(sending, other.cancel(run, b"by hand"))
        expected = b"by hand" if outcome is CancelOutcome.REQUESTED else b"by letter"
        assert await inbox(outsider, run) == [(1, "cancel", "", expected)]


# The order of locks


async def test_runs_that_move_and_runs_that_are_told_are_locked_in_one_order(
    worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a"), new_run("b"))
    written = await wait_for(
        outsider, worker.send(run_write("b", transition=done(), signals=[end_signal("a")])), FREE_TO_LOCK_B
    )
    assert written == BatchResult()


async def test_batches_that_write_to_each_others_runs_do_not_deadlock(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker, worker: Worker
) -> None:
    other = await make_worker("worker-2", on=await make_storage())
    mine, theirs = [f"{n}-mine" for n in range(MANY)], [f"{n}-theirs" for n in range(MANY)]
    await worker.send(*map(new_run, mine))
    await other.send(*map(new_run, theirs))
    for _ in range(ROUNDS):
        await asyncio.gather(
            worker.send(
                *(
                    run_write(run, transition=AckInbox(0), signals=[end_signal(to)])
                    for run, to in zip(mine, theirs, strict=True)
                )
            ),
            other.send(
                *(
                    run_write(run, transition=AckInbox(0), signals=[end_signal(to)])
                    for run, to in zip(theirs, mine[::-1], strict=True)
                )
            ),
        )
    for owner in (worker, other):
        assert len(await storage.read_inboxes(owner.id)) == MANY * ROUNDS


async def test_children_are_started_before_any_run_is_locked(worker: Worker, outsider: Outsider) -> None:
    """Who starts a run under a chosen id has it first and locks runs later: events do so."""
    await worker.send(new_run("a"), new_run("b"))
    starting = outsider.transaction()
    await starting.start()
    await outsider.execute("INSERT INTO edda_run VALUES ('kid', 0, 'w', '', 1)")
    sending = asyncio.create_task(
        worker.send(
            run_write(
                "b", transition=AckInbox(0), children=[child("kid", "b"), child("new", "b")], signals=[end_signal("a")]
            )
        )
    )
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute(LOCK_A + " NOWAIT")
    await outsider.execute(FREE_TO_LOCK_B)
    await starting.commit()
    assert await sending == BatchResult()
    families = await rows(outsider, "SELECT id, parent FROM edda_run WHERE id IN ('kid', 'new') ORDER BY id")
    assert families == [("kid", None), ("new", "b")]
    assert await outsider.fetchval("SELECT count(*) FROM edda_open_run WHERE run_id = 'kid'") == 0


async def test_children_in_a_batch_with_waits_come_before_the_runs_too(worker: Worker, outsider: Outsider) -> None:
    await worker.send(new_run("b"))
    starting = outsider.transaction()
    await starting.start()
    await outsider.execute("INSERT INTO edda_run VALUES ('kid', 0, 'w', '', 1)")
    suspended = run_write("b", transition=SUSPENDED, waits=[wait("b", "w", "order")], children=[child("kid", "b")])
    sending = asyncio.create_task(worker.send(suspended))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute(FREE_TO_LOCK_B)
    await starting.commit()
    assert await sending == BatchResult()


# Generations


async def test_a_new_generation_sees_the_inbox_that_came_while_it_waited(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a"), new_run("b"))
    written = await wait_for(
        outsider,
        worker.send(run_write("a", entry(1), transition=next_generation(), signals=[end_signal("b")])),
        "INSERT INTO edda_inbox VALUES ('a', 1, 'event', 'w', 1, '')",
        "UPDATE edda_open_run SET inbox_count = 1 WHERE run_id = 'a'",
    )
    assert written == BatchResult(refused={A: frozenset()})
    assert await rows(outsider, "SELECT generation, inbox_count, inbox_read FROM edda_open_run WHERE run_id = 'a'") == [
        (0, 1, 0)
    ]
    assert await outsider.fetchval("SELECT max(generation) FROM edda_run WHERE id = 'a'") == 0
    assert await storage.history(A) == (entry(1),)
    assert await inbox(outsider, "b") == []


async def test_a_new_generation_keeps_a_watcher_who_came_while_it_waited(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a"))
    written = await wait_for(
        outsider,
        worker.send(run_write("a", transition=next_generation())),
        "INSERT INTO edda_watcher VALUES ('a', 'b', 'child:1')",
        "UPDATE edda_open_run SET watchers = 1 WHERE run_id = 'a'",
    )
    assert written == BatchResult()
    assert await rows(outsider, "SELECT generation, watchers FROM edda_open_run WHERE run_id = 'a'") == [(1, 1)]


async def test_an_event_starts_no_run_whose_first_generation_was_pruned(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a", transition=next_generation()))
    assert await storage.prune_runs(LATER, 100) == 1
    accepted = await storage.accept([incoming("e", starts=[start("a")])], {})
    assert accepted is not None
    assert not accepted.woke
    assert await rows(outsider, "SELECT generation FROM edda_run") == [(1,)]


async def test_generations_that_somebody_else_prunes_are_left_to_him(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a", transition=next_generation()), new_run("b", transition=next_generation()))
    async with outsider.transaction():
        await outsider.execute("SELECT 1 FROM edda_run WHERE id = 'a' AND generation = 0 FOR UPDATE")
        assert await storage.prune_runs(LATER, 100) == 1
    assert await storage.prune_runs(LATER, 100) == 1
    assert await storage.prune_runs(LATER, 100) == 0
