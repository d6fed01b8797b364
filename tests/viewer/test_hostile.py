"""Every hostile string in every field that a page shows or repeats."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast
from urllib.parse import urlencode

import pytest
from msgspec import inspect
from playwright.async_api import Browser, ConsoleMessage, Dialog, Page, expect

from edda.control.controller import OPERATIONS, Controller
from edda.viewer import templating
from tests.viewer.browsers import launch
from tests.viewer.hostile_controller import FIXED, STEP, Chorus, mark
from tests.viewer.serving import serve
from tests.web.routes import ROUTES

VIEWER = Path(templating.__file__).parent
TEMPLATES = sorted((VIEWER / "templates").iterdir())
RUN = "/_edda/runs/order-A-17"
VIEWS = [f"{RUN}?{urlencode(query)}" for query in ({"view": "graph"}, {"view": "history"}, {"view": "json"})]
STEPS = [f"{RUN}?{urlencode({'step': STEP} | query)}" for query in ({}, {"view": "graph"}, {"scale": "even"})]
LOOKING = [route for route in ROUTES if route.is_page and route.method == "GET" and "/export" not in route.path]
ADDRESSES = [
    *(f"{route.path}?{route.query.decode()}" for route in LOOKING if "/static" not in route.path),
    *VIEWS,
    *STEPS,
]

OFFENDERS = """() => [...document.querySelectorAll("*")].filter((one) => {
  const ours = (place) => place.startsWith(location.origin + "/_edda/") || place.startsWith("#");
  const names = one.getAttributeNames();
  if (names.some((name) => name.startsWith("on") || name === "style" || name === "srcdoc")) return true;
  if (["IFRAME", "OBJECT", "EMBED", "BASE", "STYLE", "IMG", "MATH", "TEMPLATE", "BODY", "ANIMATE"].includes(
    one.nodeName.toUpperCase()) && one !== document.body) return true;
  if (one.matches("meta[http-equiv], svg script, body script, body link, form form, a a")) return true;
  return ["href", "src", "action", "formAction"].some((name) =>
    names.includes(name.toLowerCase()) && typeof one[name] === "string" && !ours(one[name]));
}).map((one) => one.outerHTML.slice(0, 300))"""
"""Elements and attributes that our templates never produce."""


MARKS = "() => [...new Set(document.documentElement.outerHTML.match(/«[^»]+»/g))]"


class Watchman:
    """Records forbidden actions of a page."""

    def __init__(self) -> None:
        self.trouble: list[str] = []

    async def guard(self, page: Page) -> None:
        page.on("dialog", self._refuse)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        page.on("popup", lambda popup: self.trouble.append(f"popup: {popup.url}"))
        page.on("request", lambda request: self._see(request.url))
        await page.add_init_script("addEventListener('securitypolicyviolation', (e) => console.error(e.blockedURI))")

    async def _refuse(self, dialog: Dialog) -> None:
        self.trouble.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error" or "Content Security Policy" in message.text:
            self.trouble.append(f"console: {message.text}")

    def _see(self, address: str) -> None:
        if not address.startswith("http://127.0.0.1:"):
            self.trouble.append(f"request: {address}")


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with launch() as browser:
        yield browser


@asynccontextmanager
async def singing(browser: Browser) -> AsyncIterator[tuple[Page, Chorus, Watchman]]:
    chorus, watchman = Chorus(), Watchman()
    async with serve(cast(Controller, chorus)) as base:
        context = await browser.new_context(base_url=base)
        page = await context.new_page()
        await watchman.guard(page)
        yield page, chorus, watchman
        await context.close()


def texts_of(kind: inspect.Type, within: str = "") -> set[str]:
    """The fields of a result whose text may come from outside."""
    match kind:
        case inspect.StructType():
            name = kind.cls.__name__
            return {field for one in kind.fields for field in texts_of(one.type, f"{name}.{one.name}")}
        case inspect.StrType() | inspect.AnyType():
            return {within}
        case inspect.DictType():
            return {within} if isinstance(kind.value_type, inspect.AnyType) else set()
        case inspect.VarTupleType():
            return texts_of(kind.item_type, within)
        case inspect.UnionType():
            return {field for one in kind.types for field in texts_of(one, within)}
        case _:
            return set()


IN_ADDRESSES = frozenset({"Page.next", "ConsumerView.step"})
"""Positions where a text is not shown verbatim."""


DANGEROUS = (
    r"\|\s*safe\b",
    r"\bMarkup\b",
    r"\bautoescape\b",
    r"\s[\w-]+=\{\{",  # an attribute without quotes
    r"<script(?! src=| type=\"module\" src=)",
    r"<style\b",
    r"\sstyle=",
    r"\son[a-z]+=",
    r"javascript:",
)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_makes_nothing_of_a_string(template: Path) -> None:
    text = template.read_text()
    assert [pattern for pattern in DANGEROUS if re.search(pattern, text)] == []


SCRIPTS = sorted((VIEWER / "static").glob("*.js"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_makes_nothing_of_a_string(script: Path) -> None:
    dangerous = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|createContextualFragment"
    assert re.search(dangerous, script.read_text()) is None


@pytest.mark.browser
@pytest.mark.processes
async def test_no_field_becomes_markup(browser: Browser) -> None:
    shown: set[str] = set()
    async with singing(browser) as (page, _, watchman):
        for address in ADDRESSES:
            answer = await page.goto(address)
            assert answer is not None
            assert answer.status == 200, address
            assert await page.evaluate(OFFENDERS) == [], address
            shown.update(await page.evaluate(MARKS))
        assert watchman.trouble == []
    reads = [operation for operation in OPERATIONS if operation.method == "GET" and operation.name != "export_run"]
    fields = {field for one in reads for field in texts_of(inspect.type_info(one.response))}
    assert {field for field in fields if mark(field) not in shown} == IN_ADDRESSES | (fields & FIXED.keys())


@pytest.mark.browser
@pytest.mark.processes
async def test_no_live_update_becomes_markup(browser: Browser) -> None:
    """Live updates are inserted by our script, not by the browser's parser."""
    async with singing(browser) as (page, chorus, watchman):
        await page.goto(RUN)
        before = await page.content()
        async with page.expect_response(lambda answer: answer.url.endswith(RUN)):
            chorus.sing("another tune")
        await expect(page.locator(".lead")).to_contain_text("another tune")
        assert "another tune" not in before
        assert await page.evaluate(OFFENDERS) == []
        assert watchman.trouble == []
