"""The outbox: events are claimed in order, by one relayer at a time, which records results while its claim holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from edda.core.model import (
    BatchResult,
    EndWatcher,
    Fence,
    OutboxEvent,
    OutboxRow,
    OutboxState,
    Rejected,
    RunId,
    SendLater,
    SendResult,
    Sent,
)
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .records import HOUR, LAPSED, LATER, SUSPENDED, done, entry, incoming, new_run, outbox_event, run_write, wait
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")
PENDING, SENT, DEAD = OutboxState.PENDING, OutboxState.SENT, OutboxState.DEAD


def ids(records: Sequence[OutboxRow]) -> list[str]:
    return [record.event.id for record in records]


async def claim(storage: Storage, limit: int = 100, lease: int = HOUR) -> list[str]:
    return ids(await storage.claim_outbox(limit, lease))


async def found(storage: Storage, id: str) -> OutboxRow:
    (record,) = [record for record in await storage.find_outbox(limit=1_000) if record.event.id == id]
    return record


async def dues(storage: Storage) -> dict[str, int]:
    return {record.event.id: record.due for record in await storage.find_outbox()}


async def bury(storage: Storage, *events: OutboxEvent) -> None:
    """Store events with these ids as dead ones."""
    await storage.enqueue(events)
    ours = {event.id for event in events}
    claimed = await storage.claim_outbox(1_000, LAPSED)
    await storage.record_send_results([Rejected(x.seq, x.attempts, "no") for x in claimed if x.event.id in ours])


# Storing


async def test_events_for_others_come_back_as_a_run_wrote_them(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    events = [outbox_event("m", run_id="run-1"), outbox_event("z", "other", run_id="run-1"), outbox_event("a")]
    await worker.write(new_run("run-1"))
    assert await worker.send(run_write("run-1", outbox_events=events)) == BatchResult()
    for witness in (storage, await make_storage()):
        records = await witness.find_outbox()
        assert records == tuple(
            OutboxRow(record.seq, event, PENDING, 0, 0, None, None)
            for record, event in zip(records, events, strict=True)
        )
        assert [record.seq for record in records] == sorted({record.seq for record in records})


async def test_events_that_no_run_brings_are_stored_in_their_order(storage: Storage) -> None:
    events = [outbox_event("m"), outbox_event("z", "other"), outbox_event("a"), outbox_event("m")]
    await storage.enqueue(events)
    await storage.enqueue([])
    records = await storage.find_outbox()
    assert [record.event for record in records] == events
    assert {(record.state, record.attempts, record.due, record.reason, record.ended_at) for record in records} == {
        (PENDING, 0, 0, None, None)
    }


@pytest.mark.parametrize("text", ["größer-🧾", "'; DROP TABLE edda_outbox; --", "a\\b%s%%_:x", " a\tb "])
async def test_any_text_and_bytes_come_back(storage: Storage, worker: Worker, text: str) -> None:
    event = OutboxEvent(text, text, text, text, text.encode() + bytes(range(256)) * 100, 2**53 + 1, RunId(text))
    await storage.enqueue([event])
    await worker.write(replace(new_run("run-1"), outbox_events=(event,)))
    assert [record.event for record in await storage.claim_outbox(10, HOUR)] == [event, event]


BAD = {
    "id": replace(outbox_event("e"), id="e\0"),
    "key": replace(outbox_event("e"), key="k\0"),
    "type": replace(outbox_event("e"), type="t\0"),
    "source": replace(outbox_event("e"), source="s\0"),
    "half a character": replace(outbox_event("e"), key="\ud800"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
async def test_what_cannot_be_stored_is_refused_with_all_that_came_with_it(
    storage: Storage, worker: Worker, bad: OutboxEvent
) -> None:
    await worker.write(new_run("run-1"))
    with pytest.raises(StorageRejectedError):
        await storage.enqueue([outbox_event("good"), bad])
    with pytest.raises(StorageRejectedError):
        await worker.send(run_write("run-1", entry(1), outbox_events=[outbox_event("good"), bad]))
    assert await storage.find_outbox() == ()
    assert await storage.history(R1) == ()


async def test_a_batch_behind_its_fence_sends_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await storage.write(Fence(worker.id, 0, 0), [run_write("run-1", outbox_events=[outbox_event("a")])]) is None
    assert await storage.find_outbox() == ()


async def test_events_for_others_go_in_though_the_move_does_not_happen(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    await storage.accept([incoming("e1", "order")], {})
    refused = run_write("run-1", entry(1), transition=done(), outbox_events=[outbox_event("a")])
    kept = run_write(
        "run-2", transition=SUSPENDED, waits=[wait("run-2", "w", "order")], outbox_events=[outbox_event("b")]
    )
    assert await worker.send(refused, kept) == BatchResult(refused={R1: frozenset(), R2: frozenset({"w"})})
    assert sorted(ids(await storage.find_outbox())) == ["a", "b"]


async def test_an_event_for_others_outlives_its_run(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(new_run("run-1", transition=done()), outbox_events=(outbox_event("a", run_id="run-1"),)))
    assert await storage.prune_runs(await storage.now(), 10) == 1
    assert await claim(storage) == ["a"]


# Claiming


async def test_the_lowest_numbers_are_claimed_first_with_one_attempt_more(storage: Storage) -> None:
    await storage.enqueue([outbox_event(id, id) for id in ("m", "z", "a")])
    before = await storage.now()
    claimed = await storage.claim_outbox(2, HOUR)
    after = await storage.now()
    assert ids(claimed) == ["m", "z"]
    assert [record.attempts for record in claimed] == [1, 1]
    assert all(before + HOUR <= record.due <= after + HOUR for record in claimed)
    assert (await storage.find_outbox())[:2] == claimed
    assert (await found(storage, "a")).attempts == 0
    assert await claim(storage) == ["a"]


async def test_nothing_is_claimed_where_there_is_nothing(storage: Storage) -> None:
    assert await storage.claim_outbox(10, HOUR) == ()
    await storage.enqueue([outbox_event("a")])
    await claim(storage)
    assert await storage.claim_outbox(10, HOUR) == ()


async def test_a_claimed_event_is_claimed_again_when_the_lease_is_over(storage: Storage) -> None:
    await storage.enqueue([outbox_event("a")])
    assert await claim(storage, lease=LAPSED) == ["a"]
    (again,) = await storage.claim_outbox(10, HOUR)
    assert (again.event.id, again.attempts) == ("a", 2)
    assert await claim(storage) == []


async def test_all_of_a_key_that_are_due_are_claimed_together_in_their_order(storage: Storage) -> None:
    await storage.enqueue(
        [outbox_event("m", "k"), outbox_event("x", "l"), outbox_event("a", "k"), outbox_event("z", "k")]
    )
    assert await claim(storage) == ["m", "x", "a", "z"]


async def test_no_relayer_gets_an_event_while_another_has_an_earlier_one_of_its_key(storage: Storage) -> None:
    await storage.enqueue([outbox_event(f"k{n}", "k") for n in range(3)] + [outbox_event("l0", "l")])
    assert await claim(storage, limit=1) == ["k0"]
    assert await claim(storage) == ["l0"]
    await storage.enqueue([outbox_event("k3", "k"), outbox_event("l1", "l"), outbox_event("m0", "m")])
    assert await claim(storage) == ["m0"]
    await storage.record_send_results([Sent((await found(storage, "k0")).seq)])
    assert await claim(storage) == ["k1", "k2", "k3"]


async def test_what_is_behind_another_takes_no_room_in_a_claim(storage: Storage) -> None:
    await storage.enqueue([outbox_event(f"k{n}", "k") for n in range(20)])
    assert await claim(storage, limit=1) == ["k0"]
    await storage.enqueue([outbox_event("l0", "l"), outbox_event("m0", "m")])
    assert await claim(storage, limit=2) == ["l0", "m0"]


async def test_different_keys_are_independent(storage: Storage) -> None:
    for key in ("k", "K", "k ", "ķ"):
        await storage.enqueue([outbox_event(f"of {key!r}", key)])
        assert await claim(storage) == [f"of {key!r}"]


async def test_dead_and_sent_events_delay_no_other(storage: Storage) -> None:
    await storage.enqueue([outbox_event("a"), outbox_event("b"), outbox_event("c")])
    first, second = await storage.claim_outbox(2, HOUR)
    await storage.record_send_results([Rejected(first.seq, 1, "no"), Sent(second.seq)])
    assert await claim(storage) == ["c"]


# Send results


async def test_what_was_sent_is_sent(storage: Storage) -> None:
    await storage.enqueue([outbox_event("a"), outbox_event("b")])
    first, second = await storage.claim_outbox(10, LAPSED)
    await storage.record_send_results([SendLater(first.seq, 1, 5, "busy")])
    before = await storage.now()
    await storage.record_send_results([Sent(first.seq)])
    record = await found(storage, "a")
    assert (record.state, record.attempts, record.reason, record.event) == (SENT, 1, None, outbox_event("a"))
    assert record.ended_at is not None
    assert before <= record.ended_at <= await storage.now()
    assert await claim(storage) == ["b"]
    assert (await found(storage, "b")).seq == second.seq


async def test_what_was_sent_is_sent_though_the_claim_had_lapsed(storage: Storage) -> None:
    await storage.enqueue([outbox_event("a"), outbox_event("never claimed", "other")])
    (slow,) = await storage.claim_outbox(1, LAPSED)
    (quick,) = await storage.claim_outbox(1, HOUR)
    await storage.record_send_results([Sent(slow.seq)])
    await storage.record_send_results(
        [Rejected(quick.seq, quick.attempts, "no"), SendLater(quick.seq, 2, LATER, "busy")]
    )
    assert ids(await storage.find_outbox(SENT)) == ["a"]
    assert ids(await storage.find_outbox(PENDING)) == ["never claimed"]


async def test_what_was_refused_is_dead_with_its_reason(storage: Storage) -> None:
    await storage.enqueue([outbox_event("a")])
    (record,) = await storage.claim_outbox(1, LAPSED)
    before = await storage.now()
    await storage.record_send_results([Rejected(record.seq, 1, "400 größer 🧾")])
    dead = await found(storage, "a")
    assert (dead.state, dead.attempts, dead.reason) == (DEAD, 1, "400 größer 🧾")
    assert dead.ended_at is not None
    assert before <= dead.ended_at <= await storage.now()
    assert await claim(storage) == []


async def test_a_dead_event_stays_dead(storage: Storage) -> None:
    await bury(storage, outbox_event("a"))
    before = await found(storage, "a")
    await storage.record_send_results(
        [Sent(before.seq), Rejected(before.seq, 1, "again"), SendLater(before.seq, 1, 5, "?")]
    )
    assert await found(storage, "a") == before


async def test_rejected_and_send_later_count_only_while_the_claim_holds(storage: Storage) -> None:
    await storage.enqueue([outbox_event("a"), outbox_event("b")])
    await storage.claim_outbox(10, LAPSED)
    first, second = await storage.claim_outbox(10, HOUR)
    late: list[SendResult] = [
        Rejected(first.seq, 1, "no"),
        SendLater(first.seq, 1, LATER, "busy"),
        Rejected(second.seq, 3, "no"),
    ]
    await storage.record_send_results(late)
    assert await storage.find_outbox() == (first, second)


async def test_what_is_postponed_is_tried_when_it_is_due(storage: Storage) -> None:
    await storage.enqueue([outbox_event("a")])
    (record,) = await storage.claim_outbox(1, HOUR)
    await storage.record_send_results([SendLater(record.seq, 1, LATER, "503")])
    assert await found(storage, "a") == replace(record, due=LATER, reason="503")
    assert await claim(storage) == []
    await storage.record_send_results([SendLater(record.seq, 1, 7, "503 again")])
    assert await found(storage, "a") == replace(record, due=7, reason="503 again")
    (again,) = await storage.claim_outbox(1, HOUR)
    assert (again.attempts, again.reason) == (2, "503 again")


async def test_nothing_of_its_key_is_tried_before_what_is_postponed(storage: Storage) -> None:
    """Earlier and later events of the key; one that is due later anyhow, and other keys, are not changed."""
    await storage.enqueue([outbox_event(id, "k") for id in ("before", "it", "after", "later", "sent", "dead")])
    await storage.enqueue([outbox_event("other", "l")])
    claimed = {record.event.id: record for record in await storage.claim_outbox(10, LAPSED)}
    await storage.record_send_results([Sent(claimed["sent"].seq), Rejected(claimed["dead"].seq, 1, "no")])
    ended = await found(storage, "sent"), await found(storage, "dead")
    # `SendLater` may also lower the event's own due time; other events of the key are never due earlier than before.
    await storage.record_send_results([SendLater(claimed["later"].seq, 1, LATER, "busy")])
    for id in ("before", "it", "after"):
        await storage.record_send_results([SendLater(claimed[id].seq, 1, 10, "busy")])
    assert await dues(storage) == {
        "before": 10,
        "it": 10,
        "after": 10,
        "later": LATER,
        "sent": ended[0].due,
        "dead": ended[1].due,
        "other": claimed["other"].due,
    }
    await storage.record_send_results([SendLater(claimed["it"].seq, 1, LATER - 1, "still busy")])
    assert {id: due for id, due in (await dues(storage)).items() if id in ("before", "it", "after", "later")} == {
        "before": LATER - 1,
        "it": LATER - 1,
        "after": LATER - 1,
        "later": LATER,
    }
    assert [(await found(storage, id)).reason for id in ("before", "it", "later")] == ["busy", "still busy", "busy"]
    assert (await found(storage, "sent"), await found(storage, "dead")) == ended
    assert await found(storage, "other") == claimed["other"]
    assert await claim(storage) == ["other"]


async def test_receipts_of_many_kinds_are_settled_at_once(storage: Storage) -> None:
    await storage.enqueue([outbox_event(f"e{n:02}", f"k{n}") for n in range(60)])
    claimed = await storage.claim_outbox(100, HOUR)
    assert len(claimed) == 60
    sent, refused, postponed = claimed[::3], claimed[1::3], claimed[2::3]
    await storage.record_send_results(
        [
            *(SendLater(x.seq, 1, LATER, f"busy {x.seq}") for x in postponed),
            *(Sent(x.seq) for x in sent),
            *(Rejected(x.seq, 1, f"no {x.seq}") for x in refused),
            Sent(2**40),
            Rejected(2**40, 1, "never there"),
            SendLater(2**40, 1, 5, "never there"),
        ]
    )
    assert ids(await storage.find_outbox(SENT)) == ids(sent)
    assert [x.reason for x in await storage.find_outbox(DEAD)] == [f"no {x.seq}" for x in refused]
    assert [(x.reason, x.due) for x in await storage.find_outbox(PENDING)] == [
        (f"busy {x.seq}", LATER) for x in postponed
    ]


@pytest.mark.parametrize("turned", [False, True])
async def test_of_one_key_one_is_sent_and_the_next_postponed_at_once(storage: Storage, turned: bool) -> None:
    await storage.enqueue([outbox_event("a"), outbox_event("b"), outbox_event("c")])
    first, second = await storage.claim_outbox(2, HOUR)
    receipts: list[SendResult] = [Sent(first.seq), SendLater(second.seq, 1, LATER, "busy")]
    await storage.record_send_results(receipts[::-1] if turned else receipts)
    assert ids(await storage.find_outbox(SENT)) == ["a"]
    assert [(x.event.id, x.due, x.reason) for x in await storage.find_outbox(PENDING)] == [
        ("b", LATER, "busy"),
        ("c", LATER, None),
    ]


async def test_no_receipts_are_fine(storage: Storage) -> None:
    await storage.record_send_results([])
    await storage.record_send_results([Sent(1)])
    assert await storage.find_outbox() == ()


# Finding


async def test_the_time_until_the_next_event_is_known(storage: Storage) -> None:
    assert await storage.next_outbox_due() is None
    await storage.enqueue([outbox_event("a"), outbox_event("b", "other")])
    assert await storage.next_outbox_due() == 0
    first, second = await storage.claim_outbox(10, HOUR)
    due = await storage.next_outbox_due()
    assert due is not None
    assert HOUR // 2 < due <= HOUR
    await storage.record_send_results([SendLater(first.seq, 1, await storage.now() + 3 * HOUR, "busy")])
    await storage.record_send_results([Sent(second.seq)])
    due = await storage.next_outbox_due()
    assert due is not None
    assert 2 * HOUR < due <= 3 * HOUR
    await storage.record_send_results([Rejected(first.seq, 1, "no")])
    assert await storage.next_outbox_due() is None


async def test_events_for_others_are_found_by_state_and_page(storage: Storage) -> None:
    await bury(storage, outbox_event("dead"))
    await storage.enqueue([outbox_event(f"e{n}") for n in range(60)])
    everything = await storage.find_outbox(limit=100)
    assert ids(everything) == ["dead", *(f"e{n}" for n in range(60))]
    assert await storage.find_outbox() == everything[:50]
    assert await storage.find_outbox(after=everything[9].seq, limit=3) == everything[10:13]
    assert await storage.find_outbox(PENDING, limit=2) == everything[1:3]
    assert await storage.find_outbox(PENDING, after=everything[2].seq, limit=2) == everything[3:5]
    assert await storage.find_outbox(DEAD) == everything[:1]
    assert await storage.find_outbox(SENT) == ()


# Dead events


async def test_dead_events_can_be_retried(storage: Storage) -> None:
    await bury(storage, outbox_event("a"), outbox_event("b", "other"), outbox_event("c"))
    await storage.enqueue([outbox_event("d"), outbox_event("a", "third")])
    before = {record.seq: record for record in await storage.find_outbox()}
    assert await storage.retry_outbox(["a", "d", "unknown"]) == 1
    after = {record.seq: record for record in await storage.find_outbox()}
    (changed,) = [record for seq, record in after.items() if record != before[seq]]
    assert (changed.event.id, changed.event.key) == ("a", "orders")
    assert (changed.state, changed.due, changed.attempts, changed.ended_at) == (PENDING, 0, 0, None)
    (first, *_) = await storage.claim_outbox(10, HOUR)
    assert (first.seq, first.attempts) == (changed.seq, 1)


async def test_all_dead_events_can_be_retried(storage: Storage) -> None:
    await bury(storage, outbox_event("a"), outbox_event("b", "other"))
    await storage.enqueue([outbox_event("c")])
    assert await storage.retry_outbox([]) == 0
    assert await storage.retry_outbox(None) == 2
    assert await storage.retry_outbox(None) == 0
    assert await claim(storage) == ["a", "b", "c"]


# Pruning


async def test_what_was_sent_goes_when_it_is_old_and_all_else_stays(storage: Storage) -> None:
    await bury(storage, outbox_event("dead"))
    await storage.enqueue([outbox_event(f"e{n}", f"k{n}") for n in range(5)] + [outbox_event("pending")])
    claimed = await storage.claim_outbox(5, HOUR)
    await storage.record_send_results([Sent(record.seq) for record in claimed])
    assert await storage.prune_outbox(await storage.now() - HOUR, 100) == 0
    soon = await storage.now() + HOUR
    assert [await storage.prune_outbox(soon, 2) for _ in range(4)] == [2, 2, 1, 0]
    assert ids(await storage.find_outbox()) == ["dead", "pending"]


async def test_a_number_is_never_given_out_twice(storage: Storage) -> None:
    """Otherwise a late result would be recorded for another event."""
    await storage.enqueue([outbox_event("a"), outbox_event("b")])
    claimed = await storage.claim_outbox(10, HOUR)
    await storage.record_send_results([Sent(record.seq) for record in claimed])
    assert await storage.prune_outbox(await storage.now() + HOUR, 10) == 2
    await storage.enqueue([outbox_event("c")])
    assert (await found(storage, "c")).seq > claimed[-1].seq


# At the same time


async def test_of_claimers_at_the_same_time_one_gets_an_event(storage: Storage, make_storage: MakeStorage) -> None:
    other = await make_storage()
    await storage.enqueue([outbox_event(f"e{n:03}", f"k{n}") for n in range(120)])
    claims = await asyncio.gather(
        *(each.claim_outbox(10, HOUR) for _ in range(8) for each in (storage, other)),
    )
    claimed = [id for records in claims for id in ids(records)]
    assert sorted(claimed) == [f"e{n:03}" for n in range(120)]


async def test_events_of_a_key_are_sent_in_order_by_several_relayers(
    storage: Storage, make_storage: MakeStorage
) -> None:
    storages = [storage, await make_storage()]
    expected = {f"k{k}": [f"k{k}-{n:02}" for n in range(15)] for k in range(4)}
    await storage.enqueue([outbox_event(expected[f"k{k}"][n], f"k{k}") for n in range(15) for k in range(4)])
    sent: dict[str, list[str]] = {key: [] for key in expected}

    async def relay(storage: Storage, limit: int) -> None:
        while await storage.next_outbox_due() is not None:
            claimed = await storage.claim_outbox(limit, HOUR)
            for record in claimed:
                sent[record.event.key].append(record.event.id)
                await asyncio.sleep(0)
            await storage.record_send_results([Sent(record.seq) for record in claimed])

    async with asyncio.timeout(90):
        await asyncio.gather(*(relay(each, limit) for each in storages for limit in (1, 3)))
    assert sent == expected


async def test_events_go_out_once_while_others_come_in(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    worker = await make_worker("worker", on=other)
    sent: list[str] = []

    async def bring() -> None:
        for turn in range(20):
            await worker.write(replace(new_run(f"run-{turn}"), outbox_events=(outbox_event(f"run-{turn:02}", "run"),)))
            await storage.enqueue([outbox_event(f"free-{turn:02}", "free")])

    async def relay(storage: Storage) -> None:
        while len(sent) < 40:
            claimed = await storage.claim_outbox(5, HOUR)
            sent.extend(ids(claimed))
            await storage.record_send_results([Sent(record.seq) for record in claimed])

    async with asyncio.timeout(90):
        await asyncio.gather(bring(), relay(storage), relay(other))
    assert [id for id in sent if id.startswith("run")] == [f"run-{n:02}" for n in range(20)]
    assert [id for id in sent if id.startswith("free")] == [f"free-{n:02}" for n in range(20)]


async def test_a_claim_of_one_who_died_passes_to_another(storage: Storage, make_storage: MakeStorage) -> None:
    dying = await make_storage()
    await storage.enqueue([outbox_event("a"), outbox_event("b")])
    assert await claim(dying, lease=LAPSED) == ["a", "b"]
    dying.kill()
    assert [(x.event.id, x.attempts) for x in await storage.claim_outbox(10, HOUR)] == [("a", 2), ("b", 2)]
