"""Events go out at least once, those of a key in order, and nobody waits behind another key's failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from edda.cloudevents.event import CloudEvent
from edda.core.codec import Codec
from edda.core.model import MICROSECONDS, OutboxState, SendLater, SendResult
from edda.engine.clock import DatabaseClock
from edda.engine.outbox.relayer import RelaySettings
from edda.engine.settings import Settings
from edda.engine.worker.maintenance import Pruner
from edda.errors import (
    EventPostponedError,
    EventRefusedError,
    StorageConflictError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.storage.ports import Storage
from edda.testing import VirtualClock
from tests.conftest import MakeStorage
from tests.engine.conditions import until

from .conftest import QUICK, MakeRelayer
from .fakes import ListSink, Sabotaged, forever
from .outbox_rows import are_over, in_order, put, records, states

DAY = 86_400 * MICROSECONDS


async def test_what_is_in_the_outbox_goes_out_and_is_marked_sent(storage: Storage, make_relayer: MakeRelayer) -> None:
    sink = ListSink()
    await put(storage, range(20))
    relayer = await make_relayer(sink)
    await until(lambda: are_over(storage), "all are sent")
    assert sorted(sink.taken, key=int) == [str(number) for number in range(20)]
    assert set((await states(storage)).values()) == {"sent"}
    assert (relayer.sent, relayer.postponed, relayer.refused) == (20, 0, 0)
    await put(storage, ["late"])
    await until(lambda: "late" in sink.taken, "one that came while it rested is sent too")


async def test_events_of_a_key_go_out_in_order_though_tries_fail(storage: Storage, make_relayer: MakeRelayer) -> None:
    async def fail_now_and_then(event: CloudEvent, attempt: int) -> None:
        await asyncio.sleep(0)
        if attempt == 1 and int(event.id) % 3 == 0:
            raise EventPostponedError("busy")

    sink = ListSink(fail_now_and_then)
    relayers = [await make_relayer(sink, replace(QUICK, claim_batch=7)) for _ in range(2)]
    for number in range(60):
        await put(storage, [number], key=f"key-{number % 4}")
    await until(lambda: are_over(storage), "all are sent")
    for key in range(4):
        mine = [one for one in sink.taken if int(one) % 4 == key]
        assert mine == [str(number) for number in range(key, 60, 4)]
    assert sum(relayer.sent for relayer in relayers) == 60


async def test_one_that_fails_holds_up_its_own_key_and_no_other(storage: Storage, make_relayer: MakeRelayer) -> None:
    mended = asyncio.Event()

    async def fail(event: CloudEvent, attempt: int) -> None:
        if event.id == "bad" and not mended.is_set():
            raise EventPostponedError("not now")

    sink = ListSink(fail)
    await put(storage, ["bad", "behind"], key="A")
    await make_relayer(sink)
    await until(lambda: sink.tried.count("bad") > 2, "it is tried again and again")
    await put(storage, range(10))
    await put(storage, ["later"], key="A")
    await until(lambda: len(sink.taken) == 10, "the others are sent")
    assert not {"bad", "behind", "later"} & set(sink.taken)
    bad = (await records(storage))["bad"]
    assert bad.state is OutboxState.PENDING
    assert bad.reason == "not now"
    mended.set()
    await until(lambda: are_over(storage), "all are sent")
    assert [one for one in sink.taken if not one.isdigit()] == ["bad", "behind", "later"]


async def test_a_send_that_hangs_holds_up_no_other_key(storage: Storage, make_relayer: MakeRelayer) -> None:
    async def hang(event: CloudEvent, attempt: int) -> None:
        if event.subject == "A":
            await asyncio.Event().wait()

    sink = ListSink(hang)
    await put(storage, range(300), key="A")  # more than are claimed at once
    await make_relayer(sink)
    await until(lambda: sink.under_way == 1, "the first is under way")
    await put(storage, ["other"])
    await until(lambda: sink.taken == ["other"], "the other is sent", within=9.0)


async def test_those_that_failed_before_take_no_place_from_new_ones(
    storage: Storage, make_relayer: MakeRelayer
) -> None:
    async def fail_and_then_hang(event: CloudEvent, attempt: int) -> None:
        if event.id.startswith("old"):
            if attempt == 1:
                raise EventPostponedError("not now")
            await asyncio.Event().wait()

    sink = ListSink(fail_and_then_hang)
    await put(storage, (f"old-{number}" for number in range(40)))
    await make_relayer(sink, replace(QUICK, concurrency=4, claim_batch=10))
    await until(lambda: sink.under_way == 4, "so many old ones hang as may be under way")
    await put(storage, (f"new-{number}" for number in range(20)))
    await until(lambda: len(sink.taken) == 20, "the new ones are sent", within=9.0)


async def test_a_dead_event_is_kept_with_its_reason_and_holds_nobody_up(
    storage: Storage, make_relayer: MakeRelayer
) -> None:
    async def refuse(event: CloudEvent, attempt: int) -> None:
        if event.id == "2":
            raise EventRefusedError("400 Bad Request: \x00no\nsuch\ud800 thing")

    sink = ListSink(refuse)
    await put(storage, range(5), key="A")
    relayer = await make_relayer(sink)
    await until(lambda: are_over(storage), "nothing is left")
    assert sink.taken == ["0", "1", "3", "4"]
    dead = (await records(storage, OutboxState.DEAD))["2"]
    assert dead.reason == "400 Bad Request:  no such  thing"
    assert relayer.refused == 1
    sink.behaviour = ListSink().behaviour
    assert await storage.retry_outbox(["2"]) == 1
    relayer.wake()
    await until(lambda: "2" in sink.taken, "it is sent after all")


async def test_a_receiver_that_says_when_is_asked_then(storage: Storage, make_relayer: MakeRelayer) -> None:
    async def ask_for_time(event: CloudEvent, attempt: int) -> None:
        raise EventPostponedError("busy", {"hour": 1800.0, "year": 3e7, "now": 0.0}[event.id])

    await put(storage, ["hour", "year"])
    relayer = await make_relayer(ListSink(ask_for_time))
    await until(lambda: relayer.postponed == 2, "both were tried")
    await until(lambda: relayer.is_quiet, "and that is written")
    now, found = await storage.now(), await records(storage)
    assert 1700 < (found["hour"].due - now) / MICROSECONDS <= 1800
    assert 3500 < (found["year"].due - now) / MICROSECONDS <= 3600
    assert [found[one].attempts for one in ("hour", "year")] == [1, 1]
    await put(storage, ["now"])
    await until(lambda: relayer.postponed > 4, "one that says at once is asked soon")


async def test_claims_that_were_handed_back_are_no_failures(storage: Storage, make_relayer: MakeRelayer) -> None:
    async def fail(event: CloudEvent, attempt: int) -> None:
        raise EventPostponedError("not now")

    await put(storage, ["1"])
    for _ in range(12):
        (record,) = await storage.claim_outbox(1, MICROSECONDS)
        await storage.record_send_results([SendLater(record.seq, record.attempts, 0, "handed back")])
    relayer = await make_relayer(ListSink(fail), RelaySettings(first_pause=5.0, longest_pause=5000.0))
    await until(lambda: relayer.is_quiet and relayer.postponed == 1, "it was tried")
    assert (await records(storage))["1"].due - await storage.now() <= 5 * MICROSECONDS


def test_pauses_grow_from_half_a_second_to_a_minute() -> None:
    pace = RelaySettings()
    for failures in (1, 2, 5, 10, 1000, 10**9):
        pauses = [pace.pause(failures, None) for _ in range(50)]
        expected = min(0.5 * 2.0 ** min(failures - 1, 30), 60.0)
        assert all(max(0.5, expected / 2) <= pause <= expected for pause in pauses)
    assert len({pace.pause(8, None) for _ in range(20)}) > 1


@pytest.mark.parametrize("numbers", [{"timeout": 15.0}, {"timeout": 0.0}, {"concurrency": 0}, {"claim_batch": 0}])
def test_numbers_that_cannot_work_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        RelaySettings(**numbers)


async def test_whatever_a_sink_raises_the_event_is_tried_again(storage: Storage, make_relayer: MakeRelayer) -> None:
    async def trip(event: CloudEvent, attempt: int) -> None:
        if attempt == 1:
            raise KeyError("oops")
        if attempt == 2:
            await asyncio.Event().wait()

    sink = ListSink(trip)
    await put(storage, ["1"])
    relayer = await make_relayer(sink, replace(QUICK, timeout=0.3))
    await until(lambda: sink.taken == ["1"], "it is sent")
    assert relayer.postponed == 2


async def test_so_many_are_under_way_at_once_and_no_more(storage: Storage, make_relayer: MakeRelayer) -> None:
    full, sink = asyncio.Event(), ListSink()

    async def wait(event: CloudEvent, attempt: int) -> None:
        if sink.under_way == 5:
            full.set()
        await full.wait()

    sink.behaviour = wait
    await put(storage, range(50))
    await make_relayer(sink, replace(QUICK, concurrency=5))
    await until(lambda: are_over(storage), "all are sent")
    assert sink.most_under_way == 5
    assert len(sink.taken) == 50


async def test_a_long_line_does_not_outlast_its_lease(
    storage: Storage, make_storage: MakeStorage, make_relayer: MakeRelayer
) -> None:
    async def dawdle(event: CloudEvent, attempt: int) -> None:
        await asyncio.sleep(0.2)

    sink = ListSink(dawdle)
    await put(storage, range(20), key="A")  # four seconds of work
    strict = replace(QUICK, lease=3.0, timeout=2.5)  # of which half a second may be begun
    await make_relayer(sink, strict)
    await make_relayer(sink, strict, on=await make_storage())
    await until(lambda: are_over(storage), "all are sent")
    assert sink.taken == [str(number) for number in range(20)], "nobody else sent what was still ours"
    assert (await records(storage))["19"].attempts >= 5, "what could not be done in time was handed back"


async def test_a_key_has_one_line_at_a_time(storage: Storage, make_relayer: MakeRelayer) -> None:
    go_on = asyncio.Event()

    async def wait(event: CloudEvent, attempt: int) -> None:
        await go_on.wait()

    sink, counted = ListSink(wait), Sabotaged(storage)
    await put(storage, ["1"])
    relayer = await make_relayer(sink, on=counted.as_storage)
    await until(lambda: sink.under_way == 1, "it is under way")
    lapsed = (await records(storage))["1"]  # as after a sleep of this process that was longer than its lease
    await storage.record_send_results([SendLater(lapsed.seq, lapsed.attempts, 0, "asleep")])
    counted.claims = 0
    relayer.wake()
    await until(lambda: counted.claims > 0, "it was claimed again")
    await put(storage, ["2"])
    await until(lambda: "2" in sink.tried, "and others after it")
    assert sink.tried == ["1", "2"]
    go_on.set()
    await until(lambda: are_over(storage), "both are sent")
    assert sorted(sink.taken) == ["1", "2"]


async def test_a_relayer_that_stops_lets_arrive_what_is_under_way_and_hands_back_the_rest(
    storage: Storage, make_storage: MakeStorage, make_relayer: MakeRelayer
) -> None:
    on_its_way, go_on = asyncio.Event(), asyncio.Event()

    async def wait(event: CloudEvent, attempt: int) -> None:
        on_its_way.set()
        await go_on.wait()

    sink = ListSink(wait)
    await put(storage, range(5), key="A")
    first = await make_relayer(sink)
    await on_its_way.wait()
    stopping = asyncio.create_task(first.stop(30.0))
    await asyncio.sleep(0.05)
    assert not stopping.done()
    go_on.set()
    await stopping
    assert sink.taken == ["0"]
    assert list((await states(storage)).values()) == ["sent"] + ["pending"] * 4
    await make_relayer(sink, on=await make_storage())
    await until(lambda: are_over(storage), "another sends the rest, long before the lease", within=10.0)
    assert sink.taken == ["0", "1", "2", "3", "4"]


async def test_what_is_not_there_within_the_grace_is_for_others(
    storage: Storage, make_storage: MakeStorage, make_relayer: MakeRelayer
) -> None:
    stuck = ListSink(forever)
    await put(storage, range(3), key="A")
    first = await make_relayer(stuck)
    await until(lambda: stuck.under_way == 1, "the first is under way")
    await first.stop(0.1)
    for record in (await records(storage)).values():
        assert record.state is OutboxState.PENDING
        assert record.due <= await storage.now(), "nobody has to wait for the lease"
    sink = ListSink()
    await make_relayer(sink, on=await make_storage())
    await until(lambda: sink.taken == ["0", "1", "2"], "another sends them, long before the lease", within=10.0)


async def test_a_database_that_is_away_is_waited_for(
    storage: Storage, make_relayer: MakeRelayer, caplog: pytest.LogCaptureFixture
) -> None:
    faulty, trouble = Sabotaged(storage), [0]

    def fail(*_: object) -> None:
        trouble[0] += 1
        if trouble[0] < 8:
            raise [StorageUnavailableError, StorageConflictError, RuntimeError][trouble[0] % 3]("away")

    faulty.before_claim = fail
    faulty.before_settling = fail
    sink = ListSink()
    await put(storage, range(5))
    await make_relayer(sink, on=faulty.as_storage)
    await until(lambda: are_over(storage), "all are sent")
    assert trouble[0] >= 8
    assert sorted(in_order(sink.taken)) == ["0", "1", "2", "3", "4"]


async def test_what_was_sent_is_not_sent_again_because_its_receipt_was_late(
    storage: Storage, make_relayer: MakeRelayer
) -> None:
    faulty = Sabotaged(storage)
    refused: list[int] = []

    def lose_some(receipts: Sequence[SendResult]) -> None:
        if len(refused) < 4:
            refused.append(len(receipts))
            raise StorageUnavailableError("away")

    faulty.before_settling = lose_some
    sink = ListSink()
    await put(storage, range(20))
    await make_relayer(sink, on=faulty.as_storage)
    await until(lambda: are_over(storage), "all are sent")
    assert len(sink.taken) == 20
    assert len(refused) == 4


async def test_a_receipt_that_the_database_refuses_is_nobody_elses_trouble(
    storage: Storage, make_relayer: MakeRelayer
) -> None:
    faulty = Sabotaged(storage)
    await put(storage, range(6))
    poison = (await records(storage))["3"].seq

    def refuse(receipts: Sequence[SendResult]) -> None:
        if any(receipt.seq == poison for receipt in receipts):
            raise StorageRejectedError("no")

    faulty.before_settling = refuse
    relayer = await make_relayer(ListSink(), on=faulty.as_storage)
    await until(lambda: relayer.is_quiet and relayer.sent == 6, "all are sent")
    assert {id for id, state in (await states(storage)).items() if state == "pending"} == {"3"}


async def test_one_that_is_due_behind_one_that_is_not_makes_nobody_spin(
    storage: Storage, make_relayer: MakeRelayer
) -> None:
    async def later(event: CloudEvent, attempt: int) -> None:
        raise EventPostponedError("busy", 1000.0)

    counted = Sabotaged(storage)
    await put(storage, ["first"], key="A")
    relayer = await make_relayer(ListSink(later), replace(QUICK, poll=0.5), on=counted.as_storage, listens=False)
    await until(lambda: relayer.is_quiet and relayer.postponed == 1, "it was tried")
    await put(storage, ["second"], key="A")
    counted.claims = counted.looks = 0
    await asyncio.sleep(1.5)  # what is counted is what happens in a time
    assert 1 <= counted.looks <= 6
    assert counted.claims <= 6


async def test_bodies_are_read_with_the_codec_that_wrote_them(storage: Storage, make_relayer: MakeRelayer) -> None:
    class Backwards:
        def seal(self, data: bytes) -> bytes:
            return data[::-1]

        def open(self, data: bytes) -> bytes:
            return data[::-1]

    codec, sink, ignorant = Codec(transform=Backwards()), ListSink(), ListSink()
    await put(storage, ["1"], codec=codec)
    first = await make_relayer(ignorant)
    await until(lambda: first.postponed > 0, "who has another codec cannot read it")
    await first.stop(1.0)
    assert ignorant.tried == []
    assert (await states(storage)) == {"1": "pending"}, "and that does not kill it"
    await make_relayer(sink, codec=codec)
    await until(lambda: sink.taken == ["1"], "who has the codec can")


async def test_only_the_first_of_many_failures_is_a_warning(
    storage: Storage, make_relayer: MakeRelayer, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(event: CloudEvent, attempt: int) -> None:
        raise EventPostponedError("connection refused")

    caplog.set_level(logging.WARNING, "edda")
    await put(storage, range(20))
    relayer = await make_relayer(ListSink(fail))
    await until(lambda: relayer.postponed > 30, "all were tried")
    assert len([one for one in caplog.records if "connection refused" in one.getMessage()]) == 1


async def test_what_was_sent_is_removed_when_it_is_old_and_what_is_dead_is_not(
    storage: Storage, make_relayer: MakeRelayer
) -> None:
    async def refuse(event: CloudEvent, attempt: int) -> None:
        if event.id == "bad":
            raise EventRefusedError("no")

    await put(storage, ["good", "bad"])
    relayer = await make_relayer(ListSink(refuse))
    await until(lambda: are_over(storage), "nothing is left")
    await relayer.stop(1.0)
    await put(storage, ["new"])
    for days, removed in ((6.9, 0), (7.1, 1), (400, 0)):
        clock = VirtualClock(await storage.now() + int(days * DAY))
        assert await Pruner(storage, clock, Settings()).prune_sent() == removed
    assert await states(storage) == {"bad": "dead", "new": "pending"}


async def test_a_relayer_learns_the_databases_clock_from_its_claims(
    storage: Storage, make_relayer: MakeRelayer
) -> None:
    class Wrong(DatabaseClock):
        def __init__(self) -> None:
            super().__init__()
            self._offset -= 86_400  # this machine is a day behind

    clock = Wrong()
    await put(storage, ["1"])
    relayer = await make_relayer(ListSink())
    relayer._clock = clock
    await until(lambda: are_over(storage), "it is sent")
    assert abs(clock.now() - await storage.now()) < 60 * MICROSECONDS
