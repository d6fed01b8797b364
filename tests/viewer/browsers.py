"""Debian's Chromium."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, Page, async_playwright, expect

from tests.conftest import CHROMIUM


@asynccontextmanager
async def launch(*args: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *args])
        yield browser
        await browser.close()


async def open_live(page: Page, address: str) -> None:
    """Returns when the page has opened its event stream."""
    await page.goto(address)
    await expect(page.locator("[data-live-state]")).to_be_visible()
