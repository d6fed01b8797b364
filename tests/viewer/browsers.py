"""Debian's Chromium."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = "/usr/bin/chromium"
needs_chromium = pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason=f"{CHROMIUM} is not there")


@asynccontextmanager
async def launch(*args: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *args])
        yield browser
        await browser.close()


async def open_live(page: Page, address: str) -> None:
    """Returns once the page hears of changes."""
    await page.goto(address)
    await expect(page.locator("[data-live-state]")).to_be_visible()
