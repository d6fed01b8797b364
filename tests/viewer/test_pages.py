"""Every page over the showcase: contents, forms, and escaping."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from urllib.parse import quote

import httpx2
import pytest

from edda.control.views import (
    ActionResult,
    BulkRequest,
    EventRequest,
    EventSearch,
    MessageRequest,
    OutboxRequest,
    RetryRequest,
    RunSearch,
    StartRequest,
)
from edda.errors import ArgumentError
from edda.viewer.viewer import Viewer
from edda.web import Token, TokenScope, WebApp, WebOptions
from tests.viewer.hostile import PAYLOADS, HostileText
from tests.viewer.screenshots import EMPTY, PAGES
from tests.viewer.showcase import ShowcaseController
from tests.web.fakes import FakeService

OK = {name: path for name, path in PAGES.items() if name != "missing"}


@asynccontextmanager
async def client_for(
    controller: ShowcaseController, options: WebOptions | None = None
) -> AsyncIterator[httpx2.AsyncClient]:
    viewer = Viewer(lambda caller: controller)
    web = WebApp(FakeService(), options, control=lambda: controller, viewer=lambda: viewer)
    transport = httpx2.ASGITransport(app=web, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001/_edda") as client:
        yield client


class Skeleton(HTMLParser):
    """The elements and attributes of a page, its text, and its links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # The colour of JSON tokens and the wrapping of texts may differ, the elements may not.
        self.tags.append((tag, *sorted(name for name, _ in attrs)))
        self.links += [value or "" for name, value in attrs if name in {"href", "src", "action", "formaction"}]
        self.texts += [value for name, value in attrs if value and name in {"title", "value", "data-copy"}]

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}",))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", OK)
async def test_every_page_is_shown(name: str) -> None:
    async with client_for(ShowcaseController()) as client:
        answer = await client.get(OK[name])
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "style=" not in answer.text
    assert "<script>" not in answer.text


@pytest.mark.parametrize("name", EMPTY)
async def test_an_empty_page_shows_an_example(name: str) -> None:
    async with client_for(ShowcaseController(empty=True)) as client:
        answer = await client.get(PAGES[name])
    assert answer.status_code == 200
    assert 'class="empty"' in answer.text


async def load_page(hostile: HostileText | None, name: str) -> Skeleton:
    """The same page, with or without hostile strings in every field."""
    controller = ShowcaseController(make_text=hostile) if hostile else ShowcaseController()
    path, mark, query = PAGES[name].partition("?")
    if hostile is not None:
        first, *rest = path.strip("/").split("/")
        if first in {"runs", "start"} and rest and rest[0] != "bulk":
            path = "/".join(["", first, quote(hostile(rest[0]), safe=""), *rest[1:]])
        for key in ("step", "run"):
            head, found, text = query.rpartition(f"{key}=")
            query = f"{head}{found}{quote(hostile(text), safe='')}" if found else query
    async with client_for(controller) as client:
        answer = await client.get(f"{path}{mark}{query}")
    assert answer.status_code == 200
    return Skeleton(answer.text)


@pytest.mark.parametrize("name", [name for name in OK if name != "run-graph"])
async def test_a_hostile_string_stays_a_string(name: str) -> None:
    plain = await load_page(None, name)
    for round in range(4):
        make_text = HostileText(round)
        hostile = await load_page(make_text, name)
        assert hostile.tags == plain.tags
        assert not [link for link in hostile.links if not link.startswith(("/_edda", "#"))]


async def test_a_hostile_string_in_a_graph_stays_a_string() -> None:
    """A test of its own, because names decide the positions of the boxes."""
    known = {tag for tag in (await load_page(None, "run-graph")).tags if not tag[0].startswith("/")}
    for round in range(4):
        hostile = await load_page(HostileText(round), "run-graph")
        assert {tag[0] for tag in hostile.tags if not tag[0].startswith("/")} <= {tag[0] for tag in known}
        assert not [name for tag in hostile.tags for name in tag[1:] if name.startswith("on")]


