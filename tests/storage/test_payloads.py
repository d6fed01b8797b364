"""Stored values are read unchanged: every byte of a payload, every character of a name, every time."""

from __future__ import annotations

import pytest

from edda.core.model import End, Entry, EntryKind, RunFilter, RunId, Start, Suspend
from edda.core.states import RunStatus
from edda.storage.ports import Storage

from .records import WORKFLOW, entry, new_run, run_write, start
from .worker import Worker

R1 = RunId("run-1")

PAYLOADS = {
    "empty": b"",
    "every byte": bytes(range(256)),
    "quotes": b"'; DROP TABLE edda_run; -- \" ` ''",
    "backslashes": rb"\ \\ \0 \x00 \' \n",
    "nul": b"\0\0a\0",
    "percent": b"%s %d %% %(name)s ? :x $1 {0}",
    "not utf-8": b"\xff\xfe\xc3\x28",
    "a megabyte": bytes(range(256)) * 4096,
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=list(PAYLOADS))
async def test_payloads_come_back_byte_for_byte(storage: Storage, worker: Worker, payload: bytes) -> None:
    one = Entry(1, EntryKind.STEP, "step", "pay", ok=True, at=1, input=payload, value=payload)
    await storage.start([Start(RunId("cancelled"), "other", payload, 1)])
    await storage.cancel(RunId("cancelled"), payload)
    await worker.write(run_write("run-1", one, start=Start(R1, WORKFLOW, payload, 1)))
    await worker.write(run_write("run-1", transition=End(RunStatus.FAILED, payload, 2)))
    run = await storage.get(R1)
    assert run is not None
    assert run.input == payload
    assert run.value == payload
    assert await storage.history(R1) == (one,)
    (claimed,) = (await worker.claim("other")).runs
    assert claimed.input == payload
    assert [item.value for item in claimed.inbox] == [payload]


TEXTS = {
    "accents": "zahlung-größer-é",
    "greek and emoji": "πληρωμή-🧾-✓",
    "right to left": "תשלום",
    "quotes": "'; DROP TABLE edda_run; --",
    "backslash and percent": "a\\b%s%%_",
    "white space": " a\tb\nc ",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
async def test_text_comes_back_character_for_character(storage: Storage, worker: Worker, text: str) -> None:
    run_id = RunId(text)
    one = Entry(1, EntryKind.STEP, text, text, ok=True, at=1)
    await worker.write(new_run(text, one, workflow=text, transition=Suspend(0, 0, RunStatus.WAITING_FOR_TIMER, text)))
    run = await storage.get(run_id)
    assert run is not None
    assert (run.run_id, run.workflow, run.reason) == (text, text, text)
    assert [run.run_id for run in await storage.find(RunFilter(workflow=text))] == [text]
    (claimed,) = (await worker.claim(text)).runs
    assert (claimed.run_id, claimed.workflow, claimed.entries) == (text, text, (one,))


async def test_ids_are_compared_character_for_character(storage: Storage, worker: Worker) -> None:
    ids = {"run", "RUN", "Run", "run ", " run", "rún", "ru\u0301n", "ｒｕｎ"}
    assert await storage.start([start(run_id) for run_id in ids]) == ids
    await worker.write(*(new_run(f"{run_id}'", entry(1, run_id.encode())) for run_id in ids))
    for run_id in ids:
        run = await storage.get(RunId(run_id))
        assert run is not None
        assert (run.run_id, run.input) == (run_id, start(run_id).input)
        assert [each.value for each in await storage.history(RunId(f"{run_id}'"))] == [run_id.encode()]


async def test_workflow_names_are_compared_character_for_character(storage: Storage, worker: Worker) -> None:
    names = ["pay", "Pay", "pay ", "páy"]
    await storage.start([start(f"run-{number}", workflow=name) for number, name in enumerate(names)])
    for number, name in enumerate(names):
        assert [run.run_id for run in await storage.find(RunFilter(workflow=name))] == [f"run-{number}"]
        assert [run.run_id for run in (await worker.claim(name)).runs] == [f"run-{number}"]


async def test_worker_names_are_compared_character_for_character(storage: Storage) -> None:
    workers = [Worker(storage, name) for name in ("worker", "Worker", "worker ")]
    for worker in workers:
        await worker.register()
    await workers[0].write(new_run("run-1"))
    assert [len(await storage.owned_runs(worker.id)) for worker in workers] == [1, 0, 0]
    fences = [await storage.read_fence(worker.id) for worker in workers]
    assert [fence.batch_no for fence in fences if fence] == [1, 0, 0]


@pytest.mark.parametrize("at", [0, 1, 2**53 + 1, 2**63 - 1])
async def test_any_time_comes_back(storage: Storage, worker: Worker, at: int) -> None:
    one = Entry(1, EntryKind.TIMER, "step", "sleep", ok=True, at=at)
    end = End(RunStatus.COMPLETED, b"", at)
    await worker.write(run_write("run-1", one, start=Start(R1, WORKFLOW, b"", at, None, at), transition=end))
    run = await storage.get(R1)
    assert run is not None
    assert (run.created_at, run.deadline, run.ended_at) == (at, at, at)
    assert await storage.history(R1) == (one,)


async def test_a_due_time_at_the_end_of_all_times_is_just_far_away(storage: Storage, worker: Worker) -> None:
    await storage.start([start("run-1", ready_at=2**63 - 1)])
    due = await storage.next_due([WORKFLOW])
    assert due is not None
    assert due > 2**62
    assert (await worker.claim()).runs == ()


async def test_a_due_time_of_zero_is_due(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=Suspend(0, 0, RunStatus.WAITING_FOR_TIMER)))
    assert await storage.next_due([WORKFLOW]) == 0
    assert len((await worker.claim()).runs) == 1
