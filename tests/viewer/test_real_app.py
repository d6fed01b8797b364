"""A browser with a real app on a real database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, expect
from pydantic import BaseModel

from edda import EddaApp, WorkflowContext, activity, receive, subscribe, wait_event, workflow
from edda.core.channels import DIRECT
from edda.errors import TerminalError
from tests.viewer.browsers import launch, open_live
from tests.viewer.serving import serve

pytestmark = [
    pytest.mark.browser,
    pytest.mark.processes,
    # Databases differ only below the controller, which has its own tests.
    pytest.mark.parametrize("database", ["sqlite", "postgres"], indirect=True),
]


class Item(BaseModel):
    sku: str
    count: int = 1


class Order(BaseModel):
    order_id: str
    items: list[Item]
    note: str | None = None


class Payment(BaseModel):
    order_id: str
    amount: float


class Dish(BaseModel):
    name: str
    portions: int = 1


class Shop:
    """External effects that the test controls."""

    def __init__(self) -> None:
        self.is_open = False


@pytest.fixture
def shop() -> Shop:
    shop = Shop()

    @activity
    async def reserve(ctx: WorkflowContext, sku: str, count: int) -> str:
        return f"{count} x {sku}"

    @activity
    async def ship(ctx: WorkflowContext, order_id: str) -> str:
        if not shop.is_open:
            raise TerminalError("the shop is closed")
        return f"parcel {order_id}"

    @workflow
    async def sell(ctx: WorkflowContext, order: Order) -> str:
        """An order, from basket to delivery."""
        for item in order.items:
            await reserve(ctx, item.sku, item.count)
        payment = await wait_event(ctx, "payment.completed", 3600, Payment, match={"order_id": order.order_id})
        assert payment.data.amount > 0
        return await ship(ctx, order.order_id)

    @workflow
    async def cook(ctx: WorkflowContext) -> str:
        """Messages for the kitchen."""
        await subscribe(ctx, "kitchen")
        dish = (await receive(ctx, "kitchen", 3600, model=Dish)).data
        note = await receive(ctx, DIRECT)
        return f"{dish.portions} x {dish.name}, {note.data}"

    return shop


@pytest.fixture
async def page(shop: Shop, app: EddaApp) -> AsyncIterator[Page]:
    async with launch() as browser, serve(app.control) as base:
        yield await _open(browser, base)


async def _open(browser: Browser, base: str) -> Page:
    context = await browser.new_context(base_url=f"{base}/_edda/")
    page = await context.new_page()
    page.set_default_timeout(20_000)
    return page


async def start(page: Page, order_id: str) -> None:
    await page.goto("start/sell")
    await page.fill("[name='data.order.order_id']", order_id)
    await page.fill("[name='data.order.items.0.sku']", "TEA-250")
    await page.fill("[name='data.order.items.0.count']", "2")
    await page.fill("[name=_id]", f"sell-{order_id}")
    await page.click("button.main:visible")
    await page.wait_for_url(f"**/runs/sell-{order_id}")


async def pay(page: Page) -> None:
    await page.fill("[name='data.amount']", "16.80")
    await page.click(".ask button.main")


async def test_a_run_is_started_seen_to_wait_answered_and_seen_to_end(page: Page, shop: Shop) -> None:
    shop.is_open = True
    await start(page, "A-17")
    await expect(page.locator(".lead")).to_contain_text("payment.completed")
    await expect(page.locator(".bar").first).to_contain_text("reserve")
    assert await page.input_value("[name='data.order_id']") == "A-17"
    await page.click(".ask button.main")
    await expect(page.locator(".wrong")).to_have_text("is required")
    await pay(page)
    await expect(page.locator(".lead")).to_contain_text("completed in")
    await expect(page.locator(".ask")).to_have_count(0)
    await page.click("a.bar:has-text('reserve')")
    await expect(page.locator(".panel")).to_contain_text("2 x TEA-250")
    await page.click("text=Graph")
    await expect(page.locator(".box.good", has_text="reserve")).to_have_count(1)
    await page.click("text=History")
    await expect(page.locator("#history tbody tr")).to_have_count(3)


async def test_a_message_that_a_run_waits_for_is_written_in_a_form(page: Page) -> None:
    await page.goto("start/cook")
    await page.fill("[name=_id]", "cook-1")
    await page.click("button.main:visible")
    await expect(page.locator(".lead")).to_contain_text("waits for a message on kitchen")
    await page.fill(".ask [name='data.portions']", "2")
    await page.click(".ask button.main")
    await expect(page.locator(".wrong")).to_have_text("is required")
    await page.fill(".ask [name='data.name']", "soup")
    await page.click(".ask button.main")
    await expect(page.locator(".ask")).to_contain_text("only this run receives it")
    await page.fill(".ask [name=data]", '"without salt"')
    await page.click(".ask button.main")
    await expect(page.locator(".lead")).to_contain_text("completed in")
    await expect(page.locator(".ask")).to_have_count(0)
    await expect(page.locator(".panel")).to_contain_text("2 x soup, without salt")


async def test_a_message_is_published_from_the_list_of_channels(page: Page) -> None:
    await page.goto("start/cook")
    await page.fill("[name=_id]", "cook-2")
    await page.click("button.main:visible")
    await expect(page.locator(".lead")).to_contain_text("waits for a message on kitchen")
    await page.goto("channels")
    await page.click("tbody >> text=Publish…")
    assert await page.input_value("[name=channel]") == "kitchen"
    await page.fill("[name=data]", '{"name": "bread"}')
    await page.click("button.main")
    await expect(page.locator(".flash")).to_contain_text("is on kitchen")
    await page.goto("runs/cook-2?view=history")
    await expect(page.locator("#history")).to_contain_text("message")


async def test_what_failed_is_retried(page: Page, shop: Shop) -> None:
    await start(page, "A-18")
    await expect(page.locator(".lead")).to_contain_text("payment.completed")
    await pay(page)
    await expect(page.locator(".lead")).to_contain_text("the shop is closed")
    shop.is_open = True
    await page.click("text=Retry…")
    await page.click("text=Retry the run")
    await expect(page.locator(".lead")).to_contain_text("completed in")


async def test_runs_are_filtered_and_cancelled_together(page: Page) -> None:
    for number in range(3):
        await start(page, f"B-{number}")
    await start(page, "C-1")
    await page.goto("runs")
    await page.fill("[name=q]", "sell-B")
    await page.click("text=Filter")
    await expect(page.locator("#runs tbody tr")).to_have_count(3)
    await page.check("text=all that match the filter")
    await page.click("text=Cancel…")
    await expect(page.locator("h1")).to_have_text("Cancel 3 runs?")
    await page.click("button.main")
    await expect(page.locator("#runs tr.gone")).to_have_count(3)
    await page.goto("runs?id=sell-C")
    await expect(page.locator("#runs tbody tr")).to_contain_text("payment.completed")
    await page.goto("audit")
    await expect(page.locator("#audit tbody")).to_contain_text("cancel")


async def test_chosen_runs_are_deleted_once_they_have_ended(page: Page) -> None:
    for number in range(3):
        await start(page, f"F-{number}")
    await page.goto("runs?id=sell-F")
    await page.check("text=all that match the filter")
    await page.click("text=Cancel…")
    await page.fill("[name=reason]", "a flood")
    await page.click("button.main")
    await expect(page.locator("#runs tr.gone", has_text="a flood")).to_have_count(3)
    for number in range(2):
        await page.check(f"[name=run][value=sell-F-{number}]")
    await page.click("text=Delete…")
    await expect(page.locator("h1")).to_have_text("Delete 2 runs?")
    await page.click("button.main")
    await expect(page.locator(".flash")).to_contain_text("delete: 2 runs done")
    await expect(page.locator("#runs tbody tr")).to_have_count(1)


async def test_one_run_is_cancelled_live_before_two_people(page: Page) -> None:
    await start(page, "D-1")
    other = await page.context.new_page()
    await open_live(other, "runs/sell-D-1")
    await page.click("text=Cancel…")
    await page.fill("[name=reason]", "a storm")
    await page.click("text=Cancel the run")
    await expect(other.locator(".lead")).to_contain_text("a storm")


async def test_every_page_is_there(page: Page) -> None:
    await start(page, "E-1")
    for path in ("", "runs", "events", "waits", "channels", "outbox", "workers", "workflows", "audit", "events/send"):
        answer = await page.goto(path)
        assert answer is not None
        assert answer.status == 200, path
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
