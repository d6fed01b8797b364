"""The admin port: reopening ended runs, resuming, deleting, the audit, and definitions."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from edda.core.model import (
    AckInbox,
    BatchResult,
    ClaimedRun,
    End,
    EntryKind,
    OutboxState,
    Rejected,
    RunId,
    RunValue,
    Start,
    Suspend,
)
from edda.core.queries import Audit, Definition, EventSchema, ReopenOutcome, RunQuery
from edda.core.states import WAITING, RunStatus
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import Database, MakeStorage

from .records import (
    HOUR,
    LATER,
    SUSPENDED,
    WORKFLOW,
    child,
    done,
    ended,
    entry,
    incoming,
    new_run,
    next_generation,
    outbox_event,
    parked,
    run_write,
    start,
    wait,
)
from .shared_transactions import SQL_KINDS, record, step_record
from .test_queries_runs import HOSTILE
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")
FAILED = ended(RunStatus.FAILED)


async def claimed(worker: Worker) -> ClaimedRun:
    (run,) = (await worker.claim()).runs
    return run


# Reopening


async def test_a_reopened_run_is_claimed_with_exactly_the_history_that_was_kept(
    storage: Storage, worker: Worker
) -> None:
    await worker.write(new_run("run-1", *(entry(n, b"value %d" % n) for n in range(1, 6)), transition=FAILED))
    before = await storage.now()
    assert await storage.reopen(R1, 0, 3) is ReopenOutcome.DONE
    run = await claimed(worker)
    assert run.entries == tuple(entry(n, b"value %d" % n) for n in range(1, 4))
    assert (run.run_id, run.workflow, run.generation, run.input) == (R1, WORKFLOW, 1, b"input of run-1")
    assert (run.inbox_read, run.attempts, run.inbox, run.waits, run.watchers, run.step_commits) == (
        0,
        0,
        (),
        (),
        (),
        (),
    )
    assert before <= run.created_at <= await storage.now()


async def test_a_reopened_run_is_open_and_has_no_owner(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=FAILED))
    await storage.reopen(R1, 0, 1)
    run = await storage.get(R1)
    assert run is not None
    assert (run.generation, run.status, run.owner, run.ready_at) == (1, RunStatus.RUNNING, None, 0)
    assert (run.ended_at, run.value, run.reason) == (None, None, None)
    assert [generation.entries for generation in await storage.generations(R1)] == [1, 1]
    assert await storage.history(R1, 0) == (entry(1),)
    assert await storage.count(RunQuery()) == {RunStatus.RUNNING: 1}


async def test_all_or_nothing_of_the_history_may_be_kept(storage: Storage, worker: Worker) -> None:
    await worker.write(*(new_run(run, entry(1), entry(2), transition=FAILED) for run in ("run-1", "run-2")))
    await storage.reopen(R1, 0, 0)
    await storage.reopen(R2, 0, 100)
    assert [run.entries for run in (await worker.claim()).runs] == [(), (entry(1), entry(2))]


async def test_a_run_without_a_history_can_be_opened_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=FAILED))
    assert await storage.reopen(R1, 0, 5) is ReopenOutcome.DONE
    assert (await claimed(worker)).entries == ()


@pytest.mark.parametrize("status", [RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED])
async def test_however_it_ended_a_run_can_be_opened_again(storage: Storage, worker: Worker, status: RunStatus) -> None:
    await worker.write(new_run("run-1", transition=ended(status)))
    assert await storage.reopen(R1, 0, 0) is ReopenOutcome.DONE


async def test_a_run_that_is_open_or_unknown_is_not_opened_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1)))
    assert await storage.reopen(R1, 0, 1) is ReopenOutcome.OPEN
    assert await storage.reopen(R2, 0, 1) is ReopenOutcome.MISSING
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await storage.history(R1) == (entry(1),)


async def test_only_the_generation_that_ended_is_opened_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=next_generation()))
    await worker.write(run_write("run-1", entry(2), generation=1, transition=FAILED))
    for generation in (0, 2, -1):
        assert await storage.reopen(R1, generation, 1) is ReopenOutcome.OPEN
    assert await storage.reopen(R1, 1, 1) is ReopenOutcome.DONE
    run = await claimed(worker)
    assert (run.generation, run.input) == (2, b"input again")
    assert [line.kind for line in run.entries] == [EntryKind.RECUR]


async def test_a_reopened_run_ends_again_and_can_be_opened_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=FAILED))
    for generation in (1, 2, 3):
        assert await storage.reopen(R1, generation - 1, 1) is ReopenOutcome.DONE
        run = await claimed(worker)
        assert (
            await worker.write(run_write("run-1", entry(2), generation=generation, epoch=run.epoch, transition=FAILED))
            == frozenset()
        )
        record = await storage.get(R1)
        assert record is not None
        assert (record.generation, record.status) == (generation, RunStatus.FAILED)
    assert len(await storage.generations(R1)) == 4


async def test_the_epoch_of_a_reopened_run_is_higher_than_any_it_had(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1)))
    for epoch in range(2, 6):
        await storage.release_run(R1)
        worker.fence = replace(worker.fence, ownership_version=worker.fence.ownership_version + 1)
        assert (await claimed(worker)).epoch == epoch
    await worker.write(run_write("run-1", entry(2), epoch=5, transition=FAILED))
    await storage.reopen(R1, 0, 1)
    assert (await claimed(worker)).epoch > 5


async def test_a_reopened_run_has_its_parent_and_no_deadline(storage: Storage, worker: Worker) -> None:
    first = Start(R2, WORKFLOW, b"", 17, None, 99, R1, "child:1", 3)
    await worker.write(new_run("run-1", children=[first]))
    run = await claimed(worker)
    await worker.write(run_write("run-2", epoch=run.epoch, transition=FAILED))
    await storage.reopen(R2, 0, 0)
    run = await claimed(worker)
    assert (run.parent, run.parent_step, run.depth, run.deadline) == (R1, "child:1", 3, None)
    assert [found.run_id for found in await storage.search(RunQuery(parent=R1))] == [R2]


async def test_a_reopened_run_has_read_its_inbox(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    cancelled = replace(entry(1, n=1), kind=EntryKind.CANCEL)
    await worker.write(run_write("run-1", cancelled, transition=End(RunStatus.CANCELLED, b"", 9, inbox_read=1)))
    await storage.reopen(R1, 0, 0)
    run = await claimed(worker)
    assert (run.inbox, run.inbox_read) == ((), 1)
    await storage.cancel(R1, b"stop again")
    assert [(item.inbox_no, item.value) for item in await storage.read_inboxes(worker.id)] == [(2, b"stop again")]


async def test_items_that_were_pruned_leave_their_numbers(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1, n=1), entry(2, n=4), transition=FAILED))
    await storage.reopen(R1, 0, 1)
    assert (await claimed(worker)).inbox_read == 4


async def test_a_reopened_run_gets_again_what_it_does_not_remember(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w:1", "order")]))
    await storage.accept([incoming("e1", "order"), incoming("e2", "order")], {})
    (item,) = await storage.read_inboxes(worker.id)
    got = entry(1, n=1, event=item.event)
    await worker.write(run_write("run-1", got, transition=End(RunStatus.FAILED, b"", 9, inbox_read=1)))
    await storage.reopen(R1, 0, 0)
    run = await claimed(worker)
    asked = run_write(
        "run-1", generation=1, epoch=run.epoch, transition=AckInbox(1), waits=[wait("run-1", "w:1", "order")]
    )
    assert await worker.send(asked) == BatchResult(refused={R1: frozenset({"w:1"})})
    assert [(x.inbox_no, x.event, x.value) for x in await storage.read_inboxes(worker.id)] == [(2, item.event, b"e1")]


async def test_a_reopened_run_does_not_get_again_what_it_remembers(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w:1", "order")]))
    await storage.accept([incoming("e1", "order")], {})
    (item,) = await storage.read_inboxes(worker.id)
    got = entry(1, n=1, event=item.event)
    await worker.write(run_write("run-1", got, entry(2), transition=End(RunStatus.FAILED, b"", 9, inbox_read=1)))
    await storage.reopen(R1, 0, 1)
    run = await claimed(worker)
    rest = Suspend(1, None, RunStatus.WAITING_FOR_EVENT)
    asked = run_write("run-1", generation=1, epoch=run.epoch, transition=rest, waits=[wait("run-1", "w:2", "order")])
    assert await worker.send(asked) == BatchResult()


async def test_a_reopened_run_sees_events_since_its_first_start(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("before")], {})
    (seen,) = [await storage.last_event()]
    now = await storage.now()
    await storage.accept([incoming("after")], {})
    await worker.write(run_write("run-1", start=replace(start("run-1"), created_at=now), transition=FAILED))
    await storage.reopen(R1, 0, 0)
    assert (await claimed(worker)).event_cursor == seen


async def test_run_values_stay(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await worker.write(run_write("run-1", values=[RunValue("place", b"here")], transition=FAILED))
    await storage.reopen(R1, 0, 0)
    assert await storage.run_values(R1) == (RunValue("place", b"here"),)


async def test_a_step_that_was_done_in_the_old_generation_is_not_done_in_the_new(
    database: Database, storage: Storage, worker: Worker
) -> None:
    if database.kind not in SQL_KINDS:
        pytest.skip("there are no transactions of users in memory")
    await worker.write(new_run("run-1"))
    await record(storage, step_record("run-1", "pay:1"))
    await worker.write(run_write("run-1", transition=FAILED))
    await storage.reopen(R1, 0, 0)
    assert (await claimed(worker)).step_commits == ()
    assert await storage.find_step_commit(R1, 0, "pay:1") is None


async def test_of_two_who_open_it_at_once_one_wins(storage: Storage, make_storage: MakeStorage, worker: Worker) -> None:
    other = await make_storage()
    for number in range(10):
        run = RunId(f"run-{number}")
        await worker.write(new_run(run, entry(1), entry(2), transition=FAILED))
        outcomes = await asyncio.gather(storage.reopen(run, 0, 1), other.reopen(run, 0, 2))
        assert sorted(outcomes) == [ReopenOutcome.DONE, ReopenOutcome.OPEN]
        record = await storage.get(run)
        assert record is not None
        assert (record.generation, record.status) == (1, RunStatus.RUNNING)
        assert len(await storage.history(run)) == (1 if outcomes[0] is ReopenOutcome.DONE else 2)


async def test_a_run_that_is_pruned_meanwhile_is_opened_whole_or_not_at_all(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    for number in range(10):
        run = RunId(f"run-{number}")
        await worker.write(new_run(run, entry(1), transition=FAILED))
        outcome, pruned = await asyncio.gather(storage.reopen(run, 0, 1), other.prune_runs(HOUR, 100))
        record, history = await storage.get(run), await storage.history(run)
        if outcome is ReopenOutcome.DONE:
            assert record is not None
            assert (record.status, history) == (RunStatus.RUNNING, (entry(1),))
            assert pruned <= 1  # the generation before it at most
        else:
            assert (outcome, pruned, record, history) == (ReopenOutcome.MISSING, 1, None, ())


async def test_a_run_that_is_deleted_meanwhile_is_opened_whole_or_not_at_all(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    for number in range(10):
        run = RunId(f"run-{number}")
        await worker.write(new_run(run, entry(1), transition=FAILED))
        outcome, deleted = await asyncio.gather(storage.reopen(run, 0, 1), other.delete(run))
        assert deleted is (outcome is ReopenOutcome.MISSING)
        assert (await storage.get(run) is None) is deleted
        assert len(await storage.history(run)) == (0 if deleted else 1)


async def test_the_old_generation_of_a_reopened_run_is_pruned_in_its_time(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=FAILED))
    await storage.reopen(R1, 0, 1)
    assert await storage.prune_runs(await storage.now() - HOUR, 100) == 0
    assert await storage.prune_runs(await storage.now() + HOUR, 100) == 1
    assert [generation.generation for generation in await storage.generations(R1)] == [1]
    assert (await claimed(worker)).entries == (entry(1),)


# Resuming


async def test_a_parked_run_is_ready_at_once_when_it_is_resumed(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=parked()))
    assert await storage.resume(R1)
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.ready_at, run.reason) == (RunStatus.RUNNING, 0, None)
    assert (await claimed(worker)).entries == (entry(1),)


@pytest.mark.parametrize("status", [*sorted(WAITING), RunStatus.COMPENSATING])
async def test_a_run_that_waits_is_ready_at_once_when_it_is_resumed_and_keeps_its_waits(
    storage: Storage, worker: Worker, status: RunStatus
) -> None:
    await worker.write(
        new_run("run-1", entry(1), waits=[wait("run-1", "w", "order")], transition=Suspend(0, LATER, status, "order"))
    )
    assert await storage.resume(R1)
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.ready_at, run.reason) == (RunStatus.RUNNING, 0, None)
    assert [one.step for one in await storage.waits(R1)] == ["w"]
    assert (await claimed(worker)).entries == (entry(1),)
    assert not await storage.resume(R1), "it has an owner"


async def test_a_run_that_is_not_suspended_is_not_resumed(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("mine"), new_run("done", transition=done()))
    await storage.start([start("ready"), replace(start("delayed"), ready_at=LATER)])
    for run in ("mine", "done", "ready", "delayed", "nobody"):
        before = await storage.get(RunId(run))
        assert not await storage.resume(RunId(run))
        assert await storage.get(RunId(run)) == before


# Deleting


async def test_a_run_that_ended_is_deleted_with_everything_of_its(storage: Storage, worker: Worker) -> None:
    await worker.write(
        new_run("run-1", entry(1), waits=[wait("run-1", "w:1", "order")]), new_run("run-2", transition=done())
    )
    await storage.accept([incoming("e1", "order")], {})
    await worker.write(
        run_write("run-1", values=[RunValue("place", b"here")], transition=next_generation(inbox_read=1))
    )
    await worker.write(run_write("run-1", generation=1, transition=FAILED))
    assert await storage.delete(R1)
    assert await storage.get(R1) is None
    assert await storage.generations(R1) == ()
    assert (await storage.history(R1, 0), await storage.history(R1, 1)) == ((), ())
    assert await storage.run_values(R1) == ()
    assert await storage.consumers(await storage.last_event(), 10) == ()
    assert [run.run_id for run in await storage.search(RunQuery())] == [R2]
    assert not await storage.delete(R1)


async def test_the_id_of_a_deleted_run_is_free(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=done()))
    await storage.delete(R1)
    assert await storage.start([start("run-1")]) == {R1}
    assert (await claimed(worker)).entries == ()


async def test_a_run_that_is_open_is_not_deleted(storage: Storage, worker: Worker) -> None:
    await worker.write(
        new_run("mine", entry(1)), new_run("asleep", transition=SUSPENDED), new_run("parked", transition=parked())
    )
    for run in ("mine", "asleep", "parked", "nobody"):
        before = await storage.get(RunId(run))
        assert not await storage.delete(RunId(run))
        assert await storage.get(RunId(run)) == before
    assert await storage.history(RunId("mine")) == (entry(1),)


async def test_a_run_that_was_opened_again_is_not_deleted(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=FAILED))
    await storage.reopen(R1, 0, 1)
    assert not await storage.delete(R1)
    assert (await claimed(worker)).entries == (entry(1),)


async def test_a_child_outlives_its_deleted_parent(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", children=[child("run-2", "run-1")]))
    await worker.write(run_write("run-1", transition=done()))
    assert await storage.delete(R1)
    run = await storage.get(R2)
    assert run is not None
    assert run.parent == R1


# The outbox


async def test_only_dead_events_are_dropped(storage: Storage) -> None:
    await storage.enqueue([outbox_event("dead", "a"), outbox_event("pending", "b"), outbox_event("dead too", "c")])
    claims = {record.event.id: record for record in await storage.claim_outbox(10, HOUR)}
    await storage.record_send_results([Rejected(claims[id].seq, 1, "no") for id in ("dead", "dead too")])
    assert await storage.delete_outbox(["dead", "pending", "unknown", "%"]) == 1
    assert await storage.delete_outbox([]) == 0
    left = {record.event.id: record.state for record in await storage.find_outbox()}
    assert left == {"pending": OutboxState.PENDING, "dead too": OutboxState.DEAD}


# The audit


async def test_the_audit_lists_actions_newest_first(storage: Storage) -> None:
    assert await storage.audits(None, 10) == ()
    first = Audit(1_000, "ann", "cancel", "run-1", "127.0.0.1", "too slow")
    second = Audit(2_000, "bob", "delete", "run-2")
    await storage.add_audit(first)
    await storage.add_audit(second)
    newest, oldest = await storage.audits(None, 10)
    assert (replace(newest, seq=0), replace(oldest, seq=0)) == (second, first)
    assert newest.seq > oldest.seq > 0
    assert await storage.audits(newest.seq, 10) == (oldest,)
    assert await storage.audits(None, 1) == (newest,)
    assert await storage.audits(oldest.seq, 10) == ()


async def test_the_book_is_read_in_pages_while_it_grows(storage: Storage) -> None:
    for n in range(7):
        await storage.add_audit(Audit(n, "ann", "cancel", f"run-{n}"))
    seen: list[str] = []
    before: int | None = None
    while page := await storage.audits(before, 2):
        seen += [audit.subject for audit in page]
        await storage.add_audit(Audit(9, "ann", "cancel", "later"))
        before = page[-1].seq
    assert seen == [f"run-{n}" for n in reversed(range(7))]


@pytest.mark.parametrize("text", [*HOSTILE, "x" * 5_000])
async def test_the_book_keeps_any_text(storage: Storage, text: str) -> None:
    written = Audit(1, text[:200], text[:200], text[:200], text[:200], text)
    await storage.add_audit(written)
    (audit,) = await storage.audits(None, 10)
    assert replace(audit, seq=0) == written


async def test_the_book_refuses_what_no_database_takes(storage: Storage) -> None:
    with pytest.raises(StorageRejectedError):
        await storage.add_audit(Audit(1, "ann", "cancel", "a\0b"))
    assert await storage.audits(None, 10) == ()


# Definitions


def definition(workflow: str, details: bytes = b"{}", seen_at: int = 1) -> Definition:
    return Definition(workflow, "shop", details, seen_at)


async def test_without_code_nothing_is_defined(storage: Storage) -> None:
    assert await storage.definitions() == ()
    assert await storage.event_schemas(WORKFLOW) == ()
    await storage.save_definitions([], [])


async def test_definitions_are_stored_by_name(storage: Storage) -> None:
    two = EventSchema("two", "order.sent", b'{"b": 1}'), EventSchema("two", "order.paid", b'{"a": 1}')
    one = definition("one", b'{"doc": "\xc3\xa4"}', 7)
    await storage.save_definitions([definition("two"), one], [*two, EventSchema("one", "x", b"")])
    assert await storage.definitions() == (one, definition("two"))
    assert await storage.event_schemas("two") == (two[1], two[0])
    assert await storage.event_schemas("%") == ()


async def test_the_newest_word_counts(storage: Storage) -> None:
    await storage.save_definitions(
        [definition("one"), definition("two")],
        [EventSchema("one", "a", b"1"), EventSchema("one", "b", b"2"), EventSchema("two", "a", b"3")],
    )
    await storage.save_definitions([Definition("one", "store", b"new", 9)], [EventSchema("one", "b", b"new")])
    assert await storage.definitions() == (Definition("one", "store", b"new", 9), definition("two"))
    assert await storage.event_schemas("two") == (EventSchema("two", "a", b"3"),)


async def test_a_form_that_the_code_no_longer_has_stays_for_who_still_waits(storage: Storage) -> None:
    await storage.save_definitions([definition("one")], [EventSchema("one", "a", b"1"), EventSchema("one", "b", b"2")])
    await storage.save_definitions([definition("one")], [EventSchema("one", "b", b"new")])
    assert await storage.event_schemas("one") == (EventSchema("one", "a", b"1"), EventSchema("one", "b", b"new"))


async def test_processes_may_save_definitions_at_once(storage: Storage, make_storage: MakeStorage) -> None:
    other = await make_storage()
    workflows = [definition(f"w{n}") for n in range(20)]
    forms = [EventSchema(f"w{n}", "a", b"{}") for n in range(20)]
    await asyncio.gather(
        *(s.save_definitions(order, forms) for s in (storage, other) for order in (workflows, workflows[::-1]))
    )
    assert len(await storage.definitions()) == 20
    assert await storage.event_schemas("w7") == (forms[7],)


@pytest.mark.parametrize("text", HOSTILE)
async def test_a_workflow_may_have_any_name(storage: Storage, text: str) -> None:
    await storage.save_definitions([definition(text)], [EventSchema(text, text, b"{}")])
    assert await storage.definitions() == (definition(text),)
    assert await storage.event_schemas(text) == (EventSchema(text, text, b"{}"),)