def test_there_are_many_hostile_strings() -> None:
    assert len(set(PAYLOADS)) >= 500


async def test_what_is_searched_for_stays_a_string() -> None:
    async with client_for(ShowcaseController()) as client:
        expected: list[tuple[str, ...]] = []
        for payload in ("something", *PAYLOADS):
            names = ("q", "workflow", "id", "input", "parent")
            answer = await client.get("/runs?" + "&".join(f"{name}={quote(payload, safe='')}" for name in names))
            assert answer.status_code == 200
            found = Skeleton(answer.text).tags
            expected = expected or found
            assert found == expected, payload


# Requests


async def test_filters_are_in_the_address() -> None:
    async with client_for(ShowcaseController()) as client:
        answer = await client.get("/runs?status=failed&q=CardDeclined")
    assert "order-A-15" in answer.text
    assert "order-A-14" not in answer.text
    assert "status=failed&amp;status=parked" in answer.text.replace("q=CardDeclined&amp;", "")


@pytest.mark.parametrize("page", ["runs", "events"])
async def test_a_time_that_is_none_is_explained(page: str) -> None:
    async with client_for(ShowcaseController()) as client:
        answer = await client.get(f"/{page}?since=yesterday")
    assert answer.status_code == 422
    assert "expected a time such as" in answer.text


async def test_events_are_filtered_by_time() -> None:
    controller = ShowcaseController()
    async with client_for(controller) as client:
        page = await client.get("/events?since=2026-01-31T08:00&until=2026-02-01T08:00%2B01:00")
    hour = datetime(2026, 1, 31, 8, tzinfo=UTC)
    assert controller.searched == [EventSearch(since=hour, until=hour + timedelta(hours=23))]
    assert 'name="since" value="2026-01-31T08:00"' in page.text


async def test_what_is_not_there_is_a_page_too() -> None:
    async with client_for(ShowcaseController()) as client:
        for path in ("/runs/nobody", "/events/99999999", "/events/x", "/start/nothing"):
            answer = await client.get(path)
            assert answer.status_code == 404
            assert "text/html" in answer.headers["content-type"]
        assert (await client.get("/nowhere")).status_code == 404
        assert (await client.get("/static/../pages.py")).status_code == 404
        assert (await client.get("/static/%2e%2e%2fpages.py")).status_code == 404


async def test_static_files_can_be_cached_forever() -> None:
    async with client_for(ShowcaseController()) as client:
        page = (await client.get("/")).text
        for name in ("page.css", "page.js", "theme.js", "icon.svg"):
            assert f"/_edda/static/{name}?" in page
            answer = await client.get(f"/static/{name}")
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]


async def test_a_long_history_comes_in_pages() -> None:
    controller = ShowcaseController()
    controller.lines = 450
    async with client_for(controller) as client:
        first = (await client.get("/runs/order-A-14?view=history")).text
        assert "Entries 1 to 200 of 450" in first
        assert first.count('<tr data-key="') == 200
        middle = (await client.get("/runs/order-A-14?view=history&cursor=200")).text
        assert "Entries 201 to 400 of 450" in middle
        for link in ("cursor=0", "cursor=400", "cursor=250"):
            assert f"view=history&amp;{link}" in middle
        last = (await client.get("/runs/order-A-14?view=history&cursor=250")).text
    assert "Entries 251 to 450 of 450" in last
    assert ">later<" not in last


async def test_a_long_timeline_begins_with_the_newest_steps() -> None:
    controller = ShowcaseController()
    controller.lines = 450
    async with client_for(controller) as client:
        page = (await client.get("/runs/order-A-14")).text
        assert "Steps 251 to 450 of 450, from 4 min 10 s after the start" in page
        assert page.count('class="bar ') == 200
        earlier = (await client.get("/runs/order-A-14?from=51")).text
    assert "Steps 52 to 251 of 450" in earlier


async def test_a_step_is_shown_with_its_own_lines() -> None:
    controller = ShowcaseController()
    controller.lines = 450
    async with client_for(controller) as client:
        page = (await client.get("/runs/order-A-14?step=tick:17")).text
    assert page.count("<h3>Result</h3>") == 1


