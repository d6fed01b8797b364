"""`python -m tests.viewer.screenshots FOLDER`: every page of the showcase, in light, in dark and as wide as a phone."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from playwright.async_api import Browser

from tests.viewer.browsers import launch
from tests.viewer.serving import serve
from tests.viewer.showcase import ShowcaseController

PAGES = {
    "overview": "/",
    "runs": "/runs",
    "runs-filtered": "/runs?status=failed&status=parked&q=A-1",
    "bulk": "/runs/bulk?action=cancel&run=order-A-17&run=order-A-16",
    "bulk-filter": "/runs/bulk?action=delete&every=1&status=failed&workflow=order",
    "run-waiting": "/runs/order-A-17",
    "run-listening": "/runs/kitchen-4",
    "run-failed": "/runs/order-A-15?step=charge:1",
    "run-completed": "/runs/order-A-14?step=reserve_stock:1",
    "run-spread": "/runs/order-A-14?scale=even",
    "run-history": "/runs/order-A-14?view=history",
    "run-graph": "/runs/order-A-14?view=graph",
    "run-json": "/runs/order-A-14?view=json",
    "run-recurring": "/runs/digest-daily",
    "run-parent": "/runs/trip-99",
    "cancel": "/runs/order-A-17/cancel",
    "start": "/start/order",
    "events": "/events",
    "event": "/events/1041",
    "send": "/events/send",
    "waits": "/waits",
    "channels": "/channels",
    "publish": "/channels/publish?channel=kitchen",
    "outbox": "/outbox",
    "workers": "/workers",
    "workflows": "/workflows",
    "audit": "/audit",
    "login": "/login",
    "missing": "/runs/nobody",
}
EMPTY = ("overview", "runs", "events", "waits", "channels", "outbox", "workers", "workflows", "audit")
WIDE, PHONE = (1360, 850), (390, 844)


async def take(
    browser: Browser, base: str, names: list[str], folder: Path, *, dark: bool, size: tuple[int, int]
) -> None:
    context = await browser.new_context(
        color_scheme="dark" if dark else "light", viewport={"width": size[0], "height": size[1]}
    )
    page = await context.new_page()
    for name in names:
        await page.goto(f"{base}/_edda{PAGES[name]}")
        await page.screenshot(path=folder / f"{name}.png", full_page=True)
    await context.close()


async def main(folder: Path, only: list[str]) -> None:
    for kind in ("light", "dark", "phone", "empty"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    names = only or list(PAGES)
    async with launch() as browser:
        async with serve(ShowcaseController()) as base:
            await take(browser, base, names, folder / "light", dark=False, size=WIDE)
            await take(browser, base, names, folder / "dark", dark=True, size=WIDE)
            await take(browser, base, names, folder / "phone", dark=False, size=PHONE)
        async with serve(ShowcaseController(empty=True)) as base:
            empty = [name for name in names if name in EMPTY]
            await take(browser, base, empty, folder / "empty", dark=False, size=WIDE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="*", choices=[*PAGES, []])
    given = parser.parse_args()
    asyncio.run(main(given.folder, given.only))
