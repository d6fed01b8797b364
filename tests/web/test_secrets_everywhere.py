"""Secrets sent through every input appear in no output."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from edda import EddaApp, RunStatus, WorkflowContext, send_event, wait_event, workflow
from edda.cli import main
from edda.cloudevents.event import make
from edda.control.remote import RemoteController
from edda.control.views import RunSearch, StartRequest
from edda.engine.outbox.sinks import HttpSink
from edda.errors import EddaError
from edda.outbox import open_sink
from edda.web import GitHub, StandardWebhooks, Stripe, Token, TokenScope
from edda.web.tokens import read_tokens
from tests.core.test_urls import URLS
from tests.engine.conditions import until_status

SECRET = "S3CRET"
TOKEN = "4f1d9c-view-7Qm9vc3QtdGhlLXNpZ25hbC1mb3I"


@pytest.fixture(autouse=True)
def written() -> Iterator[io.StringIO]:
    """All log records of ours and of libraries, with tracebacks."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    # The test client logs its own requests.
    handler.addFilter(lambda record: "http://127.0.0.1/_edda" not in record.getMessage())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)
    assert SECRET not in stream.getvalue()


def nowhere(url: str) -> str:
    """The same URL at a port where no server listens."""
    return url.replace("@h:", "@127.0.0.1:").replace("@h/", "@127.0.0.1:1/").replace("//h/", "//127.0.0.1:1/")


def told(error: BaseException | None) -> str:
    """An error with its causes."""
    found = []
    while error is not None:
        found += [str(error), repr(error)]
        error = error.__cause__ or error.__context__
    return "\n".join(found)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", [["doctor"], ["runs", "list"], ["migrate"], ["stats"]], ids=" ".join)
def test_no_command_prints_the_password_of_a_database(
    url: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [*command, "--db", nowhere(url)])
    assert result.exit_code != 0
    assert SECRET not in result.output
    if not isinstance(result.exception, SystemExit):
        assert SECRET not in told(result.exception)


@pytest.mark.parametrize("url", URLS)
async def test_no_app_shows_the_password_of_its_database(url: str) -> None:
    said = []
    try:
        app = EddaApp("shop", nowhere(url))
        said += [repr(app)]
        async with app:
            pass
    except (EddaError, ValueError, OSError) as error:
        said.append(told(error))
    assert said
    assert SECRET not in "\n".join(said)


BROKER = f"http://user:{SECRET}@127.0.0.1:1/events?token={SECRET}"


async def test_no_client_shows_the_password_of_a_receiver() -> None:
    """httpx logs each URL that it requests."""
    sink, remote = HttpSink(BROKER), RemoteController(f"http://user:{SECRET}@127.0.0.1:1")
    errors = []
    for attempt in (
        sink.send(make("t", "/s", "1", {})),
        send_event("t", "/s", {}, broker_url=BROKER),
        remote.list_runs(RunSearch()),
    ):
        with pytest.raises(EddaError) as caught:
            await attempt
        errors.append(f"{caught.value!s}{caught.value!r}")
    await sink.close()
    await remote.close()
    assert SECRET not in "".join([*errors, repr(sink), repr(remote)])


def test_a_receiver_gets_the_password_all_the_same() -> None:
    sink = HttpSink(f"http://user:{SECRET}@127.0.0.1:1/events")
    headers, _ = sink._write(make("t", "/s", "1", {}))
    assert dict(headers)["Authorization"] == "Basic dXNlcjpTM0NSRVQ="
    assert sink._url == "http://127.0.0.1:1/events"


class Card(BaseModel):
    number: int
    password: int


WRONG: list[Any] = [
    SECRET,
    [SECRET],
    {"password": SECRET},
    {"number": SECRET, "password": {"iban": SECRET}},
    [{"a": SECRET}],
]


@workflow(name="settle")
async def pay(ctx: WorkflowContext, amount: int, card: Card) -> None:
    await wait_event(ctx, "paid", model=Card, match={"token": SECRET})


@workflow(event_handler=True, name="card.added")
async def added(ctx: WorkflowContext, card: Card) -> None: ...


@pytest.fixture
async def app() -> Any:
    tokens = [Token("all", frozenset(TokenScope), TOKEN)]
    async with EddaApp("shop", "memory://", tokens=tokens, redact=["iban"], workflows=[pay, added]) as app:
        yield app