# Actions


async def test_the_result_of_an_action_is_shown_once() -> None:
    controller = ShowcaseController()
    async with client_for(controller) as client:
        answer = await client.post("/runs/order-A-17/cancel", data={"reason": "a storm"})
        assert answer.status_code == 303
        assert answer.headers["location"] == "/_edda/runs/order-A-17"
        assert controller.done == [("cancel", ("order-A-17", "a storm"))]
        other = await client.get("/runs", headers={"X-Edda-Live": "1"})
        assert "It will end" not in other.text
        page = await client.get("/runs/order-A-17")
        assert "It will end as soon as its code lets it." in page.text
        assert "It will end" not in (await client.get("/runs/order-A-17")).text


@pytest.mark.parametrize(
    ("path", "form", "done"),
    [
        ("/runs/order-A-15/retry", {"from_start": "1"}, ("retry", ("order-A-15", RetryRequest(from_start=True)))),
        ("/runs/order-A-17/resume", {}, ("resume", "order-A-17")),
        ("/runs/order-A-14/delete", {}, ("delete", "order-A-14")),
        ("/events/1041/resend", {}, ("resend", 1041)),
        ("/outbox/retry", {"event": "out-0"}, ("retry_outbox", OutboxRequest(("out-0",)))),
        ("/outbox/drop", {"every": "1"}, ("drop_outbox", OutboxRequest(every=True))),
        (
            "/runs/bulk",
            {"action": "cancel", "run": ["a", "b"], "reason": "a storm"},
            ("bulk", BulkRequest("cancel", ("a", "b"), reason="a storm")),
        ),
        ("/runs/bulk", {"action": "delete", "run": "a"}, ("bulk", BulkRequest("delete", ("a",)))),
        (
            "/runs/bulk",
            {"action": "retry", "every": "1", "status": "failed", "from_start": "1"},
            ("bulk", BulkRequest("retry", search=RunSearch(status=("failed",)), from_start=True)),
        ),
        (
            "/events/send",
            {"type": "parcel.lost", "source": "/dhl", "data": '{"n": 1}'},
            ("send", EventRequest("parcel.lost", "/dhl", {"n": 1})),
        ),
        (
            "/channels/publish",
            {"channel": "kitchen", "data": '{"n": 1}', "target": ""},
            ("publish", MessageRequest("kitchen", {"n": 1})),
        ),
    ],
)
async def test_a_form_calls_its_action(path: str, form: dict[str, str], done: tuple[str, object]) -> None:
    controller = ShowcaseController()
    async with client_for(controller) as client:
        answer = await client.post(path, data=form)
    assert answer.status_code == 303
    assert controller.done == [done]


@pytest.mark.parametrize("action", ["cancel", "retry", "resume", "delete"])
async def test_bulk_actions_count_first(action: str) -> None:
    controller = ShowcaseController()
    async with client_for(controller) as client:
        assert f'name="action" value="{action}"' in (await client.get("/runs")).text
        answer = await client.get(f"/runs/bulk?action={action}&every=1&status=running")
    assert f"{action.title()} {len(controller.runs)} runs?" in answer.text
    assert controller.done == []


async def test_a_bulk_action_by_filter_says_which_filter() -> None:
    async with client_for(ShowcaseController()) as client:
        some = (await client.get("/runs/bulk?action=delete&every=1&status=failed&input=order.id%3DA-17")).text
        every = (await client.get("/runs/bulk?action=delete&every=1&q=")).text
    for words in ("status = failed", "input = order.id=A-17"):
        assert words in some
    assert "this applies to every run" not in some
    assert "this applies to every run" in every


async def test_a_bulk_action_without_runs_is_refused() -> None:
    async with client_for(ShowcaseController()) as client:
        assert (await client.get("/runs/bulk?action=cancel")).status_code == 422
        assert (await client.get("/runs/bulk?action=burn&every=1")).status_code == 422


# The form for what a run waits for


