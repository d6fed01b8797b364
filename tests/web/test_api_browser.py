"""A real browser with a login session, and a page of another origin."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, async_playwright

from edda.control.controller import PREFIX
from edda.web import WebApp, WebOptions
from edda.web.access import Principal
from edda.web.request import Request
from edda.web.responses import Response
from tests.conftest import CHROMIUM

from .fake_controller import Showcase
from .fakes import FakeService, PlainRefusals
from .listening import listening
from .test_sessions import ALL, EVERYTHING

pytestmark = pytest.mark.browser

# Names that are not loopback: over plain http to them, a browser sends the fewest headers.
OURS, EVIL = "edda.example", "evil.example"
HTML = (b"content-type", b"text/html; charset=utf-8")
LOGIN = b'<form method="post" action="login"><input name="token"><button>in</button></form>'
CANCEL = b'<form method="post" action="/_edda/api/v1/runs/r-1/resume"><button>do it</button></form>'
TRAP = b'<form method="post" action="%s/_edda/api/v1/runs/r-1/resume"><button>win</button></form>'


class Forms(PlainRefusals):
    """Pages with one form each."""

    async def handle(self, request: Request, caller: Principal | None, body: bytes = b"") -> Response | None:
        return Response(200, LOGIN if request.path == "/_edda/login" else CANCEL, (HTML,))


class Trap(PlainRefusals):
    """A page of another origin: a form that posts to our server."""

    def __init__(self, target: str) -> None:
        self.target = target

    async def handle(self, request: Request, caller: Principal | None, body: bytes = b"") -> Response | None:
        page = TRAP % self.target.encode()
        return Response(200, page, (HTML, (b"content-security-policy", b"default-src *")))


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    args = ["--no-sandbox", f"--host-resolver-rules=MAP {OURS} 127.0.0.1, MAP {EVIL} 127.0.0.1"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        await browser.close()


@pytest.fixture
def showcase() -> Showcase:
    return Showcase()


@pytest.fixture
async def ours(service: FakeService, showcase: Showcase) -> AsyncIterator[str]:
    web = WebApp(service, WebOptions(tokens=ALL), control=lambda: showcase, viewer=lambda: Forms())
    async with listening(web) as url:
        yield url.replace("127.0.0.1", OURS)


async def log_in(page: Page, url: str) -> None:
    await page.goto(f"{url}/_edda/login")
    await page.fill("input", EVERYTHING)
    await page.click("button")
    await page.wait_for_url(f"{url}/_edda/")


async def test_a_form_of_our_own_origin_works(browser: Browser, ours: str, showcase: Showcase) -> None:
    page = await browser.new_page()
    await log_in(page, ours)
    async with page.expect_response(lambda response: response.request.method == "POST") as answer:
        await page.click("button")
    assert (await answer.value).status == 200
    assert [audit.who for audit in showcase.world.audits] == ["ops"]


async def test_a_form_of_another_origin_is_refused(browser: Browser, ours: str, showcase: Showcase) -> None:
    page = await browser.new_page()
    await log_in(page, ours)
    async with listening(WebApp(FakeService(), WebOptions(auth="none"), viewer=lambda: Trap(ours))) as url:
        await page.goto(f"{url.replace('127.0.0.1', EVIL)}/_edda/")
        async with page.expect_response(lambda response: response.request.method == "POST") as answer:
            await page.click("button")
        assert (await answer.value).status in {401, 403}
        sent = f"fetch('{ours}{PREFIX}/runs/r-1/resume', {{method: 'POST', mode: 'no-cors', credentials: 'include'}})"
        await page.goto(f"{url.replace('127.0.0.1', EVIL)}/_edda/")
        assert await page.evaluate(f"{sent}.then(() => 'read', () => 'hidden')") == "hidden"
    assert showcase.world.audits == []
