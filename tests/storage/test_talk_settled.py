"""An End that knows how far its inbox is read: a letter that comes in meanwhile is not lost with the run."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from edda.core.model import AckInbox, BatchResult, End, EndWatcher, RunId
from edda.core.states import RunStatus
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .records import born, bundle, child, done, entry, incoming, letter, wait
from .worker import Worker

R1, R2, R3 = RunId("run-1"), RunId("run-2"), RunId("run-3")
REFUSED = BatchResult(unmet={R1: frozenset()})


def settled(number: int, absorbed: int | None = None, watchers: int = 0) -> End:
    return replace(done(watchers=watchers), settled=number, absorbed=absorbed)


async def status(storage: Storage, run_id: RunId = R1) -> RunStatus:
    record = await storage.get(run_id)
    assert record is not None
    return record.status


async def test_a_run_that_has_read_everything_ends(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"))
    await storage.cancel(R2, b"stop")
    await worker.write(bundle("run-2", entry(1, n=1), move=AckInbox(1)))
    assert await worker.send(bundle("run-1", move=settled(0)), bundle("run-2", move=settled(1))) == BatchResult()
    assert [await status(storage, run) for run in (R1, R2)] == [RunStatus.COMPLETED] * 2


async def test_a_run_reads_its_last_letter_and_ends(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.cancel(R1, b"stop")
    assert await worker.send(bundle("run-1", entry(1, n=1), move=settled(1, absorbed=1))) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED


async def test_a_run_may_be_born_and_end_settled(storage: Storage, worker: Worker) -> None:
    assert await worker.send(born("run-1", entry(1), move=settled(0))) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED


async def test_an_end_without_it_does_not_look_at_the_inbox(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.cancel(R1, b"stop")
    assert await worker.send(bundle("run-1", move=done())) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED


async def test_a_letter_that_came_in_meanwhile_refuses_the_end(storage: Storage, worker: Worker) -> None:
    await worker.send(
        born("run-1", waits=[wait("run-1", step, "order", once=True) for step in ("a", "b")]),
        born("run-3"),
    )
    await storage.accept([incoming("e1", once=["order"])], {})
    await storage.accept([incoming("e2", once=["order"])], {})
    last = bundle(
        "run-1",
        entry(1, n=1),
        move=settled(1, absorbed=1),
        drops=["b"],
        children=[child("run-2", "run-1")],
        letters=[letter("run-3")],
    )
    assert await worker.send(last) == REFUSED
    assert await status(storage) is RunStatus.RUNNING
    assert set(await storage.owned_runs(worker.id)) == {R1, R3}
    assert await storage.history(R1) == (entry(1, n=1),)
    assert [(x.run_id, x.n, x.value) for x in await storage.read_inboxes(worker.id)] == [(R1, 2, b"e2")]
    assert [run.run_id for run in (await worker.claim()).runs] == [R2]
    again = bundle("run-1", entry(2, n=2), move=settled(2, absorbed=2), letters=[letter("run-3")])
    assert await worker.send(again) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED
    assert [(x.run_id, x.value) for x in await storage.read_inboxes(worker.id)] == [(R3, b"its end")]


async def test_a_refused_end_that_read_nothing_leaves_everything_unread(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.cancel(R1, b"stop")
    assert await worker.send(bundle("run-1", entry(1), move=settled(0))) == REFUSED
    assert [x.n for x in await storage.read_inboxes(worker.id)] == [1]


async def test_an_end_has_to_know_both_its_letters_and_its_watchers(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.add_watcher(R1, EndWatcher(R3, "w"))
    assert await worker.send(bundle("run-1", move=settled(0))) == REFUSED
    await storage.cancel(R1, b"stop")
    assert await worker.send(bundle("run-1", move=settled(0, watchers=1))) == REFUSED
    assert await worker.send(bundle("run-1", move=settled(1))) == REFUSED
    assert await worker.send(bundle("run-1", move=settled(1, watchers=1))) == BatchResult()
    assert await status(storage) is RunStatus.COMPLETED


async def test_one_batch_may_hold_ends_that_happen_and_ends_that_do_not(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(8)]
    await worker.write(*(born(run) for run in runs))
    for run in runs[::2]:
        await storage.cancel(RunId(run), b"stop")
    moves = [settled(0), settled(0), done(), done()] * 2
    written = await worker.send(*(bundle(run, move=move) for run, move in zip(runs, moves, strict=True)))
    assert written == BatchResult(unmet={RunId(run): frozenset() for run in ("run-0", "run-4")})
    assert set(await storage.owned_runs(worker.id)) == {"run-0", "run-4"}


async def test_no_letter_is_lost_between_an_acceptor_and_an_end(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    """Either the run has the message before it ends, or its wait went with it and the message is kept for others."""
    other = await make_storage()
    for turn in range(40):
        run, id = f"run-{turn}", f"e{turn:02}"
        await worker.send(born(run, waits=[wait(run, "w", "order", once=True)]))
        written, _ = await asyncio.gather(
            worker.send(bundle(run, move=settled(0))), other.accept([incoming(id, once=["order"])], {})
        )
        mail = [x.value for x in await storage.read_inboxes(worker.id)]
        if written == BatchResult():
            assert mail == []
            taker = f"taker-{turn}"
            await worker.send(born(taker, waits=[wait(taker, "w", "order", once=True)]))
            assert [x.value for x in await storage.read_inboxes(worker.id)] == [id.encode()]
            await worker.write(bundle(taker, move=done()))
        else:
            assert written == BatchResult(unmet={RunId(run): frozenset()})
            assert mail == [id.encode()]
            assert await worker.send(bundle(run, entry(1, n=1), move=settled(1, absorbed=1))) == BatchResult()
    assert await storage.owned_runs(worker.id) == {}
