"""What goes wrong in the reference with events, row by row, and holds here."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edda import EddaApp, EventTimeoutError, WorkflowContext, activity, send_event, wait_event, workflow
from edda.testing import VirtualApp
from edda.web import Token, TokenScope
from tests.conftest import Database, MakeDatabase
from tests.web.calls import EVENT, Reply, ask
from tests.web.servers import Server, running

from .conditions import until_out_of_memory
from .conftest import RESTLESS, MakeApp, url_of
from .events import registered, result_of, send, start_waiting, stored, until_waiting_for
from .programs import inbox

NEWS_ONLY = replace(RESTLESS, poll=60.0)
"""Whoever wakes up sooner was told so."""


@asynccontextmanager
async def served(database: Database) -> AsyncIterator[Server]:
    """The program in programs/inbox.py, in a process of its own."""
    command = ["-m", "edda", "serve", "tests.engine.programs.inbox:app", "--port", "0"]
    async with running(command, EDDA_DB_URL=url_of(database)) as process:
        server = Server(process, 0)
        address = await server.hear("edda listens on")
        server.port = int(address.rpartition(":")[2])
        yield server


def headers_of(event_id: object, event_type: str) -> dict[str, str]:
    event = EVENT | {"ce-id": str(event_id), "ce-type": event_type}
    return {name: value for name, value in event.items() if name != "host"}


async def test_an_event_wakes_the_run_of_another_process_every_time(make_app: MakeApp) -> None:
    """W3: eight wake-ups in a row, each by the other process's word, none by a look half a minute later."""

    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        return [(await wait_event(ctx, "part")).data for _ in range(8)]

    worker, door = await make_app(settings=NEWS_ONLY), await make_app(worker=False)
    run_id = await start_waiting(worker, order)
    for number in range(8):
        await until_waiting_for(worker, run_id, f"part:{number + 1}")
        await until_out_of_memory(worker)
        await send(door, "part", number)
    assert await result_of(door, run_id) == list(range(8))


@pytest.mark.databases("sqlite")
async def test_half_a_body_and_a_disconnect_harm_nobody(make_database: MakeDatabase) -> None:
    """W5: a sender that goes away in the middle costs nothing, and the next one is served."""
    async with served(make_database("sqlite")) as server:
        for _ in range(20):
            await send_half(server)
        spent = await cpu_time_of_a_second(server.process.pid)
        async with httpx2.AsyncClient(trust_env=False, timeout=20) as client:
            answer = await client.post(f"{server.url}/events", headers=headers_of(1, "ordered"), json={"number": 1})
        assert answer.status_code == 202
    assert spent < 0.7, "the loop spins"


async def send_half(server: Server) -> None:
    _, writer = await server.connect()
    head = "".join(f"{name}: {value}\r\n" for name, value in EVENT.items())
    writer.write(f"POST /events HTTP/1.1\r\n{head}content-length: 1000\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def cpu_time_of_a_second(pid: int) -> float:
    before = cpu_time(pid)
    await asyncio.sleep(1)  # what is measured is what happens in a time
    return cpu_time(pid) - before


def cpu_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_what_was_accepted_is_stored_even_if_the_process_dies_at_once(
    shared_database: Database, make_app_on: MakeApp
) -> None:
    """W7: a 202 is said after the commit, so kill -9 right behind it loses nothing."""
    accepted: list[str] = []

    async with served(shared_database) as server, httpx2.AsyncClient(trust_env=False) as client:

        async def post(number: int) -> None:
            body = {"number": number}
            answer = await client.post(f"{server.url}/events", headers=headers_of(number, "ordered"), json=body)
            assert answer.status_code == 202
            accepted.append(str(number))
            if len(accepted) == 20:
                server.process.kill()

        await asyncio.gather(*(post(number) for number in range(40)), return_exceptions=True)
        await server.process.wait()
    assert len(accepted) >= 20
    survivor = await make_app_on(on=shared_database, workflows=[inbox.ordered])
    events = {event.id for event in await stored(survivor, "ordered")}
    assert events.issuperset(accepted)
    page = await survivor.find_instances(workflow_name="ordered")
    results = [await result_of(survivor, found["instance_id"]) for found in page["instances"]]
    assert sorted(map(str, results)) == sorted(events), "and each started its run"


async def test_an_event_before_the_wait_is_not_lost(app: EddaApp) -> None:
    """W19: nobody has to subscribe first."""

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        await send_event("paid", "/shop", 7)
        return (await wait_event(ctx, "paid")).data

    assert await app.run(order) == 7


async def test_two_orders_get_each_its_own_event_and_an_address_is_kept(app: EddaApp) -> None:
    """W20: one order's payment does not wake the other, and eddainstanceid is for one run alone."""

    @workflow
    async def order(ctx: WorkflowContext, order_id: str) -> list[Any]:
        paid = await wait_event(ctx, "paid", match={"order_id": order_id})
        note = await wait_event(ctx, "note")
        return [paid.data["order_id"], note.data]

    a, b = [await start_waiting(app, order, order_id) for order_id in "AB"]
    await send(app, "note", "for A", extensions={"eddainstanceid": a})
    await send(app, "note", "for B", target_instance_id=b)
    await send(app, "paid", {"order_id": "A"})
    assert await result_of(app, a) == ["A", "for A"]
    assert await registered(app, b) == ["paid:1"]
    await send(app, "paid", {"order_id": "B"})
    assert await result_of(app, b) == ["B", "for B"]


async def test_runs_that_one_event_wakes_work_side_by_side(app: EddaApp) -> None:
    """W25: twelve activities meet in the middle, so none of them waits for another to be done."""
    begun, all_begun = 0, asyncio.Event()

    @activity
    async def work(ctx: WorkflowContext) -> None:
        nonlocal begun
        begun += 1
        if begun == 12:
            all_begun.set()
        await asyncio.wait_for(all_begun.wait(), 30)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "go")
        await work(ctx)

    run_ids = await asyncio.gather(*(start_waiting(app, order) for _ in range(12)))
    await send(app, "go")
    await asyncio.gather(*(result_of(app, run_id) for run_id in run_ids))


