"""The problems that `edda doctor` finds in a database: each with its subject, its reason and its remedy."""

from __future__ import annotations

import pytest

from edda.cli.doctor import CheckResult, _check_database
from edda.core.model import OutboxEvent, Rejected, Suspend
from edda.core.states import RunStatus
from edda.storage.ports import Storage
from tests.conftest import MakeDatabase
from tests.engine.conftest import url_of
from tests.storage.records import LATER, new_run, run_write, start
from tests.storage.worker import Worker


async def check(url: str) -> dict[str, CheckResult]:
    return {result.subject: result for result in await _check_database(url)}


async def kill_dead_event(storage: Storage) -> None:
    await storage.enqueue([OutboxEvent("e-1", "key", "order.paid", "/shop", b"{}", 1)])
    (claimed,) = await storage.claim_outbox(10, 1_000_000)
    await storage.record_send_results([Rejected(claimed.seq, claimed.attempts, "400")])


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
async def test_work_without_a_worker_that_is_alive_is_found(kind: str, make_database: MakeDatabase) -> None:
    database = make_database(kind)
    storage = database.storage()
    await storage.open()
    await storage.migrate()
    try:
        worker = Worker(storage, "worker-1")
        await worker.register(3_600_000_000)
        await storage.start([start(f"run-{number}", workflow="order") for number in range(3)])
        assert len((await worker.claim("order")).runs) == 3
        assert (await check(url_of(database)))["workers"] == CheckResult("workers", "1 alive")
        await worker.beat(lease=-1_000_000)
        lost = (await check(url_of(database)))["workers"]
        assert (lost.ok, lost.words) == (False, "none alive; 3 runs are owned by a lost worker")
        assert lost.remedy.startswith("start a worker")
        await storage.remove_worker(worker.id)
        ready = (await check(url_of(database)))["workers"]
        assert (ready.ok, ready.words) == (False, "none alive; 3 runs are ready")
    finally:
        await storage.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
async def test_problems_that_need_an_operator_are_found(kind: str, make_database: MakeDatabase) -> None:
    database = make_database(kind)
    storage = database.storage()
    await storage.open()
    await storage.migrate()
    try:
        before = await check(url_of(database))
        subjects = ("workers", "parked runs", "process deaths", "dead events")
        assert [before[subject].ok for subject in subjects] == [True] * 4
        worker = Worker(storage, "worker-1")
        await worker.register(3_600_000_000)
        await worker.write(
            new_run("parked", transition=Suspend(0, LATER, RunStatus.PARKED, "NonDeterminismError: charge:1"))
        )
        await storage.start([start("suspect", workflow="order")])
        await storage.start([start("killer", workflow="order")])
        for name in ("a", "b"):
            mortal = Worker(storage, name)
            await mortal.register(3_600_000_000)
            assert len((await mortal.claim("order")).runs) == 2
            await storage.remove_worker(mortal.id, died=True)
        suspects = (await storage.claim_suspects(worker.id, ["order"], 10, False)).runs
        await worker.write(
            *(
                run_write(
                    run.run_id, epoch=run.epoch, transition=Suspend(0, None, RunStatus.PARKED, "ProcessDiedError")
                )
                for run in suspects
                if run.run_id == "killer"
            )
        )
        await storage.start([start("unclaimed", workflow="billing", ready_at=1_000)])
        await kill_dead_event(storage)
        found = await check(url_of(database))
        assert [found[subject].ok for subject in subjects] == [False] * 4
        assert all(found[subject].remedy for subject in subjects)
        assert "billing" in found["workers"].words
        assert "parked of checkout: NonDeterminismError: charge:1" in found["parked runs"].words
        assert found["process deaths"].words.startswith("2 open runs lost the process repeatedly, 1 of them parked: ")
        assert "suspect of order: 2 deaths" in found["process deaths"].words
        assert "killer of order: 2 deaths, parked" in found["process deaths"].words
        assert found["dead events"].words.startswith("1 ")
    finally:
        await storage.close()
