"""A logged-in browser with a page of another origin: what that page can do, read and show."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from playwright.async_api import Browser, Page

from edda.web import Token, TokenScope, WebOptions
from tests.viewer.browsers import launch
from tests.viewer.serving import serve
from tests.viewer.showcase import ShowcaseController

pytestmark = [pytest.mark.browser, pytest.mark.processes]

SECRET = "Bq7v9Qw8RtYpLm2NbVcXsD4fGhJ6aE7u"
GUARDED = WebOptions(tokens=(Token("boss", frozenset(TokenScope), SECRET),))
# All of these are this machine; over plain http to a non-loopback name a browser sends the fewest headers.
OURS = "edda.example"
OTHERS = {"another site": "evil.example", "a site below ours": "evil.edda.example", "another port of ours": OURS}
NAMES = ", ".join(f"MAP {name} 127.0.0.1" for name in (OURS, *OTHERS.values()))
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: 15\r\n\r\n<h1>A prize</h1"


@dataclass(frozen=True)
class Scene:
    page: Page
    """Of another origin."""
    ours: str
    controller: ShowcaseController


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with launch(f"--host-resolver-rules={NAMES}") as browser:
        yield browser


@asynccontextmanager
async def others() -> AsyncIterator[int]:
    """The port of an unrelated server."""

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def lured(browser: Browser, name: str) -> AsyncIterator[Scene]:
    """A user has logged in here, and then followed a link."""
    controller = ShowcaseController()
    async with serve(controller, GUARDED) as base, others() as port:
        ours = base.replace("127.0.0.1", OURS)
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"{ours}/_edda/login")
        await page.fill("[name=token]", SECRET)
        await page.click("button.main")
        await page.wait_for_url(f"{ours}/_edda/")
        await page.goto(f"http://{name}:{port}/")
        yield Scene(page, ours, controller)
        await context.close()


POST = """([address, fields]) => {
  const form = document.createElement("form");
  form.method = "post";
  form.action = address;
  for (const [name, value] of Object.entries(fields)) {
    const input = document.createElement("input");
    [input.name, input.value] = [name, value];
    form.append(input);
  }
  document.body.append(form);
  form.submit();
}"""
ACTS = {
    "/_edda/runs/order-A-17/cancel": {"reason": "a prize"},
    "/_edda/start/order": {"data.order_id": "A", "data.customer.name": "Ada"},
    "/_edda/events/send": {"type": "prize.won", "data": "{}"},
    "/_edda/api/v1/runs/order-A-17/cancel": {},
    "/_edda/logout": {},
}


@pytest.mark.parametrize("who", OTHERS)
async def test_a_page_of_another_origin_changes_nothing(browser: Browser, who: str) -> None:
    async with lured(browser, OTHERS[who]) as scene:
        elsewhere = scene.page.url
        for path, fields in ACTS.items():
            await scene.page.goto(elsewhere)
            async with scene.page.expect_navigation() as navigation:
                await scene.page.evaluate(POST, [f"{scene.ours}{path}", fields])
            answer = await navigation.value
            assert answer is not None
            assert answer.status == 403, path
        await scene.page.goto(f"{scene.ours}/_edda/runs")
        assert await scene.page.get_by_role("button", name="boss").count() == 1, "still logged in"
        assert scene.controller.done == []


async def test_a_page_of_our_own_origin_changes_it(browser: Browser) -> None:
    """Proves that the test before this one can fail."""
    async with lured(browser, OURS) as scene:
        await scene.page.goto(f"{scene.ours}/_edda/audit")
        async with scene.page.expect_navigation():
            await scene.page.evaluate(POST, [f"{scene.ours}/_edda/runs/order-A-17/cancel", {"reason": "a storm"}])
        assert scene.controller.done == [("cancel", ("order-A-17", "a storm"))]


READ = """(address) => Promise.all([
  fetch(address, { credentials: "include" }).then((answer) => answer.text(), () => "hidden"),
  fetch(address, { mode: "no-cors", credentials: "include" }).then((answer) => answer.text(), () => "hidden"),
  new Promise((tell) => {
    const script = document.createElement("script");
    script.onload = () => tell("run");
    script.onerror = () => tell("hidden");
    script.src = address;
    document.body.append(script);
  }),
])"""


@pytest.mark.parametrize("who", OTHERS)
async def test_a_page_of_another_origin_reads_nothing(browser: Browser, who: str) -> None:
    async with lured(browser, OTHERS[who]) as scene:
        for path in ("/_edda/runs", "/_edda/api/v1/runs", "/_edda/metrics"):
            read = await scene.page.evaluate(READ, f"{scene.ours}{path}")
            assert set(read) <= {"hidden", ""}, path


FRAME = """([kind, address]) => new Promise((tell) => {
  const frame = document.createElement(kind);
  frame[kind === "object" ? "data" : "src"] = address;
  frame.width = frame.height = 400;
  for (const end of ["load", "error"]) frame.addEventListener(end, tell, { once: true });
  document.body.append(frame);
}).then(() => null)"""


@pytest.mark.parametrize("who", OTHERS)
async def test_a_page_of_another_origin_cannot_frame_our_pages(browser: Browser, who: str) -> None:
    async with lured(browser, OTHERS[who]) as scene:
        for kind in ("iframe", "object", "embed"):
            await scene.page.evaluate(FRAME, [kind, f"{scene.ours}/_edda/runs/order-A-17/cancel"])
        for frame in scene.page.frames[1:]:
            assert not frame.url.startswith(scene.ours)
            assert "order-A-17" not in await frame.content()
        await scene.page.goto(f"{scene.ours}/_edda/runs/order-A-17/cancel")
        assert "order-A-17" in await scene.page.content(), "it is there for who looks at it himself"


async def test_a_page_of_another_origin_gets_no_handle_of_our_window(browser: Browser) -> None:
    """On this machine: for other hosts browsers apply the header over https only."""
    async with serve(ShowcaseController()) as ours, others() as port:
        page = await browser.new_page()
        await page.goto(f"http://{OTHERS['another site']}:{port}/")
        async with page.expect_popup() as opening:
            await page.evaluate("(address) => { window.open(address) }", f"{ours}/_edda/")
        window = await opening.value
        await window.wait_for_load_state()
        assert await window.title() == "Overview · Edda"
        assert await window.evaluate("window.opener") is None


async def test_without_tokens_a_page_of_another_origin_changes_nothing_on_this_machine(browser: Browser) -> None:
    controller = ShowcaseController()
    async with serve(controller) as ours, others() as port:
        page = await browser.new_page()
        for name in ("127.0.0.1", "localhost", *OTHERS.values()):
            for path, fields in ACTS.items():
                await page.goto(f"http://{name}:{port}/")
                async with page.expect_navigation() as navigation:
                    await page.evaluate(POST, [f"{ours}{path}", fields])
                answer = await navigation.value
                assert answer is not None
                assert answer.status == 403, (name, path)
        await page.goto(f"{ours.replace('127.0.0.1', OURS)}/_edda/runs")
        assert "order-A-17" not in await page.content(), "a name that was made to point here"
    assert controller.done == []
