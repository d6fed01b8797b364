"""`edda outbox`: what people see and do."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edda.cli import main
from edda.core.model import Rejected, SendLater, Sent
from edda.databases import open_storage
from edda.storage.ports import Storage
from tests.engine.conditions import until
from tests.web.servers import Server, running

from .outbox_rows import are_over, put, records, states
from .receiver import Answer, receiving

SECRET = f"whsec_{base64.b64encode(b'a key').decode()}"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
async def shop(url: str) -> AsyncIterator[Storage]:
    storage = open_storage(url)
    await storage.open()
    await storage.migrate()
    yield storage
    await storage.close()


async def edda(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["outbox", *arguments])


async def fill(shop: Storage) -> None:
    """Four events: sent, dead, dead, put off."""
    await put(shop, ["a", "b", "c", "d"])
    one, two, three, four = await shop.claim_outbox(4, 1_000_000)
    later = await shop.now() + 3_600_000_000
    await shop.record_send_results(
        [
            Sent(one.seq),
            Rejected(two.seq, two.attempts, "400 Bad Request: no such order"),
            Rejected(three.seq, three.attempts, "410 Gone"),
            SendLater(four.seq, four.attempts, later, "503 busy"),
        ]
    )


async def test_the_list_says_of_each_event_how_it_stands(shop: Storage, url: str) -> None:
    await fill(shop)
    listed = await edda("list", "--db", url)
    assert listed.exit_code == 0
    assert listed.output.splitlines() == [
        "sent       1  order.shipped  a  a",
        "dead       1  order.shipped  b  b  400 Bad Request: no such order",
        "dead       1  order.shipped  c  c  410 Gone",
        "pending    1  order.shipped  d  d  503 busy",
    ]
    dead = await edda("list", "--db", url, "--state", "dead", "--limit", "1")
    assert dead.output.splitlines() == ["dead       1  order.shipped  b  b  400 Bad Request: no such order"]


async def test_a_long_list_is_read_page_by_page(shop: Storage, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edda.cli.output.MAX_PAGE_SIZE", 3)
    assert (await edda("list", "--db", url)).output == "no events\n"
    await put(shop, range(10))
    assert len((await edda("list", "--db", url)).output.splitlines()) == 10
    assert len((await edda("list", "--db", url, "--limit", "7")).output.splitlines()) == 7


async def test_dead_events_are_sent_again_on_request(shop: Storage, url: str) -> None:
    await fill(shop)
    assert (await edda("retry", "--db", url, "b")).output == "1 dead event is sent again\n"
    assert await states(shop) == {"a": "sent", "b": "pending", "c": "dead", "d": "pending"}
    assert (await edda("retry", "--db", url, "--all")).output == "1 dead event is sent again\n"
    assert (await records(shop))["c"].attempts == 0
    assert (await edda("retry", "--db", url, "--all")).output == "0 dead events are sent again\n"


async def test_a_retry_has_to_say_what(shop: Storage, url: str) -> None:
    for arguments in ([], ["b", "--all"]):
        refused = await edda("retry", "--db", url, *arguments)
        assert refused.exit_code == 2
        assert "or --all" in refused.output


@pytest.mark.parametrize("command", [["retry"], ["drop", "--yes"]], ids=["retry", "drop"])
async def test_ids_of_no_dead_event_are_named_and_nothing_is_done(shop: Storage, url: str, command: list[str]) -> None:
    await fill(shop)
    before = (await edda("list", "--db", url)).output
    refused = await edda(*command, "--db", url, "b", "nope", "a")
    assert refused.exit_code == 1
    assert "no dead event of the outbox has the id a, nope: nothing was done" in refused.output
    assert (await edda("list", "--db", url)).output == before


async def test_a_database_without_its_tables_is_an_error(tmp_path: Path) -> None:
    refused = await edda("list", "--db", f"sqlite:///{tmp_path}/empty.db")
    assert refused.exit_code == 1
    assert "edda migrate" in refused.output


async def test_the_relay_sends_until_it_is_told_to_stop(shop: Storage, url: str) -> None:
    async with receiving(lambda request, attempt: Answer(400 if request.event_id == "bad" else 202)) as receiver:
        command = ["-m", "edda", "outbox", "relay", "--db", url, "--broker-url", receiver.url]
        command += ["--secret-env", "SHOP_SECRET"]
        async with running(command, SHOP_SECRET=f"{SECRET} {SECRET}") as process:
            server = Server(process, 0)
            await server.hear("is running")
            await put(shop, ["1", "2", "bad"])
            await until(lambda: are_over(shop), "all are sent")
            assert await server.stop() == 0
            await server.hear("2 sent, 0 postponed, 1 rejected")
        assert sorted(receiver.ids) == ["1", "2"]
        assert receiver.taken[0].headers["webhook-signature"].count("v1,") == 2


async def test_a_relay_that_cannot_work_says_so_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_SECRET", "hunter2")
    for arguments, words in (
        (["--broker-url", "kafka://x"], "expected http"),
        (["--broker-url", "http://x", "--secret-env", "SHOP_SECRET"], "whsec_"),
        (
            ["--broker-url", "http://x", "--secret-env", "NO_SUCH_SECRET"],
            "NO_SUCH_SECRET: the environment variable is empty",
        ),
    ):
        refused = await edda("relay", "--db", url, *arguments)
        assert refused.exit_code == 2
        assert words in refused.output
        assert "hunter2" not in refused.output
