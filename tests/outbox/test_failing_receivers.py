"""A real HTTP receiver that errs in every way, and still gets everything, in order, the same at each try."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from edda.engine.outbox.sinks import HttpSink
from edda.storage.ports import Storage
from tests.conftest import MakeStorage
from tests.engine.conditions import until

from .conftest import QUICK, MakeRelayer
from .outbox_rows import are_over, in_order, put, records
from .receiver import HANG, HANG_UP, Answer, Request, receiving

RUDE = (
    Answer(500, body=b"oops"),
    Answer(429, (("retry-after", "0"),)),
    Answer(503, (("retry-after", "1"),), b"later"),
    Answer(HANG),
    Answer(HANG_UP),
    Answer(302, (("location", "http://127.0.0.1:1/elsewhere"),)),
)
KEYS = 5
EVENTS = 40


@pytest.mark.parametrize("mode", ["structured", "binary"])
async def test_everything_arrives_in_order_per_key_and_byte_for_byte(
    storage: Storage, make_storage: MakeStorage, make_relayer: MakeRelayer, mode: str
) -> None:
    chance = random.Random(17)

    def misbehave(request: Request, attempt: int) -> Answer:
        return chance.choice(RUDE) if attempt <= 2 and chance.random() < 0.5 else Answer()

    async with receiving(misbehave) as receiver:
        patient = replace(QUICK, timeout=1.0, lease=6.0)
        for on in (storage, await make_storage()):
            await make_relayer(HttpSink(receiver.url, mode=mode, timeout=1.0), patient, on=on)
        for number in range(EVENTS):
            await put(storage, [number], key=f"key-{number % KEYS}")
        await until(lambda: are_over(storage), "all are sent", within=90.0)
        for key in range(KEYS):
            arrived = in_order(id for id in receiver.ids if int(id) % KEYS == key)
            assert arrived == [str(number) for number in range(key, EVENTS, KEYS)]
        for number in range(EVENTS):
            assert len({(frozen(request), request.body) for request in receiver.tries_of(str(number))}) == 1
        assert len(receiver.requests) > EVENTS, "it was rude at all"


def frozen(request: Request) -> frozenset[tuple[str, str]]:
    return frozenset(request.headers.items())


async def test_a_400_is_dead_with_what_the_receiver_said(storage: Storage, make_relayer: MakeRelayer) -> None:
    async with receiving(lambda request, attempt: Answer(400, body="schön, aber falsch".encode())) as receiver:
        await put(storage, ["1"])
        await make_relayer(HttpSink(receiver.url))
        await until(lambda: are_over(storage), "it is not tried again")
        record = (await records(storage))["1"]
        assert record.state == "dead"
        assert record.reason == "400 Said: schön, aber falsch"
        assert len(receiver.requests) == 1
