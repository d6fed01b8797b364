"""An End with `expected_inbox_count`: an item that arrives meanwhile is not lost with the run."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from edda.core.model import AckInbox, BatchResult, End, EndWatcher, RunId
from edda.core.states import RunStatus
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .records import child, done, end_signal, entry, incoming, new_run, run_write, wait
from .worker import Worker

R1, R2, R3 = RunId("run-1"), RunId("run-2"), RunId("run-3")
REFUSED = BatchResult(refused={R1: frozenset()})


def settled(number: int, inbox_read: int | None = None, watchers: int = 0) -> End:
    return replace(done(watchers=watchers), expected_inbox_count=number, inbox_read=inbox_read)


async def status(storage: Storage, run_id: RunId = R1) -> RunStatus:
    record = await storage.get(run_id)
    assert record is not None
    return record.status


async def test_a_run_that_has_read_everything_ends(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await storage.cancel(R2, b"stop")
    await worker.write(run_write("run-2", entry(1, n=1), transition=AckInbox(1)))
    assert (
        await worker.send(run_write("run-1", transition=settled(0)), run_write("run-2", transition=settled(1)))
        == BatchResult()
    )
    assert [await status(storage, run) for run in (R1, R2)] == [RunStatus.COMPLETED] * 2


async def test_a_run_reads_its_last_item_and_ends(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    assert await worker.send(run_write("run-1", entry(1, n=1), transition=settled(1, inbox_read=1))) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED


async def test_a_run_may_be_created_and_end_settled(storage: Storage, worker: Worker) -> None:
    assert await worker.send(new_run("run-1", entry(1), transition=settled(0))) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED


async def test_an_end_without_it_ignores_the_inbox(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    assert await worker.send(run_write("run-1", transition=done())) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED


async def test_a_item_that_came_in_meanwhile_refuses_the_end(storage: Storage, worker: Worker) -> None:
    await worker.send(
        new_run("run-1", waits=[wait("run-1", step, "order", exclusive=True) for step in ("a", "b")]),
        new_run("run-3"),
    )
    await storage.accept([incoming("e1", exclusive=["order"])], {})
    await storage.accept([incoming("e2", exclusive=["order"])], {})
    last = run_write(
        "run-1",
        entry(1, n=1),
        transition=settled(1, inbox_read=1),
        cancelled_waits=["b"],
        children=[child("run-2", "run-1")],
        signals=[end_signal("run-3")],
    )
    assert await worker.send(last) == REFUSED
    assert await status(storage) is RunStatus.RUNNING
    assert set(await storage.owned_runs(worker.id)) == {R1, R3}
    assert await storage.history(R1) == (entry(1, n=1),)
    assert [(x.run_id, x.inbox_no, x.value) for x in await storage.read_inboxes(worker.id)] == [(R1, 2, b"e2")]
    assert [run.run_id for run in (await worker.claim()).runs] == [R2]
    again = run_write("run-1", entry(2, n=2), transition=settled(2, inbox_read=2), signals=[end_signal("run-3")])
    assert await worker.send(again) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED
    assert [(x.run_id, x.value) for x in await storage.read_inboxes(worker.id)] == [(R3, b"its end")]


async def test_a_refused_end_that_read_nothing_leaves_everything_unread(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    assert await worker.send(run_write("run-1", entry(1), transition=settled(0))) == REFUSED
    assert [x.inbox_no for x in await storage.read_inboxes(worker.id)] == [1]


async def test_an_end_has_to_know_both_its_items_and_its_watchers(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.add_watcher(R1, EndWatcher(R3, "w"))
    assert await worker.send(run_write("run-1", transition=settled(0))) == REFUSED
    await storage.cancel(R1, b"stop")
    assert await worker.send(run_write("run-1", transition=settled(0, watchers=1))) == REFUSED
    assert await worker.send(run_write("run-1", transition=settled(1))) == REFUSED
    assert await worker.send(run_write("run-1", transition=settled(1, watchers=1))) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED


async def test_one_batch_may_hold_ends_that_happen_and_ends_that_do_not(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(8)]
    await worker.write(*(new_run(run) for run in runs))
    for run in runs[::2]:
        await storage.cancel(RunId(run), b"stop")
    transitions = [settled(0), settled(0), done(), done()] * 2
    written = await worker.send(
        *(run_write(run, transition=transition) for run, transition in zip(runs, transitions, strict=True))
    )
    assert written == BatchResult(refused={RunId(run): frozenset() for run in ("run-0", "run-4")})
    assert set(await storage.owned_runs(worker.id)) == {"run-0", "run-4"}


async def test_no_item_is_lost_between_an_acceptor_and_an_end(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    """The run has the message before it ends, or its wait is deleted with it and the message is stored for others."""
    other = await make_storage()
    for turn in range(40):
        run, id = f"run-{turn}", f"e{turn:02}"
        await worker.send(new_run(run, waits=[wait(run, "w", "order", exclusive=True)]))
        written, _ = await asyncio.gather(
            worker.send(run_write(run, transition=settled(0))), other.accept([incoming(id, exclusive=["order"])], {})
        )
        item = [x.value for x in await storage.read_inboxes(worker.id)]
        if written == BatchResult():
            assert item == []
            taker = f"taker-{turn}"
            await worker.send(new_run(taker, waits=[wait(taker, "w", "order", exclusive=True)]))
            assert [x.value for x in await storage.read_inboxes(worker.id)] == [id.encode()]
            await worker.write(run_write(taker, transition=done()))
        else:
            assert written == BatchResult(refused={RunId(run): frozenset()})
            assert item == [id.encode()]
            assert (
                await worker.send(run_write(run, entry(1, n=1), transition=settled(1, inbox_read=1))) == BatchResult()
            )
    assert await storage.owned_runs(worker.id) == {}
