"""Hostile strings through workflows, events and a database into the pages of a real app."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from pydantic import BaseModel, Field

from edda import (
    EddaApp,
    RetryPolicy,
    RunStatus,
    WorkflowContext,
    activity,
    receive,
    send_event_transactional,
    subscribe,
    wait_event,
    workflow,
)
from edda.cloudevents.event import CloudEvent
from edda.control.views import EventRequest, EventSearch, StartRequest
from edda.errors import EventRefusedError
from tests.engine.conditions import until, until_status
from tests.engine.conftest import MakeApp
from tests.viewer.browsers import launch
from tests.viewer.hostile import PAYLOADS
from tests.viewer.serving import serve
from tests.viewer.test_hostile import OFFENDERS, Watchman

pytestmark = [
    pytest.mark.browser,
    pytest.mark.processes,
    # Databases differ only below the controller, which has its own tests.
    pytest.mark.parametrize("database", ["sqlite"], indirect=True),
]

ONCE = RetryPolicy(max_attempts=1)
STORABLE = [text for text in PAYLOADS if text.isprintable()]
"""Names and ids have no control characters."""
EVERYTHING = " ".join(STORABLE)
WORST = "\"'><img src=x onerror=alert(1)><script>alert(2)</script>{{7*7}}"
SOURCE = "javascript:alert(1)//'onfocus=alert(2)"
"""A source has to be a URI reference."""
VIEWS = ("timeline", "graph", "history", "json")


KEYS = "() => [...document.querySelectorAll('tr[data-key]')].map((row) => row.dataset.key)"


def packs(longest: int) -> Iterator[str]:
    """All of them, several in each text."""
    pack = ""
    for payload in STORABLE:
        if len(pack) + len(payload) > longest:
            yield pack
            pack = ""
        pack += payload
    yield pack


class Payment(BaseModel):
    """Titles and descriptions come from the user's code."""

    method: str = Field(title=EVERYTHING, description=EVERYTHING, default=EVERYTHING)
    kind: str = Field(title=WORST, json_schema_extra={"enum": [WORST, EVERYTHING]}, default=WORST)


class Rude:
    """A receiver that rejects every event."""

    async def send(self, event: CloudEvent) -> None:
        raise EventRefusedError(EVERYTHING)

    async def close(self) -> None: ...


def a_villain() -> Any:
    @activity(name=WORST, retry_policy=ONCE)
    async def step(ctx: WorkflowContext, given: dict[str, str]) -> dict[str, str]:
        await send_event_transactional(ctx, WORST, SOURCE, given, subject=WORST)
        return given

    @activity(name=f"fail {WORST}", retry_policy=ONCE)
    async def fail(ctx: WorkflowContext) -> None:
        raise type(WORST, (Exception,), {})(EVERYTHING)

    async def hostile_text(ctx: WorkflowContext, given: dict[str, str], how: str) -> None:
        ctx.set(WORST, given)
        await step(ctx, given)
        match how:
            case "fails":
                await fail(ctx)
            case "waits":
                await wait_event(ctx, WORST, 3600, Payment, match={"method": WORST})
            case _:
                await subscribe(ctx, WORST)
                await receive(ctx, WORST)

    hostile_text.__doc__ = EVERYTHING
    return workflow(name=WORST)(hostile_text)


@pytest.fixture
async def app(make_app: MakeApp) -> EddaApp:
    hostile_text = a_villain()
    app = await make_app(service_name=WORST, outbox_enabled=True, sink=Rude())
    given = {text: text for text in PAYLOADS if "\0" not in text}
    for how, status in (
        ("fails", RunStatus.FAILED),
        ("waits", RunStatus.WAITING_FOR_EVENT),
        ("receives", RunStatus.WAITING_FOR_MESSAGE),
    ):
        await app.start(hostile_text.options(id=f"{how} {WORST}"), given, how)
        await until_status(app, f"{how} {WORST}", status)
    for text in packs(190):
        await app.start(hostile_text.options(id=text, delay=86_400), {}, "")
        await app.send_event(text, SOURCE, given, id=text, subject=text, extensions={"note": text})
        await app.publish(text, given)
    control = app.control.with_caller(EVERYTHING, WORST)
    await control.send_event(EventRequest(WORST, data=given))
    await control.start_run(StartRequest(WORST, {"given": {}, "how": ""}, id=f"cancelled {WORST}"))
    await control.cancel_run(f"cancelled {WORST}", EVERYTHING)

    async def is_refused() -> bool:
        return bool((await control.list_outbox("dead", None, 10)).items)

    await until(is_refused, "the outbox has a dead event")
    return app


async def addresses(app: EddaApp) -> list[str]:
    name = quote(WORST, safe="")
    found = ["", "workers", "workflows", "audit", "waits", "channels", "outbox", f"start/{name}"]
    for how in ("fails", "waits", "receives", "cancelled"):
        run = f"runs/{quote(f'{how} {WORST}', safe='')}"
        bars = (await app.control.get_timeline(f"{how} {WORST}")).bars
        found += [f"{run}?{urlencode({'view': view})}" for view in VIEWS]
        found += [f"{run}?{urlencode({'step': bar.step})}" for bar in bars] + [f"{run}/cancel"]
    found += ["runs", "events", "events?messages=1"]
    newest = (await app.control.list_events(EventSearch(limit=2))).items
    return [*found, *(f"events/{event.number}" for event in newest)]


async def test_no_stored_value_becomes_markup(app: EddaApp) -> None:
    watchman, keys = Watchman(), set[str]()
    async with launch() as browser, serve(app.control) as base:
        context = await browser.new_context(base_url=f"{base}/_edda/")
        page = await context.new_page()
        await watchman.guard(page)
        for address in await addresses(app):
            following: str | None = address
            while following is not None:
                answer = await page.goto(following)
                assert answer is not None
                assert answer.status == 200, following
                assert await page.evaluate(OFFENDERS) == [], following
                keys.update(await page.evaluate(KEYS))
                older = page.locator("nav.pages a[rel=next]")
                following = await older.get_attribute("href") if await older.count() else None
        await context.close()
    assert watchman.trouble == []
    assert keys >= {*packs(190)}, "each is there, letter by letter"