async def test_a_run_that_waits_shows_a_form_for_the_very_event() -> None:
    async with client_for(ShowcaseController()) as client:
        page = (await client.get("/runs/order-A-17")).text
    assert 'name="data.amount"' in page
    assert 'name="data.order_id" value="A-17"' in page


async def test_an_answer_is_sent_to_the_run_alone() -> None:
    controller = ShowcaseController()
    form = {"_step": "wait_event:1", "data.order_id": "A-17", "data.amount": "28.8", "data.method": "cash"}
    async with client_for(controller) as client:
        answer = await client.post("/runs/order-A-17/answer", data=form)
    assert answer.status_code == 303
    data = {"order_id": "A-17", "amount": 28.8, "method": "cash"}
    assert controller.done == [("send", EventRequest("payment.completed", data=data, target="order-A-17"))]


@pytest.mark.parametrize(("mode", "target"), [("broadcast", None), ("competing", None), ("direct", "kitchen-4")])
async def test_a_message_that_a_run_waits_for_is_published_on_its_channel(mode: str, target: str | None) -> None:
    controller = ShowcaseController()
    controller.mode = mode
    form = {"_step": "receive:1", "data.dish": "soup", "data.portions": "2"}
    async with client_for(controller) as client:
        page = (await client.get("/runs/kitchen-4")).text
        assert "Publish on kitchen" in page
        assert ("only this run receives it" in page) == (mode == "direct")
        wrong = await client.post("/runs/kitchen-4/answer", data={**form, "data.portions": "much"})
        assert wrong.status_code == 422
        assert (await client.post("/runs/kitchen-4/answer", data=form)).status_code == 303
    order = MessageRequest("kitchen", {"dish": "soup", "portions": 2}, target=target)
    assert controller.done == [("publish", order)]


async def test_a_wrong_answer_comes_back_with_what_was_entered() -> None:
    controller = ShowcaseController()
    form = {"_step": "wait_event:1", "data.order_id": "A-17", "data.amount": "much"}
    async with client_for(controller) as client:
        answer = await client.post("/runs/order-A-17/answer", data=form)
    assert answer.status_code == 422
    assert "must be a number" in answer.text
    assert 'value="much"' in answer.text
    assert controller.done == []


async def test_an_answer_that_comes_too_late_is_not_sent() -> None:
    controller = ShowcaseController()
    async with client_for(controller) as client:
        answer = await client.post("/runs/order-A-14/answer", data={"_step": "wait_event:1"})
        assert answer.status_code == 303
        assert "nothing was sent" in (await client.get("/runs/order-A-14")).text
    assert controller.done == []


async def test_a_workflow_is_started_by_its_form() -> None:
    controller = ShowcaseController()
    form = {
        "data.order_id": "A-18",
        "data.customer.name": "Grace",
        "data.items.0.sku": "TEA-250",
        "data.items.0.price": "8.4",
        "data.items.0.count": "2",
        "_id": "order-A-18",
    }
    async with client_for(controller) as client:
        answer = await client.post("/start/order", data=form)
    assert answer.status_code == 303
    items = [{"sku": "TEA-250", "count": 2, "price": 8.4}]
    value = {"order_id": "A-18", "customer": {"name": "Grace"}, "items": items, "express": False}
    assert controller.done == [("start", StartRequest("order", value, "order-A-18"))]


async def test_another_row_is_asked_for_without_starting() -> None:
    controller = ShowcaseController()
    async with client_for(controller) as client:
        answer = await client.post("/start/order", data={"_add": "data.items", "data.items.0.sku": "TEA-250"})
    assert answer.status_code == 200
    assert 'name="data.items.2.sku"' in answer.text
    assert controller.done == []


# Scopes


TOKENS = (
    Token("watcher", frozenset({TokenScope.VIEW}), "Zk3v9Qw8RtYpLm2NbVcXsD4fGhJ6aE7u"),
    Token("boss", frozenset(TokenScope), "Bq7v9Qw8RtYpLm2NbVcXsD4fGhJ6aE7u"),
)


