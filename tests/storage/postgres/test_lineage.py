"""What only PostgreSQL can get wrong between runs: a batch that waited for a lock has to see what it waited for."""

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
from tests.storage.outsider import WAITING, Log, Outsider, become
from tests.storage.records import (
    ASLEEP,
    LATER,
    again,
    born,
    bundle,
    child,
    done,
    entry,
    incoming,
    letter,
    start,
    stop,
    wait,
)
from tests.storage.worker import Worker

T = TypeVar("T")

A, B = RunId("a"), RunId("b")
SOMEBODY = EndWatcher(B, "child:1")
ROUNDS = 20
MANY = 200

LOCK_A = "SELECT 1 FROM edda_sched WHERE run_id = 'a' FOR UPDATE"
FREE_TO_LOCK_B = "SELECT 1 FROM edda_sched WHERE run_id = 'b' FOR UPDATE NOWAIT"
INBOX = "SELECT n, kind, step, value FROM edda_delivery WHERE run_id = $1 ORDER BY n"


async def wait_for(outsider: Outsider, call: Awaitable[T], *changes: str) -> T:
    """Have the call wait for the run that somebody else has in hand, who changes it then."""
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
    await worker.send(*(born(run) for run in "abcde"))
    await storage.add_watcher(A, SOMEBODY)
    del log.sent[:]
    written = await worker.send(
        bundle("a", move=done(watchers=1), letters=[letter("d"), stop("e")]),
        bundle("b", entry(1), move=again(), undoing=True),
        bundle("c", move=AckInbox(0), children=[child("f", "c")]),
        born("g", move=again(), letters=[letter("e")]),
    )
    assert written == BatchResult()
    assert len(log.sent) == 1


