"""Secrets planted in every input are shown nowhere: not in pages, responses, logs, reprs and spans.

The database keeps them: a run has to continue with its own values.
"""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

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
from edda.control.local import LocalController
from edda.engine.outbox.sinks import HttpSink
from edda.errors import EddaError
from edda.integrations.otel import TracingHooks
from edda.web import GitHub, Token, TokenScope
from tests.engine.conditions import until, until_status

ONCE = RetryPolicy(max_attempts=1)
REDACTED = ("iban", "card.number")


def canary(name: str) -> str:
    return f"canary-{name}-4f1d9c"


NAMES = (
    *("database", "broker", "signing", "webhook", "token"),
    *("password", "iban", "card", "step", "result", "fact", "match", "waited"),
    *("event", "extension", "message", "resent"),
    *("url", "bearer", "basic", "pair", "cause", "cancelled", "sent"),
)
CANARIES = {name: canary(name) for name in NAMES} | {"signing": b64encode(canary("signing").encode()).decode()}
TOKEN = CANARIES["token"] * 2


def found_in(text: str) -> set[str]:
    return {name for name, secret in CANARIES.items() if secret in text}


@activity(retry_policy=ONCE)
async def charge(ctx: WorkflowContext, api_key: str, password: str, card: dict[str, str]) -> None:
    try:
        raise ConnectionError(f"GET https://shop:{CANARIES['url']}@bank.example/ with api_key={api_key}")
    except ConnectionError as error:
        raise ValueError(
            f"refused {password!r} for {card['number']}: Authorization: Bearer {CANARIES['bearer']}, "
            f"{{'authorization': 'Basic {CANARIES['basic']}', 'client_secret': '{CANARIES['pair']}'}} "
            f"session_token={CANARIES['cause']}"
        ) from error


@activity
async def log_in(ctx: WorkflowContext) -> dict[str, str]:
    return {"access_token": CANARIES["result"]}


def failing() -> Any:
    @workflow
    async def pay(ctx: WorkflowContext, password: str, iban: str, card: dict[str, str]) -> None:
        await log_in(ctx)
        await send_event_transactional(ctx, "order.paid", "/shop", {"secret": CANARIES["sent"]})
        ctx.set("db_password", CANARIES["fact"])
        await charge(ctx, CANARIES["step"], password, card)

    return pay


def waiting() -> Any:
    @workflow
    async def wait(ctx: WorkflowContext, password: str) -> None:
        await wait_event(ctx, "paid", match={"token": CANARIES["match"]})

    return wait


def listening() -> Any:
    @workflow
    async def listen(ctx: WorkflowContext) -> None:
        await subscribe(ctx, "orders")
        await receive(ctx, "orders")
        await receive(ctx, "orders")

    return listen


class Unreachable:
    """A broker whose error text contains the request."""

    async def send(self, event: CloudEvent) -> None:
        raise ConnectionError(f"amqp://shop:{CANARIES['broker']}@broker.example is away")

    async def close(self) -> None: ...


@asynccontextmanager
async def client_for(app: EddaApp) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app, client=("127.0.0.1", 50_000))
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
        yield client


async def plant(app: EddaApp) -> dict[str, str]:
    pay, wait, listen = failing(), waiting(), listening()
    card = {"number": CANARIES["card"], "holder": "A. Smith"}
    failed = await app.start(pay, password=CANARIES["password"], iban=CANARIES["iban"], card=card)
    asked = await app.start(wait, password=CANARIES["waited"])
    stopped = await app.start(wait, password=CANARIES["waited"])
    heard = await app.start(listen)
    event = {"secret": CANARIES["event"], "link": f"https://me:{CANARIES['resent']}@example.org/"}
    await app.send_event("order.placed", "/shop", event, extensions={"authtoken": CANARIES["extension"]})
    await until_status(app, heard, RunStatus.WAITING_FOR_MESSAGE)
    await app.publish("orders", {"password": CANARIES["message"]})
    await until_status(app, failed, RunStatus.FAILED)
    await until_status(app, asked, RunStatus.WAITING_FOR_EVENT)
    await app.control.cancel_run(stopped, f"see https://ops:{CANARIES['cancelled']}@wiki.example/")
    await until_status(app, stopped, RunStatus.CANCELLED)
    return {"failed": failed, "asked": asked, "stopped": stopped, "heard": heard}


