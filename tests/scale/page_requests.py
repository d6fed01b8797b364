"""A real server on a database, and the pages that people open there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2

from edda.core.states import RunStatus
from tests.web.servers import Server, free_port, running, wait_until_ready

_API = "/_edda/api/v1"


@asynccontextmanager
async def serving(url: str) -> AsyncIterator[Server]:
    """As `edda serve` does, in a process of its own."""
    port = free_port()
    async with running(
        ["-m", "edda", "serve", "tests.scale.program:app", "--port", str(port)], EDDA_DB_URL=url
    ) as process:
        server = Server(process, port)
        await wait_until_ready(server)
        yield server


@asynccontextmanager
async def visiting(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as client:
        yield client


async def pages(client: httpx2.AsyncClient) -> dict[str, str]:
    """Their paths, each under the name of what people do."""
    now = datetime.now(UTC)
    day = {"since": _moment(now - timedelta(days=15)), "until": _moment(now - timedelta(days=14))}
    somebody = await _some_run(client, status="completed", workflow="workflow3")
    waiting = await _some_run(client, status="waiting_for_event", workflow="workflow3")
    number = (await _read(client, "/events", limit="1"))["items"][0]["number"]
    middle = str((await _read(client, "/runs", until=day["until"], limit="1"))["next"])
    lists: dict[str, dict[str, str]] = {
        "newest": {},
        "the next page, from the middle": {"cursor": middle},
        **{status.value: {"status": status.value} for status in RunStatus},
        "open": {"status": "open"},
        "failed, from the middle": {"status": "failed", "cursor": middle},
        "completed, from the middle": {"status": "completed", "cursor": middle},
        "a workflow": {"workflow": "workflow3"},
        "a rare workflow": {"workflow": "rare"},
        "no such workflow": {"workflow": "unheard_of"},
        "a workflow, failed": {"workflow": "workflow3", "status": "failed"},
        "by id": {"id": somebody},
        "ids of one beginning": {"id": "run000"},
        "no such id": {"id": "order"},
        "a day, two weeks ago": day,
        "a day, failed": {**day, "status": "failed"},
        "a day, a workflow": {**day, "workflow": "workflow3"},
        "text that all have": {"q": "RUN"},
        "text that few have": {"q": "N00000777"},
        "text that none has": {"q": "unheard of"},
        "text, completed": {"q": "777", "status": "completed"},
        "text, waiting": {"q": "something", "status": "waiting_for_timer"},
        "an input that all have": {"input": "order=A-17"},
        "an input that none has": {"input": "order=A-18"},
        "an input that none has, failed": {"input": "order=A-18", "status": "failed"},
    }
    views = ("timeline", "history", "graph", "json")
    return {
        **{f"runs: {name}": _link("/runs", **query) for name, query in lists.items()},
        **{f"run: {view}": _link(f"/runs/{somebody}", view=view) for view in views},
        **{f"run that waits: {view}": _link(f"/runs/{waiting}", view=view) for view in views},
        "events: newest": "/_edda/events",
        "events: a type": _link("/events", type="payment"),
        "events: a rare type": _link("/events", type="rare"),
        "events: text": _link("/events", q="unheard of"),
        "events: messages, of which there are none": _link("/events", messages="1"),
        "event": _link(f"/events/{number}"),
        "waits": "/_edda/waits",
        "waits for a rare type": _link("/waits", type="rare"),
        "channels": "/_edda/channels",
        "outbox": "/_edda/outbox",
        "workers": "/_edda/workers",
        "workflows": "/_edda/workflows",
        "audit": "/_edda/audit",
        "overview": "/_edda/",
    }


def _link(path: str, **query: str) -> str:
    return f"/_edda{path}?{httpx2.QueryParams(query)}"


def _moment(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").removesuffix("+00:00") + "Z"


async def _some_run(client: httpx2.AsyncClient, **query: str) -> str:
    found = await _read(client, "/runs", limit="1", **query)
    return str(found["items"][0]["id"])


async def _read(client: httpx2.AsyncClient, path: str, **query: str) -> dict[str, Any]:
    answer = await client.get(_API + path, params=query)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found
