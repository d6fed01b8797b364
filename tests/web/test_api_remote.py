"""`RemoteController` against a server, over a real socket."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime

import httpx2
import pytest

from edda.control.controller import OPERATIONS, Controller
from edda.control.remote import RemoteController
from edda.control.views import (
    BulkRequest,
    CancelRequest,
    EventRequest,
    EventSearch,
    HistorySearch,
    MessageRequest,
    OutboxRequest,
    RetryRequest,
    RunSearch,
    StartRequest,
)
from edda.errors import (
    ActionRefusedError,
    AppError,
    ArgumentError,
    InstanceNotFoundError,
    NotFoundError,
    StorageUnavailableError,
    UnknownWorkflowError,
)
from edda.web import WebApp, WebOptions

from .fake_controller import Showcase, a_run
from .fakes import FakeService
from .listening import listening
from .servers import free_port
from .test_sessions import ALL, EVERYTHING, VIEW


@pytest.fixture
def showcase() -> Showcase:
    return Showcase()


@pytest.fixture
async def url(service: FakeService, showcase: Showcase) -> AsyncIterator[str]:
    async with listening(WebApp(service, WebOptions(tokens=ALL), control=lambda: showcase)) as url:
        yield url


@pytest.fixture
async def remote(url: str) -> AsyncIterator[RemoteController]:
    async with RemoteController(url, EVERYTHING) as controller:
        yield controller


def test_the_table_has_every_method_of_a_controller_and_the_client_is_one(showcase: Showcase) -> None:
    controllers: list[Controller] = [RemoteController("http://127.0.0.1:1"), showcase]
    methods = {name for name in vars(Controller) if not name.startswith("_")}
    composed = {"watch", "get_run_and_timeline"}
    assert methods == {operation.name for operation in OPERATIONS} | composed
    for operation in OPERATIONS:
        signatures = {str(inspect.signature(getattr(one, operation.name), eval_str=True)) for one in controllers}
        assert len(signatures) == 1


async def test_the_client_reads_the_same_as_the_server(remote: RemoteController, showcase: Showcase) -> None:
    search = RunSearch(("failed",), input=("a=1", "b=x y"), since=datetime(2026, 1, 1, tzinfo=UTC), limit=7)
    events, lines = EventSearch(type="order.paid", messages=True), HistorySearch(0, "pay:1", "0", 7)
    for one, other in (
        (remote.list_runs(search), showcase.list_runs(search)),
        (remote.count_runs(RunSearch(q="a&b=c")), showcase.count_runs(RunSearch(q="a&b=c"))),
        (remote.get_run("a/b?c#d é"), showcase.get_run("a/b?c#d é")),
        (remote.get_history("r-1", lines), showcase.get_history("r-1", lines)),
        (remote.get_timeline("r-1", 0), showcase.get_timeline("r-1", 0)),
        (remote.export_run("r-1"), showcase.export_run("r-1")),
        (remote.list_events(events), showcase.list_events(events)),
        (remote.get_event(1), showcase.get_event(1)),
        (remote.list_waits("t", None, 5), showcase.list_waits("t", None, 5)),
        (remote.list_channels(), showcase.list_channels()),
        (remote.list_outbox("dead", None, 5), showcase.list_outbox("dead", None, 5)),
        (remote.list_workers(), showcase.list_workers()),
        (remote.list_definitions(), showcase.list_definitions()),
        (remote.get_definition("order"), showcase.get_definition("order")),
        (remote.get_stats(), showcase.get_stats()),
    ):
        assert await one == await other
    asked = showcase.world.searches
    assert asked[0::2] == asked[1::2]


async def test_every_action_works_and_is_audited(remote: RemoteController, showcase: Showcase) -> None:
    assert (await remote.start_run(StartRequest("order", {"order_id": "A"}, "r-5"))).subject == "r-5"
    await remote.cancel_run("r-5", "enough")
    await remote.retry_run("r-5", RetryRequest(from_start=True))
    await remote.resume_run("r-5")
    await remote.delete_run("r-2")
    counted = await remote.act_on_runs(BulkRequest("cancel", search=RunSearch(("running",)), count_only=True))
    assert counted.count == 1
    await remote.send_event(EventRequest("order.paid", data={"amount": 1}))
    await remote.resend_event(1)
    await remote.publish_message(MessageRequest("prices", {"tea": 3}))
    await remote.retry_outbox(OutboxRequest(every=True))
    await remote.drop_outbox(OutboxRequest(("o-1",)))
    actions = [audit.action for audit in showcase.world.audits]
    done = ["start", "cancel", "retry", "resume", "delete", "send", "send", "publish", "retry outbox", "drop outbox"]
    assert actions == done
    assert {audit.who for audit in showcase.world.audits} == {"ops"}
    assert [audit.number for audit in (await remote.list_audits(None, 2)).items] == [10, 9]
    assert CancelRequest("enough").reason == showcase.world.audits[1].details


@pytest.mark.parametrize("id", ["count", "bulk", ".", "..", "a/../b", "a%2Fb", "%", "日本 é", "x" * 300, "a?b#c;d"])
async def test_an_id_may_have_any_character(remote: RemoteController, showcase: Showcase, id: str) -> None:
    showcase.world.runs[id] = a_run(id)
    assert (await remote.get_run(id)).run.id == id
    await remote.cancel_run(id)
    assert showcase.world.audits[0].subject == id


async def test_errors_keep_their_class_over_http(remote: RemoteController, showcase: Showcase) -> None:
    with pytest.raises(InstanceNotFoundError):
        await remote.get_run("r-9")
    with pytest.raises(NotFoundError, match="there is no event 99"):
        await remote.get_event(99)
    with pytest.raises(ActionRefusedError, match="only a run that failed"):
        await remote.retry_run("r-1", RetryRequest())
    with pytest.raises(UnknownWorkflowError, match="no workflow 'nix'"):
        await remote.start_run(StartRequest("nix"))
    with pytest.raises(ArgumentError, match="missing order_id"):
        await remote.start_run(StartRequest("order"))
    with pytest.raises(ArgumentError, match="limit: expected 1 to 200"):
        await remote.list_runs(RunSearch(limit=1000))
    showcase.world.error = StorageUnavailableError("gone")
    with pytest.raises(StorageUnavailableError):
        await remote.list_runs(RunSearch())


async def test_a_missing_token_or_scope_is_an_error_that_says_so(url: str) -> None:
    async with RemoteController(url) as nobody:
        with pytest.raises(AppError, match="a token is required"):
            await nobody.get_stats()
        with pytest.raises(AppError, match="a token is required"):
            await anext(nobody.watch())
    async with RemoteController(url, VIEW) as viewer:
        with pytest.raises(AppError, match="lacks the scope 'control'"):
            await viewer.resume_run("r-1")


async def test_a_server_that_is_not_there_is_named() -> None:
    async with RemoteController(f"http://127.0.0.1:{free_port()}") as remote:
        with pytest.raises(AppError, match=r"http://127.0.0.1:\d+ does not answer"):
            await remote.get_stats()
        with pytest.raises(AppError, match="does not answer"):
            await anext(remote.watch())


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (200, b"{}"), (502, b"<html>"), (404, b"[]")])
async def test_a_server_without_a_control_api_is_an_error_that_says_so(status: int, body: bytes) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, content=body))
    async with RemoteController("http://elsewhere.example", transport=transport) as remote:
        with pytest.raises(AppError, match="control API"):
            await remote.get_stats()


async def test_changes_are_watched_also_over_the_end_of_a_stream(
    remote: RemoteController, showcase: Showcase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edda.web.sse.MAX_SECONDS", 0.05)
    monkeypatch.setattr("edda.web.sse._TICK", 0.01)
    monkeypatch.setattr("edda.control.remote._RECONNECT_DELAY", 0.01)
    async with aclosing(remote.watch()) as marks:
        for number in range(3):
            assert await anext(marks) == f"mark-{number}"
            await showcase.world.touch()