def pages_of(runs: dict[str, str]) -> list[str]:
    views = ("timeline", "history", "graph", "json")
    api = "/_edda/api/v1"
    return [
        *(f"/_edda/runs/{id}?view={view}" for id in runs.values() for view in views),
        *(f"/_edda/runs/{runs['failed']}?step={step}" for step in ("charge:1", "log_in:1")),
        *(f"/_edda/runs/{id}/export" for id in runs.values()),
        *(f"{api}/runs/{id}{part}" for id in runs.values() for part in ("", "/history", "/timeline", "/export")),
        *(
            f"/_edda{page}"
            for page in ("/", "/runs", "/events", "/events?messages=1", "/waits", "/channels", "/outbox")
        ),
        *(f"/_edda{page}" for page in ("/workers", "/workflows", "/audit", "/metrics")),
        *(f"{api}/{name}" for name in ("runs", "events", "waits", "channels", "outbox", "workers", "audits", "stats")),
        f"{api}/events?messages=true",
    ]


async def read_all(client: httpx2.AsyncClient, runs: dict[str, str]) -> dict[str, str]:
    events = (await client.get("/_edda/api/v1/events")).json()["items"]
    events += (await client.get("/_edda/api/v1/events?messages=true")).json()["items"]
    numbers = [event["number"] for event in events]
    paths = pages_of(runs) + [f"{base}/events/{n}" for n in numbers for base in ("/_edda", "/_edda/api/v1")]
    answers = {path: await client.get(path) for path in paths}
    assert {path for path, answer in answers.items() if answer.status_code != 200} == set()
    return {path: answer.text for path, answer in answers.items()}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def app(exporter: InMemorySpanExporter) -> AsyncIterator[EddaApp]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = EddaApp(
        "shop",
        "memory://",
        hooks=TracingHooks(provider, redact=REDACTED),
        outbox_enabled=True,
        sink=Unreachable(),
        tokens=[Token("all", frozenset(TokenScope), TOKEN)],
        webhooks=[GitHub("/hooks/github", CANARIES["webhook"])],
        redact=REDACTED,
    )
    async with app:
        yield app


async def test_no_page_and_no_answer_shows_a_secret(app: EddaApp) -> None:
    async with client_for(app) as client:
        runs = await plant(app)
        await until(lambda: _was_refused(app), "the outbox was refused")
        shown = await read_all(client, runs)
    assert {path: found for path, text in shown.items() if (found := found_in(text))} == {}
    assert "Authorization: Bearer •••" in shown[f"/_edda/api/v1/runs/{runs['failed']}"]


async def _was_refused(app: EddaApp) -> bool:
    return any(record.reason for record in await app.engine.storage.find_outbox())


async def test_what_is_stored_has_its_secrets_still(app: EddaApp) -> None:
    runs = await plant(app)
    handle = app.handle(runs["failed"])
    with pytest.raises(Exception, match=CANARIES["password"]):
        await handle.result()


async def test_no_log_line_and_no_repr_shows_a_secret(app: EddaApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with client_for(app) as client:
        await read_all(client, await plant(app))
        await client.get("/_edda/", headers={"authorization": f"Bearer {CANARIES['bearer']}"})
    control = app.control
    assert isinstance(control, LocalController)
    sink = HttpSink(f"https://shop:{CANARIES['broker']}@broker.example/", secret=f"whsec_{CANARIES['signing']}")
    things = (app, app._web, app._web.options, app.engine, control, sink, *app._web.options.tokens)
    await sink.close()
    fields = [str(v) for record in caplog.records for name, v in vars(record).items() if name.startswith("edda_")]
    assert fields
    shown = "\n".join([caplog.text, *fields, *map(repr, things), *map(str, things)])
    assert found_in(shown) == set()


async def test_no_span_has_a_secret(app: EddaApp, exporter: InMemorySpanExporter) -> None:
    await plant(app)
    await app.shutdown()
    spans = exporter.get_finished_spans()
    assert {"charge", "pay failed"} <= {span.name for span in spans}
    told = [
        (span.name, span.status.description, span.attributes, [e.attributes for e in span.events]) for span in spans
    ]
    # Spans have no step arguments: a secret within a text cannot be recognised there.
    assert found_in(repr(told)) <= {"password", "card"}


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://shop:{CANARIES['database']}@127.0.0.1:1/shop",
        f"mysql://shop:{CANARIES['database']}@127.0.0.1:1/shop",
        f"nonsense://shop:{CANARIES['database']}@127.0.0.1/shop",
    ],
)
async def test_a_database_that_cannot_be_had_is_named_without_its_password(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = []
    try:
        app = EddaApp("shop", url)
        said.append(repr(app))
        async with app:
            pass
    except (EddaError, ValueError) as error:
        said += [str(error), repr(error), repr(error.__cause__)]
    assert len(said) > 1
    assert found_in("\n".join([*said, caplog.text])) == set()