async def test_without_a_login_there_is_a_login_and_nothing_else() -> None:
    async with client_for(ShowcaseController(), WebOptions(tokens=TOKENS)) as client:
        answer = await client.get("/runs?status=failed")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/_edda/login?next=%2F_edda%2Fruns%3Fstatus%3Dfailed"
        login = await client.get(answer.headers["location"].removeprefix("/_edda"))
        assert 'name="token"' in login.text
        assert "order-A" not in login.text
        assert (await client.get("/static/page.css")).status_code == 200


async def test_without_further_scopes_no_action_is_shown_or_accepted() -> None:
    controller = ShowcaseController()
    options = WebOptions(tokens=TOKENS)
    headers = {"Authorization": "Bearer Zk3v9Qw8RtYpLm2NbVcXsD4fGhJ6aE7u"}
    async with client_for(controller, options) as client:
        page = await client.get("/runs/order-A-17", headers=headers)
        assert "Cancel…" not in page.text
        assert "Answer:" not in page.text
        for path in ("/runs/order-A-17/cancel", "/runs/order-A-17/answer", "/start/order", "/events/send"):
            assert (await client.post(path, headers=headers)).status_code == 403
    assert controller.done == []


async def test_a_read_only_viewer_refuses_actions() -> None:
    controller = ShowcaseController()
    async with client_for(controller, WebOptions(read_only=True)) as client:
        assert "Cancel…" not in (await client.get("/runs/order-A-17")).text
        answer = await client.post("/runs/order-A-17/cancel")
    assert answer.status_code == 403
    assert controller.done == []


async def test_the_whole_run_can_be_saved() -> None:
    async with client_for(ShowcaseController()) as client:
        answer = await client.get("/runs/order-A-14/export")
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''order-A-14.json"
    assert answer.json() == {"run": "order-A-14"}


async def test_an_error_of_the_code_is_shown_in_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ShowcaseController()

    async def refuse(order: StartRequest) -> ActionResult:
        raise ArgumentError("order(): tea is sold out")

    monkeypatch.setattr(controller, "start_run", refuse)
    form = {"data.order_id": "A-18", "data.customer.name": "Grace"}
    async with client_for(controller) as client:
        answer = await client.post("/start/order", data=form)
    assert answer.status_code == 422
    assert "tea is sold out" in answer.text
    assert 'value="Grace"' in answer.text


async def test_a_token_opens_the_page_that_was_asked_for() -> None:
    async with client_for(ShowcaseController(), WebOptions(tokens=TOKENS)) as client:
        form = {"token": "Bq7v9Qw8RtYpLm2NbVcXsD4fGhJ6aE7u", "next": "/_edda/runs?status=failed"}
        own = {"Sec-Fetch-Site": "same-origin"}
        answer = await client.post("/login", data=form, headers=own)
        assert answer.headers["location"] == "/_edda/runs?status=failed"
        page = await client.get("/runs?status=failed")
        assert "order-A-15" in page.text
        assert "boss</button>" in page.text
        assert (await client.post("/runs/order-A-17/resume", headers=own)).status_code == 303
        assert (await client.post("/runs/order-A-17/resume")).status_code == 403
        await client.post("/logout", headers=own)
        assert (await client.get("/runs")).status_code == 303


async def test_every_link_begins_where_the_app_is_mounted() -> None:
    controller = ShowcaseController()
    web = WebApp(FakeService(), control=lambda: controller, viewer=lambda: Viewer(lambda caller: controller))
    transport = httpx2.ASGITransport(app=web, root_path="/shop", client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001/shop/_edda") as client:
        for path in ("/", "/runs", "/runs/order-A-17", "/events/1041"):
            page = await client.get(path)
            assert page.status_code == 200
            assert not [link for link in Skeleton(page.text).links if not link.startswith(("/shop/_edda", "#"))]
        answer = await client.post("/runs/order-A-17/resume")
    assert answer.headers["location"] == "/shop/_edda/runs/order-A-17"
    assert "Path=/shop/_edda;" in answer.headers["set-cookie"]
