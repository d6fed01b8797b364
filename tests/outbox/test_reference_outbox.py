"""What goes wrong in the reference with the outbox, row by row, and holds here."""

from __future__ import annotations

from dataclasses import replace

from edda.engine.outbox.sinks import HttpSink
from edda.storage.ports import Storage
from tests.conftest import MakeStorage
from tests.engine.conditions import until

from .conftest import QUICK, MakeRelayer
from .fakes import ListSink, forever
from .outbox_rows import are_over, put, states
from .receiver import Answer, receiving


async def test_a_broker_that_is_down_kills_no_event(storage: Storage, make_relayer: MakeRelayer) -> None:
    """W9: however often it was tried while nobody listened, everything is sent when somebody does."""
    async with receiving() as receiver:
        await receiver.close()
        await put(storage, range(10))
        relayer = await make_relayer(HttpSink(receiver.url))
        await until(lambda: relayer.postponed >= 60, "each was tried many times over")
        assert set((await states(storage)).values()) == {"pending"}
        await receiver.open()
        await until(lambda: are_over(storage), "all are sent")
        assert sorted(receiver.ids) == [str(number) for number in range(10)]


async def test_new_events_are_not_held_up_by_old_ones_that_fail(storage: Storage, make_relayer: MakeRelayer) -> None:
    """W9: more old events than are claimed at once, none of which is ever taken, and a new one gets through."""
    async with receiving(lambda request, n: Answer(503 if request.event_id.startswith("old") else 202)) as receiver:
        await put(storage, (f"old-{number}" for number in range(40)))
        relayer = await make_relayer(
            HttpSink(receiver.url), replace(QUICK, claim_batch=10, concurrency=4, longest_pause=2.0)
        )
        await until(lambda: relayer.postponed >= 40, "the old ones were tried")
        await put(storage, (f"new-{number}" for number in range(10)))
        await until(lambda: len(receiver.taken) == 10, "the new ones are sent")
        assert {id.partition("-")[0] for id in receiver.ids} == {"new"}
    found = await states(storage)
    assert all(found[f"old-{number}"] == "pending" for number in range(40))


async def test_events_of_a_relayer_that_died_are_sent_by_another(
    storage: Storage, make_storage: MakeStorage, make_relayer: MakeRelayer
) -> None:
    """W10: it dies between the claim and the sending; the lease ends by itself, and nobody has to look after it."""
    short = replace(QUICK, lease=2.0, timeout=1.5)
    stuck = ListSink(forever)
    doomed = await make_storage()
    await put(storage, range(5), key="A")
    dying = await make_relayer(stuck, short, on=doomed)
    await until(lambda: stuck.under_way == 1, "one is under way, and all are claimed")
    dying.kill()
    doomed.kill()
    assert set((await states(storage)).values()) == {"pending"}
    survivor = ListSink()
    await make_relayer(survivor, short)
    await until(lambda: are_over(storage), "all are sent")
    assert survivor.taken == ["0", "1", "2", "3", "4"]