async def test_a_batch_with_waits_and_letters_is_one_statement_between_its_locks_and_the_commit(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker, outsider: Outsider
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.send(*(born(run) for run in "abcd"))
    await storage.add_watcher(B, EndWatcher(RunId("d"), "child:1"))
    del log.sent[:]
    written = await worker.send(
        bundle("a", move=ASLEEP, waits=[wait("a", "w", "order")], letters=[letter("d", b"from a")]),
        bundle("b", move=done(), letters=[letter("d", b"from b")]),
        bundle("c", move=again(), letters=[letter("d", b"from c")], children=[child("e", "c")]),
    )
    assert len(log.sent) == 3
    assert written == BatchResult(unmet={B: frozenset()})
    assert [value for *_, value in await inbox(outsider, "d")] == [b"from a", b"from c"]


# Ends and watchers


async def test_an_end_sees_who_began_to_watch_while_it_waited(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(born("a"), born("b"))
    written = await wait_for(
        outsider,
        worker.send(bundle("a", entry(1), move=done(), letters=[letter("b")])),
        "INSERT INTO edda_watcher VALUES ('a', 'b', 'child:1')",
        "UPDATE edda_sched SET watchers = 1 WHERE run_id = 'a'",
    )
    assert written == BatchResult(unmet={A: frozenset()})
    assert await storage.owned_runs(worker.id) == {A: 1, B: 1}
    assert await outsider.fetchval("SELECT count(*) FROM edda_result") == 0
    assert await inbox(outsider, "b") == []
    assert await storage.history(A) == (entry(1),)


async def test_who_watches_sees_the_end_it_waited_for(storage: Storage, worker: Worker, outsider: Outsider) -> None:
    await worker.send(born("a"))
    record = await wait_for(
        outsider,
        storage.add_watcher(A, SOMEBODY),
        "DELETE FROM edda_sched WHERE run_id = 'a'",
        "INSERT INTO edda_result VALUES ('a', 0, 'completed', 'result', 1)",
    )
    assert record is not None
    assert (record.status, record.value) == (RunStatus.COMPLETED, b"result")
    assert await storage.watchers(A) == ()


async def test_a_run_that_starts_while_it_is_asked_for_was_not_there(
    make_storage: MakeStorage, storage: Storage, database: OnPostgres
) -> None:
    """Else somebody would wait for the end of a run that knows nothing of it."""

    class Meanwhile(Log):
        def after(self, statement: str) -> None:
            if statement == WATCH:
                database.execute("INSERT INTO edda_run VALUES ('a', 0, 'w', '', 1)")
                database.execute("INSERT INTO edda_sched VALUES ('a', 'w', 'running', NULL, 0, 0, 0, 0)")

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
        await worker.send(born(run))
        written, record = await asyncio.gather(worker.send(bundle(run, move=done())), other.add_watcher(run, SOMEBODY))
        assert written is not None
        assert record is not None
        assert (record.status is RunStatus.COMPLETED) == (run not in written.unmet)
        assert bool(await storage.watchers(run)) == (run in written.unmet)


# Letters


async def test_a_letter_is_numbered_behind_those_it_waited_for(worker: Worker, outsider: Outsider) -> None:
    await worker.send(born("a"))
    await wait_for(
        outsider,
        worker.send(born("b", letters=[letter("a", b"one"), letter("a", b"two")])),
        "INSERT INTO edda_delivery VALUES ('a', 1, 'event', 'w', 1, 'event')",
        "UPDATE edda_sched SET delivered = 1 WHERE run_id = 'a'",
    )
    assert [(n, value) for n, _, _, value in await inbox(outsider, "a")] == [(1, b"event"), (2, b"one"), (3, b"two")]
    assert await outsider.fetchval("SELECT delivered FROM edda_sched WHERE run_id = 'a'") == 3


async def test_a_letter_wakes_a_run_that_was_released_while_it_waited(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(born("a"))
    await wait_for(
        outsider,
        worker.send(born("b", letters=[letter("a")])),
        "UPDATE edda_sched SET owner = NULL, status = 'waiting_for_child', ready_at = 4000000000000000, reason = 'c'",
    )
    record = await storage.get(A)
    assert record is not None
    assert (record.owner, record.status, record.ready_at, record.reason) == (None, RunStatus.RUNNING, 0, None)


async def test_a_letter_to_a_run_that_ends_while_it_waits_is_dropped(worker: Worker, outsider: Outsider) -> None:
    await worker.send(born("a"), born("b"))
    written = await wait_for(
        outsider,
        worker.send(bundle("b", move=done(), letters=[letter("a"), stop("a")])),
        "DELETE FROM edda_sched WHERE run_id = 'a'",
    )
    assert written == BatchResult()
    assert await inbox(outsider, "a") == []


async def test_a_letter_cancels_no_run_that_was_cancelled_while_it_waited(worker: Worker, outsider: Outsider) -> None:
    await worker.send(born("a"))
    await wait_for(
        outsider,
        worker.send(born("b", letters=[stop("a", b"late"), letter("a")])),
        "INSERT INTO edda_delivery VALUES ('a', 1, 'cancel', '', 1, 'first')",
        "UPDATE edda_sched SET delivered = 1, cancelled = true WHERE run_id = 'a'",
    )
    assert [(n, kind) for n, kind, *_ in await inbox(outsider, "a")] == [(1, "cancel"), (2, "child")]


async def test_a_letter_that_its_end_holds_back_leaves_the_cancel_to_another(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(born("a"), born("b"), born("c"))
    await storage.add_watcher(A, SOMEBODY)
    await worker.send(
        bundle("a", move=done(), letters=[stop("c", b"from a")]),
        bundle("b", move=done(), letters=[stop("c", b"from b")]),
    )
    assert await inbox(outsider, "c") == [(1, "cancel", "", b"from b")]


async def test_a_letter_and_a_release_at_once_leave_a_run_with_its_mail(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker, worker: Worker
) -> None:
    other = await make_worker("worker-2", on=await make_storage())
    resting = Suspend(0, LATER, RunStatus.WAITING_FOR_CHILD)
    for number in range(ROUNDS):
        run = f"run-{number}"
        await worker.send(born(run))
        await asyncio.gather(
            worker.send(bundle(run, move=resting)), other.send(born(f"child-{number}", letters=[letter(run)]))
        )
        (claimed,) = (await worker.claim()).runs
        assert (claimed.run_id, [letter.kind for letter in claimed.mail]) == (run, [EntryKind.CHILD])


async def test_a_letter_with_a_cancel_and_a_cancel_at_once_are_one(
    make_storage: MakeStorage, storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    other = await make_storage()
    for number in range(ROUNDS):
        run = RunId(f"run-{number}")
        await worker.send(born(run))
        sending = worker.send(born(f"parent-{number}", letters=[stop(run, b"by letter")]))
        _, outcome = await asyncio.gather(sending, other.cancel(run, b"by hand"))
        expected = b"by hand" if outcome is CancelOutcome.REQUESTED else b"by letter"
        assert await inbox(outsider, run) == [(1, "cancel", "", expected)]


# The order of locks


async def test_runs_that_move_and_runs_that_are_told_are_locked_in_one_order(
    worker: Worker, outsider: Outsider
) -> None:
    await worker.send(born("a"), born("b"))
    written = await wait_for(outsider, worker.send(bundle("b", move=done(), letters=[letter("a")])), FREE_TO_LOCK_B)
    assert written == BatchResult()


async def test_batches_that_write_to_each_others_runs_do_not_deadlock(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker, worker: Worker
) -> None:
    other = await make_worker("worker-2", on=await make_storage())
    mine, theirs = [f"{n}-mine" for n in range(MANY)], [f"{n}-theirs" for n in range(MANY)]
    await worker.send(*map(born, mine))
    await other.send(*map(born, theirs))
    for _ in range(ROUNDS):
        await asyncio.gather(
            worker.send(
                *(bundle(run, move=AckInbox(0), letters=[letter(to)]) for run, to in zip(mine, theirs, strict=True))
            ),
            other.send(
                *(
                    bundle(run, move=AckInbox(0), letters=[letter(to)])
                    for run, to in zip(theirs, mine[::-1], strict=True)
                )
            ),
        )
    for owner in (worker, other):
        assert len(await storage.read_inboxes(owner.id)) == MANY * ROUNDS


async def test_children_are_started_before_any_run_is_locked(worker: Worker, outsider: Outsider) -> None:
    """Who starts a run under a chosen id has it first and locks runs later: events do so."""
    await worker.send(born("a"), born("b"))
    starting = outsider.transaction()
    await starting.start()
    await outsider.execute("INSERT INTO edda_run VALUES ('kid', 0, 'w', '', 1)")
    sending = asyncio.create_task(
        worker.send(
            bundle("b", move=AckInbox(0), children=[child("kid", "b"), child("new", "b")], letters=[letter("a")])
        )
    )
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute(LOCK_A + " NOWAIT")
    await outsider.execute(FREE_TO_LOCK_B)
    await starting.commit()
    assert await sending == BatchResult()
    families = await rows(outsider, "SELECT id, parent FROM edda_run WHERE id IN ('kid', 'new') ORDER BY id")
    assert families == [("kid", None), ("new", "b")]
    assert await outsider.fetchval("SELECT count(*) FROM edda_sched WHERE run_id = 'kid'") == 0


async def test_children_in_a_batch_with_waits_come_before_the_runs_too(worker: Worker, outsider: Outsider) -> None:
    await worker.send(born("b"))
    starting = outsider.transaction()
    await starting.start()
    await outsider.execute("INSERT INTO edda_run VALUES ('kid', 0, 'w', '', 1)")
    asleep = bundle("b", move=ASLEEP, waits=[wait("b", "w", "order")], children=[child("kid", "b")])
    sending = asyncio.create_task(worker.send(asleep))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute(FREE_TO_LOCK_B)
    await starting.commit()
    assert await sending == BatchResult()


# Generations


async def test_a_new_generation_sees_the_mail_that_came_while_it_waited(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(born("a"), born("b"))
    written = await wait_for(
        outsider,
        worker.send(bundle("a", entry(1), move=again(), letters=[letter("b")])),
        "INSERT INTO edda_delivery VALUES ('a', 1, 'event', 'w', 1, '')",
        "UPDATE edda_sched SET delivered = 1 WHERE run_id = 'a'",
    )
    assert written == BatchResult(unmet={A: frozenset()})
    assert await rows(outsider, "SELECT gen, delivered, absorbed FROM edda_sched WHERE run_id = 'a'") == [(0, 1, 0)]
    assert await outsider.fetchval("SELECT max(gen) FROM edda_run WHERE id = 'a'") == 0
    assert await storage.history(A) == (entry(1),)
    assert await inbox(outsider, "b") == []


async def test_a_new_generation_keeps_a_watcher_who_came_while_it_waited(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(born("a"))
    written = await wait_for(
        outsider,
        worker.send(bundle("a", move=again())),
        "INSERT INTO edda_watcher VALUES ('a', 'b', 'child:1')",
        "UPDATE edda_sched SET watchers = 1 WHERE run_id = 'a'",
    )
    assert written == BatchResult()
    assert await rows(outsider, "SELECT gen, watchers FROM edda_sched WHERE run_id = 'a'") == [(1, 1)]


async def test_an_event_starts_no_run_whose_first_generation_was_pruned(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(born("a", move=again()))
    assert await storage.prune_runs(LATER, 100) == 1
    accepted = await storage.accept([incoming("e", starts=[start("a")])], {})
    assert accepted is not None
    assert not accepted.woke
    assert await rows(outsider, "SELECT gen FROM edda_run") == [(1,)]


async def test_generations_that_somebody_else_prunes_are_left_to_him(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(born("a", move=again()), born("b", move=again()))
    async with outsider.transaction():
        await outsider.execute("SELECT 1 FROM edda_run WHERE id = 'a' AND gen = 0 FOR UPDATE")
        assert await storage.prune_runs(LATER, 100) == 1
    assert await storage.prune_runs(LATER, 100) == 1
    assert await storage.prune_runs(LATER, 100) == 0
