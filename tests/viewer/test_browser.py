"""The pages in a real browser: live, by keyboard, in the dark, on a phone, without scripts, and under attack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
from playwright.async_api import Browser, ConsoleMessage, Dialog, expect

from tests.viewer.browsers import launch, open_live
from tests.viewer.hostile import HostileText
from tests.viewer.screenshots import PAGES
from tests.viewer.serving import serve
from tests.viewer.showcase import ShowcaseController

pytestmark = [pytest.mark.browser, pytest.mark.processes]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with launch() as browser:
        yield browser


async def test_a_run_is_seen_to_end_without_reload(browser: Browser) -> None:
    controller = ShowcaseController()
    async with serve(controller) as base:
        page = await browser.new_page()
        await open_live(page, f"{base}/_edda/runs/order-A-17")
        await page.fill("[name='data.amount']", "28.8")
        await page.evaluate("window.same = true")
        controller.change(words="waits for payment.completed, 4 min of 5 min")
        await expect(page.locator(".lead")).to_contain_text("4 min of 5 min")
        assert await page.input_value("[name='data.amount']") == "28.8", "what was typed is lost"
        assert await page.evaluate("document.activeElement.name") == "data.amount", "the focus is lost"
        controller.change(status="completed", words="completed in 3 min", ended_at=datetime.now(UTC))
        await expect(page.locator(".lead")).to_contain_text("completed in 3 min")
        await expect(page.locator(".ask")).to_have_count(0)
        assert await page.evaluate("window.same")


async def test_a_form_gets_its_fields_as_soon_as_the_model_is_known(browser: Browser) -> None:
    controller = ShowcaseController()
    controller.has_schemas = False
    async with serve(controller) as base:
        page = await browser.new_page()
        await open_live(page, f"{base}/_edda/runs/order-A-17")
        await expect(page.locator("textarea[name=data]")).to_be_visible()
        controller.has_schemas = True
        controller.change(words="waits for payment.completed")
        await expect(page.locator("[name='data.amount']")).to_be_visible()


async def test_rows_do_not_move_while_the_user_selects(browser: Browser) -> None:
    controller = ShowcaseController()
    async with serve(controller) as base:
        page = await browser.new_page()
        await open_live(page, f"{base}/_edda/runs")
        await page.check("tr[data-key='order-A-16'] input")
        place = await page.locator("tr[data-key='order-A-16']").bounding_box()
        controller.add("order-A-18")
        await page.get_by_role("button", name="1 new: show").wait_for()
        assert await page.locator("tr[data-key='order-A-16']").bounding_box() == place
        await page.get_by_role("button", name="1 new: show").click()
        await expect(page.locator("tbody tr").first).to_have_attribute("data-key", "order-A-18")
        assert await page.is_checked("tr[data-key='order-A-16'] input")


async def test_new_runs_appear_without_a_reload(browser: Browser) -> None:
    controller = ShowcaseController()
    async with serve(controller) as base:
        page = await browser.new_page()
        await open_live(page, f"{base}/_edda/runs")
        controller.add("order-A-18")
        await expect(page.locator("tbody tr").first).to_have_attribute("data-key", "order-A-18")


async def test_the_keyboard_is_enough(browser: Browser) -> None:
    async with serve(ShowcaseController()) as base:
        page = await browser.new_page()
        await page.goto(f"{base}/_edda/runs")
        await page.keyboard.press("?")
        await expect(page.locator("#keys")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("/")
        assert await page.evaluate("document.activeElement.name") == "q"
        await page.keyboard.type("A-1")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**q=A-1**")
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await page.keyboard.press("k")
        assert await page.evaluate("document.activeElement.textContent") == "order-A-17"
        await page.keyboard.press("x")
        assert await page.is_checked("tr[data-key='order-A-17'] input")
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/runs/order-A-16")
        await page.keyboard.press("g")
        await page.keyboard.press("e")
        await page.wait_for_url("**/events")


async def test_the_choice_of_light_or_dark_is_kept(browser: Browser) -> None:
    async with serve(ShowcaseController()) as base:
        page = await browser.new_page(color_scheme="light")
        await page.goto(f"{base}/_edda/runs")
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.click("[data-theme-switch]")
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark != light
        await page.goto(f"{base}/_edda/events")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


async def test_an_id_is_copied_by_one_click(browser: Browser) -> None:
    async with serve(ShowcaseController()) as base:
        context = await browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = await context.new_page()
        await page.goto(f"{base}/_edda/runs/order-A-17")
        await page.hover(".title")
        await page.click(".title .copy")
        await expect(page.locator(".title .copied")).to_be_visible()
        assert await page.evaluate("navigator.clipboard.readText()") == "order-A-17"


async def test_no_page_is_wider_than_a_phone(browser: Browser) -> None:
    async with serve(ShowcaseController()) as base:
        page = await browser.new_page(viewport={"width": 390, "height": 844})
        for name, path in PAGES.items():
            await page.goto(f"{base}/_edda{path}")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, name


async def test_no_table_is_pushed_sideways_on_a_phone(browser: Browser) -> None:
    hidden = (
        "[...document.querySelectorAll('.scroll:has(table)')].filter((one) => one.scrollWidth > one.clientWidth).length"
    )
    async with serve(ShowcaseController()) as base:
        page = await browser.new_page(viewport={"width": 390, "height": 844})
        for name, path in PAGES.items():
            await page.goto(f"{base}/_edda{path}")
            assert await page.evaluate(hidden) == 0, name
        await page.goto(f"{base}/_edda/runs/order-A-17")
        assert await page.evaluate("document.querySelector('.bar > svg').clientWidth") > 300


async def test_everything_but_live_updates_works_without_scripts(browser: Browser) -> None:
    controller = ShowcaseController()
    async with serve(controller) as base:
        context = await browser.new_context(java_script_enabled=False)
        page = await context.new_page()
        await page.goto(f"{base}/_edda/runs")
        await page.click("text=order-A-17")
        await page.click("a.bar:has-text('charge')")
        await expect(page.locator(".panel h2")).to_contain_text("charge")
        await page.fill("[name='data.amount']", "28.8")
        await page.click("button.main")
        await expect(page.locator(".flash")).to_have_text("payment.completed was sent.")
        await page.click("text=Cancel…")
        await page.fill("[name=reason]", "a storm")
        await page.click("text=Cancel the run")
        await expect(page.locator(".flash")).to_contain_text("It will end")
        await page.goto(f"{base}/_edda/runs")
        await page.check("tr:has-text('order-A-15') input")
        await page.click("text=Retry…")
        await page.click("button.main")
        await expect(page.locator(".flash")).to_have_text("1 runs were told.")
    assert [action for action, _ in controller.done] == ["send", "cancel", "bulk"]


async def test_hostile_strings_run_nothing(browser: Browser) -> None:
    trouble: list[str] = []

    async def refuse(dialog: Dialog) -> None:
        trouble.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def hear(message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text or message.type == "error":
            trouble.append(message.text)

    for round in range(2):
        hostile = HostileText(round * 3)
        controller = ShowcaseController(make_text=hostile)
        async with serve(controller) as base:
            page = await browser.new_page()
            page.on("dialog", refuse)
            page.on("console", hear)
            await page.add_init_script(
                "addEventListener('securitypolicyviolation', (e) => console.error(e.blockedURI))"
            )
            for path in PAGES.values():
                if "nobody" not in path:
                    await page.goto(f"{base}/_edda{_with_hostile_id(path, hostile)}")
            await page.close()
    assert trouble == []


def _with_hostile_id(path: str, hostile: HostileText) -> str:
    plain, mark, query = path.partition("?")
    first, *rest = plain.strip("/").split("/")
    if first in {"runs", "start"} and rest and rest[0] != "bulk":
        plain = "/".join(["", first, quote(hostile(rest[0]), safe=""), *rest[1:]])
    return f"{plain}{mark}{query}"


async def test_an_open_page_asks_for_nothing_while_nothing_happens(browser: Browser) -> None:
    controller = ShowcaseController(now=datetime.now(UTC) - timedelta(minutes=1))
    async with serve(controller) as base:
        page = await browser.new_page()
        await open_live(page, f"{base}/_edda/runs")
        async with page.expect_response(lambda answer: answer.url.endswith("/runs")):
            controller.change(words="something")
        await expect(page.locator("tbody tr").first).to_contain_text("something")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        # There is no event to wait for: the test is that nothing happens.
        await page.wait_for_timeout(2500)
        assert asked == []
