"""Filter texts are searched verbatim, and never become part of a statement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import quote, urlencode

import httpx2
import pytest
from msgspec.structs import replace

from edda import EddaApp, WorkflowContext, workflow
from edda.control.views import EventSearch, RunSearch
from edda.workflow.workflow import Workflow
from tests.web.test_api_hostile import HOSTILE

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgres"], indirect=True)

CASES = int(os.environ.get("EDDA_API_CASES", "12"))
"""Texts per parameter; each parameter gets others, so that all are sent."""
STORED = [text for text in HOSTILE[::3] if text.strip() and len(text) < 200 and text.isprintable()]
PARAMETERS = {
    "/runs": ("status", "workflow", "id", "q", "input", "since", "until", "parent", "cursor"),
    "/runs/bulk?action=cancel&every=1": ("status", "workflow", "id", "q", "input", "since", "until", "parent"),
    "/runs/bulk": ("action", "run"),
    "/runs/plain": ("view", "generation", "step", "from", "scale"),
    "/runs/plain?view=history": ("generation",),
    "/events": ("q", "type", "source", "messages", "since", "until", "cursor"),
    "/events/send": ("type", "source", "subject", "id", "target"),
    "/channels/publish": ("channel", "target"),
    "/waits": ("type", "cursor"),
    "/outbox": ("state", "cursor"),
    "/outbox/retry": ("event",),
    "/audit": ("cursor",),
}
PATHS = ("/runs/*", "/runs/*/cancel", "/runs/*/export", "/events/*", "/events/*/resend", "/start/*", "/*")


def some(number: int, texts: list[str] = HOSTILE) -> Iterator[str]:
    step = max(1, len(texts) // CASES)
    yield from texts[number % step :: step]


@pytest.fixture
async def shelf(app: EddaApp) -> Workflow[..., None]:
    """Runs that never start, with hostile ids and inputs; and events."""

    @workflow(name="shelf")
    async def shelf(ctx: WorkflowContext, word: str) -> None: ...

    for text in ("plain", *STORED):
        await app.start(shelf.options(id=text, delay=86_400), text)
        await app.send_event(text, "/tests", {"word": text})
    return shelf


async def every_run(app: EddaApp, search: RunSearch | None = None) -> set[str]:
    page = await app.control.list_runs(replace(search or RunSearch(), limit=200))
    assert page.next is None
    return {run.id for run in page.items}


async def test_a_text_finds_the_runs_that_contain_it(app: EddaApp, shelf: Workflow[..., None]) -> None:
    ids = {"plain", *STORED}
    assert await every_run(app) == ids
    for text in STORED:
        assert await every_run(app, RunSearch(id=text)) == {id for id in ids if id.startswith(text)}, text
        assert await every_run(app, RunSearch(q=text)) == {id for id in ids if text.lower() in id.lower()}, text
        assert await every_run(app, RunSearch(input=(f"word={text}",))) == {text}, text
        assert await every_run(app, RunSearch(workflow=text)) == set(), text
        assert await every_run(app, RunSearch(parent=text)) == set(), text
    assert await every_run(app, RunSearch(workflow="shelf")) == ids


async def test_a_text_finds_the_events_that_contain_it(app: EddaApp, shelf: Workflow[..., None]) -> None:
    control = app.control
    for text in STORED:
        found = await control.list_events(EventSearch(type=text, limit=200))
        assert [event.type for event in found.items] == [text]
        assert (await control.list_events(EventSearch(source=text))).items == ()
        assert (await control.list_events(EventSearch(id=text))).items == ()
        assert (await control.list_waits(text, None, 50)).items == ()


@pytest.mark.timeout(1800)  # all of them take minutes
async def test_every_parameter_of_every_page_accepts_every_text(app: EddaApp, shelf: Workflow[..., None]) -> None:
    ids = await every_run(app)
    transport = httpx2.ASGITransport(app=app, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001/_edda") as client:
        pairs = [(path, name) for path, names in PARAMETERS.items() for name in names]
        for number, (path, name) in enumerate(pairs):
            for text in some(number):
                answer = await client.get(f"{path}{'&' if '?' in path else '?'}{urlencode({name: text})}")
                assert answer.status_code in {200, 404, 422}, (path, name, text)
        for number, path in enumerate(PATHS):
            for text in some(number):
                answer = await client.get(path.replace("*", quote(text, safe="")))
                assert answer.status_code in {200, 303, 404}, (path, text)
    assert await every_run(app) == ids