def client_for(app: EddaApp) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app, client=("127.0.0.1", 50_000))
    return httpx2.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers={"authorization": f"Bearer {TOKEN}"}
    )


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
async def test_no_refusal_repeats_what_was_wrong(app: EddaApp, wrong: Any) -> None:
    api = "/_edda/api/v1"
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/t", "ce-type": "card.added"}
    structured = {"specversion": "1.0", "id": "2", "source": "/t", "type": "card.added", "data": {"card": wrong}}
    errors = []
    for start in (
        lambda: app.start(pay, wrong, wrong),
        lambda: app.control.start_run(StartRequest("settle", {"card": wrong})),
    ):
        with pytest.raises(EddaError) as caught:
            await start()
        errors.append(told(caught.value))
    async with client_for(app) as client:
        answers = [
            await client.post(f"{api}/runs", json={"workflow": "settle", "input": {"amount": wrong, "card": wrong}}),
            await client.post(f"{api}/runs", json={"workflow": wrong, "input": wrong}),
            await client.post(f"{api}/events", json={"type": "card.added", "data": {"card": wrong}, "id": ["x"]}),
            await client.post("/events", headers=headers, json={"card": wrong}),
            await client.post("/events", headers={"content-type": "application/cloudevents+json"}, json=structured),
            await client.post("/_edda/runs/new", data={"workflow": "settle", "input": json.dumps({"card": wrong})}),
            await client.post("/cancel/x", json={"reason": wrong if not isinstance(wrong, str) else 1}),
            await client.get(f"{api}/runs", params={"input": f"password={SECRET}"}),
            await client.get(f"{api}/runs", params={"input": SECRET}),
            await client.get(f"{api}/runs/count", params={"input": f"card.password={SECRET}"}),
        ]
    assert {answer.status_code // 100 for answer in answers} <= {4}
    said = [answer.text for answer in answers if answer.status_code != 404]  # a 404 names the missing id
    assert SECRET not in "\n".join([*errors, *said])


@pytest.mark.parametrize("data", WRONG, ids=repr)
async def test_a_rejected_event_is_logged_without_its_values(app: EddaApp, data: Any) -> None:
    run_id = await app.start(pay, 1, Card(number=1, password=2))
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await app.send_event("paid", "/bank", {"token": SECRET, "number": data, "password": data})
    record = await app.client.read_run(run_id)
    assert SECRET not in (record.reason or "")
    async with client_for(app) as client:
        found = await client.get("/_edda/api/v1/runs", params={"q": SECRET})
        assert found.json()["items"] == [], "a search confirms no secret"
        for path in (f"/_edda/api/v1/runs/{run_id}", f"/_edda/api/v1/runs/{run_id}/history", "/_edda/metrics"):
            assert SECRET not in (await client.get(path)).text


MISTAKEN: dict[str, Callable[[], object]] = {
    "scopes and secret in the wrong order": lambda: read_tokens(f"shop:{SECRET}:events"),
    "a secret alone": lambda: read_tokens(SECRET),
    "a secret that is too short": lambda: Token("shop", frozenset({TokenScope.EVENTS}), SECRET),
    "JSON with a secret as a scope": lambda: read_tokens(f'[{{"name": "a", "scopes": ["{SECRET}"], "secret": "x"}}]'),
    "JSON with a secret as a field": lambda: read_tokens(f'[{{"name": "a", "{SECRET}": 1}}]'),
    "JSON that is none": lambda: read_tokens(f'[{{"name": "{SECRET}'),
    "a webhook's secret in the place of its path": lambda: GitHub(SECRET, "/hooks/github"),
    "a webhook's secret with a space": lambda: GitHub("/hooks/github", f" {SECRET}"),
    "a webhook's secret that is not base64": lambda: StandardWebhooks("/hooks", f"whsec_{SECRET}!"),
    "one of several secrets of a webhook": lambda: Stripe("/hooks", [SECRET, f"{SECRET} "]),
    "a sink's secret that is not base64": lambda: HttpSink("http://127.0.0.1:1/", secret=f"whsec_{SECRET}!"),
    "a sink in binary mode": lambda: HttpSink("http://127.0.0.1:1/", mode="binary", secret=SECRET),
    "a broker of an unknown kind": lambda: open_sink(f"amqp://u:{SECRET}@127.0.0.1:1/x"),
    "a broker without a stream": lambda: open_sink(f"nats://u:{SECRET}@127.0.0.1:1"),
    "a broker with a port that is none": lambda: open_sink(f"nats://u:{SECRET}/x@127.0.0.1:port/s"),
    "a broker without a scheme": lambda: open_sink(f"u:{SECRET}@127.0.0.1:1/x"),
}


@pytest.mark.parametrize("mistake", MISTAKEN)
def test_no_error_of_a_setting_shows_the_secret(mistake: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        MISTAKEN[mistake]()
    assert SECRET not in told(caught.value)


async def test_no_message_of_a_nats_server_that_is_away_has_its_password() -> None:
    sink = open_sink(f"nats://user:{SECRET}@127.0.0.1:1/orders?subject=a", timeout=1)
    with pytest.raises((EddaError, OSError)) as caught:
        await sink.send(make("t", "/s", "1", {}))
    await sink.close()
    assert SECRET not in told(caught.value) + repr(sink)


SERVED = """
from edda import EddaApp

broker = "http://u:{secret}@127.0.0.1:1/"
app = EddaApp("shop", "postgresql://u:{secret}@127.0.0.1:1/shop", broker_url=broker, outbox_enabled=True)
"""


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ("serve", {}),
        ("serve", {"EDDA_TOKENS": f"shop:{SECRET}:events"}),
        ("serve", {"EDDA_TOKENS": f"shop:events:{SECRET * 6}0123456789abcdef"}),
        ("worker", {}),
    ],
)
def test_no_server_prints_a_secret_when_it_starts(command: str, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SERVED.format(secret=SECRET))
    port = ["--port", "0"] if command == "serve" else []
    done = subprocess.run(
        [sys.executable, "-m", "edda", command, "shop:app", *port],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr
    assert SECRET not in done.stdout + done.stderr


async def test_the_doctor_prints_no_secret_of_runs_and_outbox_events(tmp_path: Path) -> None:
    @workflow
    async def leak(ctx: WorkflowContext, password: str) -> None:
        raise ValueError(f"refused {password}, see https://u:{SECRET}@bank.example/")

    url = f"sqlite:///{tmp_path / 'shop.db'}"
    async with EddaApp("shop", url, workflows=[leak]) as app:
        run_id = await app.start(leak, password=SECRET)
        await until_status(app, run_id, RunStatus.FAILED)
    for command in (["doctor"], ["runs", "list"], ["runs", "show", run_id, "--history"], ["stats"]):
        result = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--db", url])
        assert result.output
        assert SECRET not in result.output