async def test_an_event_after_a_quiet_time_is_noticed_at_once(make_app: MakeApp) -> None:
    """W25: who looks less often while nothing happens still looks often enough."""

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid")).data

    worker, door = await make_app(settings=NEWS_ONLY), await make_app(worker=False)
    run_id = await start_waiting(worker, order)
    await asyncio.sleep(2.5)  # the pauses between two looks are at their longest then
    sent = time.monotonic()
    await send(door, "paid", 7)
    assert await result_of(door, run_id) == 7
    assert time.monotonic() - sent < 5


async def test_no_wake_up_is_lost_between_looking_and_registering(make_app: MakeApp) -> None:
    """W28: events come at every moment of the wait's making, from another process; none is missed or passed over."""

    @workflow
    async def order(ctx: WorkflowContext, number: int) -> list[int]:
        return [(await wait_event(ctx, "part", match={"run": number})).data["n"] for _ in range(15)]

    worker, door = await make_app(settings=NEWS_ONLY), await make_app(worker=False)
    run_ids = [await worker.start(order, number) for number in range(5)]

    async def send_all(number: int) -> None:
        for n in range(15):
            await send(door, "part", {"run": number, "n": n})
            await asyncio.sleep(0.001 * number)

    await asyncio.gather(*map(send_all, range(5)))
    for run_id in run_ids:
        assert await result_of(worker, run_id) == list(range(15))


async def test_data_that_is_no_object_arrives_as_it_is(app: EddaApp) -> None:
    """W31: a list stays a list, and bytes stay bytes, whether they waited or were waited for."""

    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        first = await wait_event(ctx, "any")
        await wait_event(ctx, "go")
        return [first.data, *[(await wait_event(ctx, "any")).data for _ in range(3)]]

    run_id = await start_waiting(app, order)
    for data in (b"\xff\x00", [1, 2, 3], b"", "text"):
        await send(app, "any", data)
    await send(app, "go")
    assert await result_of(app, run_id) == [b"\xff\x00", [1, 2, 3], b"", "text"]


async def post(app: EddaApp, event_id: str, body: bytes = b'{"number": 1}', **headers: str) -> Reply:
    event = EVENT | {"ce-id": event_id, "ce-type": "ordered"} | headers
    return await ask(app, headers=event, body=body)


async def test_the_same_event_again_starts_nothing(make_app: MakeApp) -> None:
    """W34: ten events, each sent three times, are ten runs."""
    app = await make_app(workflows=[inbox.ordered])
    for _ in range(3):
        replies = await asyncio.gather(*(post(app, str(number)) for number in range(10)))
        assert [reply.status for reply in replies] == [202] * 10
    page = await app.find_instances(workflow_name="ordered")
    assert len(page["instances"]) == 10


async def test_a_body_over_the_limit_is_refused_and_not_stored(make_app: MakeApp) -> None:
    """W34: fifty megabytes are not read to the end."""
    app = await make_app(workflows=[inbox.ordered])
    body = json.dumps({"number": 1, "ballast": "x" * 1_100_000}).encode()
    assert (await post(app, "1", body)).status == 413
    assert (await post(app, "1", b"{}", **{"content-length": "50000000"})).status == 413
    assert await stored(app, "ordered") == []


async def test_who_has_no_token_neither_sends_events_nor_cancels_runs(make_app: MakeApp) -> None:
    """W34: a stranger cannot end a run."""
    secret = "Vd0vzRQnC0d2yqW1sZ6b8HfJpK4uTgXe"
    tokens = [Token("ops", frozenset({TokenScope.EVENTS, TokenScope.CONTROL}), secret)]
    app = await make_app(workflows=[inbox.ordered, inbox.order], tokens=tokens)
    run_id = await start_waiting(app, inbox.order)
    elsewhere = ("192.0.2.7", 50000)
    assert (await ask(app, client=elsewhere)).status == 401
    assert (await ask(app, path=f"/cancel/{run_id}", client=elsewhere)).status == 401
    assert await registered(app, run_id) == ["paid:1"]
    trusted = EVENT | {"authorization": f"Bearer {secret}", "ce-type": "paid"}
    assert (await ask(app, headers=trusted, body=b"7")).status == 202
    assert await result_of(app, run_id) == 7


async def test_the_end_of_a_wait_is_an_event_timeout_error_and_comes_on_time(edda_app: VirtualApp) -> None:
    """W38: EventTimeoutError, which `except TimeoutError` catches too, at the second that was asked for."""

    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        begun = ctx.now()
        try:
            await wait_event(ctx, "paid", timeout_seconds=1)
        except TimeoutError as error:
            return [type(error) is EventTimeoutError, (ctx.now() - begun).total_seconds()]
        return []

    assert await edda_app.run(order) == [True, pytest.approx(1, abs=0.01)]


async def test_a_wait_of_a_moment_takes_a_moment(app: EddaApp) -> None:
    """W38: a wait of 0.2 seconds is over long before the ten seconds that a second took."""

    @workflow
    async def order(ctx: WorkflowContext) -> float:
        begun = ctx.now()
        with pytest.raises(EventTimeoutError):
            await wait_event(ctx, "paid", timeout_seconds=0.2)
        return (ctx.now() - begun).total_seconds()

    assert 0.2 <= await app.run(order) < 5
