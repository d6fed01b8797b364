"""Webhooks of other services: signatures, and the events that they become."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec import Raw

from edda import EddaApp, ReceivedEvent, WorkflowContext, workflow
from edda.cloudevents.event import CloudEvent
from edda.cloudevents.signatures import sign
from edda.errors import StorageUnavailableError
from edda.web import GitHub, StandardWebhooks, State, Stripe, Token, TokenScope, WebApp, Webhook, WebOptions
from tests.conftest import Database

from .calls import EVENT, Reply, ask, chunk
from .fakes import FakeService
from .servers import TIMEOUT, Server, free_port, running, wait_until_ready

GITHUB = "a secret for GitHub"
STRIPE = "whsec_stripe_takes_it_as_it_is"
STANDARD = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEXT = "whsec_bmV4dG5leHRuZXh0bmV4dG5leHRuZXh0"
ELSEWHERE = ("192.0.2.7", 50000)
HOST = {"host": "shop.example", "x-forwarded-for": "192.0.2.9"}
"""A request from another machine through a proxy."""
PUSH = b'{"ref": "refs/heads/main", "repository": {"id": 1, "full_name": "octo/hello-world"}}'
PAID = b'{"id": "evt_1", "object": "event", "type": "invoice.paid", "data": {"object": {"amount": 100}}}'
USER = b'{"type": "user.created", "timestamp": "2022-11-03T20:26:10Z", "data": {"id": "7"}}'
ORDER = {"specversion": "1.0", "id": "1", "source": "/tests", "type": "order.created", "data": {"n": 1}}


def by_github(body: bytes = PUSH, secret: str = GITHUB, **changes: str) -> dict[str, str]:
    return {
        **HOST,
        "content-type": "application/json",
        "x-github-event": "push",
        "x-github-delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958",
        "x-hub-signature-256": f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}",
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }


def by_stripe(body: bytes = PAID, secret: str = STRIPE, late: float = 0.0) -> dict[str, str]:
    sent_at = int(time.time() - late)
    code = hmac.new(secret.encode(), b"%d.%b" % (sent_at, body), hashlib.sha256).hexdigest()
    return {**HOST, "content-type": "application/json; charset=utf-8", "stripe-signature": f"t={sent_at},v1={code}"}


def by_standard(
    body: bytes = USER, secret: str = STANDARD, late: float = 0.0, id: str = "msg_1", **changes: str
) -> dict[str, str]:
    headers = dict(sign(secret, id, int(time.time() - late), body))
    changed = {name.replace("_", "-"): value for name, value in changes.items()}
    return {**HOST, "content-type": "application/json", **headers, **changed}


HOOKS = (GitHub("/hooks/github", GITHUB), Stripe("/hooks/stripe", STRIPE), StandardWebhooks("/hooks/billing", STANDARD))
SENT: dict[str, tuple[bytes, Callable[..., dict[str, str]], str]] = {
    "/hooks/github": (PUSH, by_github, GITHUB),
    "/hooks/stripe": (PAID, by_stripe, STRIPE),
    "/hooks/billing": (USER, by_standard, STANDARD),
}


@pytest.fixture
def hooked(service: FakeService) -> WebApp:
    return WebApp(service, WebOptions(webhooks=HOOKS))


def assert_unauthorized(reply: Reply, service: FakeService) -> None:
    assert reply.status == 401
    assert reply.json["error_type"] == "Unauthorized"
    assert reply.json["retryable"] is False
    assert reply.headers["www-authenticate"].startswith("Signature ")
    assert service.stored == []


def content_of(event: CloudEvent) -> bytes:
    assert isinstance(event.data, Raw)
    return bytes(event.data)


# Events


async def test_a_push_at_github_becomes_an_event_of_the_repository(hooked: WebApp, service: FakeService) -> None:
    reply = await ask(hooked, path="/hooks/github", headers=by_github(), body=PUSH)
    assert (reply.status, reply.json) == (202, {"status": "accepted"})
    (event,) = service.stored
    assert (event.type, event.source) == ("github.push", "github/octo/hello-world")
    assert event.id == "72d3162e-cc78-11e3-81ab-4c9367dc0958"
    assert event.datacontenttype == "application/json"
    assert content_of(event) == PUSH


@pytest.mark.parametrize(
    ("body", "source"),
    [
        (b'{"zen": "Keep it logically awesome."}', "github"),
        (b'{"repository": null}', "github"),
        (b'{"repository": {"full_name": "a b/c?d"}}', "github/a%20b/c%3Fd"),
    ],
)
async def test_not_everything_at_github_is_about_a_repository(
    hooked: WebApp, service: FakeService, body: bytes, source: str
) -> None:
    assert (await ask(hooked, path="/hooks/github", headers=by_github(body), body=body)).status == 202
    assert service.stored[0].source == source


async def test_an_invoice_of_stripe_becomes_an_event_of_its_own_id(hooked: WebApp, service: FakeService) -> None:
    assert (await ask(hooked, path="/hooks/stripe", headers=by_stripe(), body=PAID)).status == 202
    (event,) = service.stored
    assert (event.id, event.type, event.source) == ("evt_1", "stripe.invoice.paid", "stripe")
    assert content_of(event) == PAID


async def test_a_standard_webhook_becomes_an_event_of_the_path(hooked: WebApp, service: FakeService) -> None:
    assert (await ask(hooked, path="/hooks/billing", headers=by_standard(), body=USER)).status == 202
    (event,) = service.stored
    assert (event.id, event.type, event.source) == ("msg_1", "user.created", "/hooks/billing")
    assert content_of(event) == USER


@pytest.mark.parametrize("content_type", ["application/cloudevents+json", "application/json", "text/plain"])
async def test_a_signed_cloudevent_is_read_the_same_under_every_content_type(
    hooked: WebApp, service: FakeService, content_type: str
) -> None:
    """The header is not signed: under another one the same body must not become another event."""
    body = json.dumps(ORDER).encode()
    headers = by_standard(body, content_type=content_type)
    assert (await ask(hooked, path="/hooks/billing", headers=headers, body=body)).status == 202
    (event,) = service.stored
    assert (event.id, event.type, event.source) == ("1", "order.created", "/tests")


async def test_a_signed_batch_is_stored_as_a_whole(hooked: WebApp, service: FakeService) -> None:
    body = json.dumps([ORDER, ORDER | {"id": "2"}]).encode()
    headers = by_standard(body, content_type="application/cloudevents-batch+json")
    assert (await ask(hooked, path="/hooks/billing", headers=headers, body=body)).status == 202
    assert [event.id for event in service.stored] == ["1", "2"]


async def test_attributes_in_headers_are_not_signed_and_so_refused(hooked: WebApp, service: FakeService) -> None:
    reply = await ask(hooked, path="/hooks/billing", headers=EVENT | by_standard(), body=USER)
    assert (reply.status, service.stored) == (415, [])
    assert "structured" in reply.json["error"]


# Signatures


@pytest.mark.parametrize("path", SENT)
@pytest.mark.parametrize("auth", [None, "none", "tokens"])
async def test_a_signature_suffices_from_any_address(service: FakeService, path: str, auth: str | None) -> None:
    body, signed, _ = SENT[path]
    token = Token("shop", frozenset(TokenScope), "Vd0vzRQnC0d2yqW1sZ6b8HfJpK4uTgXe")
    options = WebOptions(tokens=(token,), webhooks=HOOKS) if auth == "tokens" else WebOptions(auth=auth, webhooks=HOOKS)
    headers = signed() | {"origin": "https://sender.example"}
    assert (await ask(WebApp(service, options), path=path, headers=headers, body=body, client=ELSEWHERE)).status == 202


@pytest.mark.parametrize("path", SENT)
async def test_a_body_that_was_changed_is_refused_and_not_stored(
    hooked: WebApp, service: FakeService, path: str
) -> None:
    body, signed, _ = SENT[path]
    assert_unauthorized(await ask(hooked, path=path, headers=signed(), body=body + b" "), service)
    assert_unauthorized(await ask(hooked, path=path, headers=signed(secret=NEXT), body=body), service)


@pytest.mark.parametrize("path", SENT)
async def test_a_request_without_a_signature_is_refused_before_its_body_is_read(
    hooked: WebApp, service: FakeService, path: str
) -> None:
    reply = await ask(hooked, path=path, headers=EVENT)
    assert_unauthorized(reply, service)
    assert "missing" in reply.json["error"]
    assert reply.receives == 0


@pytest.mark.parametrize("path", ["/hooks/stripe", "/hooks/billing"])
@pytest.mark.parametrize("late", [1000.0, -1000.0])
async def test_a_signature_of_another_hour_is_refused(
    hooked: WebApp, service: FakeService, path: str, late: float
) -> None:
    body, signed, _ = SENT[path]
    reply = await ask(hooked, path=path, headers=signed(late=late), body=body)
    assert_unauthorized(reply, service)
    assert "300 seconds" in reply.json["error"]
    assert reply.receives == 0


@pytest.mark.parametrize("kind", [Stripe, StandardWebhooks])
async def test_the_window_is_an_option(service: FakeService, kind: Any) -> None:
    signed, body = (by_stripe, PAID) if kind is Stripe else (by_standard, USER)
    web = WebApp(service, WebOptions(webhooks=(kind("/hook", [STANDARD, STRIPE][kind is Stripe], tolerance=5000),)))
    assert (await ask(web, path="/hook", headers=signed(late=1000.0), body=body)).status == 202
    assert (await ask(web, path="/hook", headers=signed(late=6000.0), body=body)).status == 401


@pytest.mark.parametrize(("kind", "path"), [(GitHub, "/hooks/github"), (StandardWebhooks, "/hooks/billing")])
async def test_two_secrets_are_valid_while_one_replaces_the_other(service: FakeService, kind: Any, path: str) -> None:
    body, signed, secret = SENT[path]
    web = WebApp(service, WebOptions(webhooks=(kind("/hook", [NEXT, secret]),)))
    for one in (secret, NEXT):
        assert (await ask(web, path="/hook", headers=signed(secret=one), body=body)).status == 202


async def test_the_secret_of_one_sender_is_not_valid_for_another(hooked: WebApp, service: FakeService) -> None:
    headers = by_standard(secret=NEXT) | by_github(USER)
    assert_unauthorized(await ask(hooked, path="/hooks/billing", headers=headers, body=USER), service)


@pytest.mark.parametrize("path", SENT)
async def test_a_read_only_server_refuses_webhooks(service: FakeService, path: str) -> None:
    body, signed, _ = SENT[path]
    reply = await ask(
        WebApp(service, WebOptions(webhooks=HOOKS, read_only=True)), path=path, headers=signed(), body=body
    )
    assert (reply.status, reply.receives, service.stored) == (403, 0, [])


async def test_on_its_path_a_token_is_no_signature(service: FakeService) -> None:
    secret = "Vd0vzRQnC0d2yqW1sZ6b8HfJpK4uTgXe"
    token = Token("shop", frozenset(TokenScope), secret)
    web = WebApp(service, WebOptions(tokens=(token,), webhooks=(StandardWebhooks("/events", STANDARD),)))
    headers = EVENT | {"authorization": f"Bearer {secret}"}
    assert_unauthorized(await ask(web, path="/events", headers=headers), service)
    assert (await ask(web, path="/elsewhere", headers=headers)).status == 202


async def test_a_signature_is_no_token_on_other_paths(hooked: WebApp, service: FakeService) -> None:
    body = json.dumps(ORDER).encode()
    headers = by_standard(body, content_type="application/cloudevents+json")
    for path in ("/events", "/hooks/billing/", "/hooks", "/cancel/run-1"):
        assert (await ask(hooked, path=path, headers=headers, body=body, client=ELSEWHERE)).status == 403
    assert [*service.stored, *service.cancelled] == []


async def test_a_refusal_is_logged_without_what_was_sent(hooked: WebApp, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "edda.web"):
        await ask(hooked, path="/hooks/github", headers=by_github(), body=b"s3cret")
    assert "/hooks/github" in caplog.text
    assert "does not fit" in caplog.text
    assert "s3cret" not in caplog.text


# Signed requests that are refused


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/hooks/github", b"{", "JSON"),
        ("/hooks/github", b'{"a": 1, "a": 2}', "twice"),
        ("/hooks/github", b"[]", "object"),
        ("/hooks/github", b'{"repository": {"full_name": 1}}', "full_name"),
        ("/hooks/stripe", b"", "JSON"),
        ("/hooks/stripe", b'{"type": "invoice.paid"}', "an id"),
        ("/hooks/stripe", b'{"id": 1, "type": "invoice.paid"}', "an id"),
        ("/hooks/stripe", b'{"id": "", "type": "invoice.paid"}', "id"),
        ("/hooks/billing", b"\xff", "UTF-8"),
        ("/hooks/billing", b'{"data": {}}', "a type"),
        ("/hooks/billing", b'{"type": ""}', "type"),
        ("/hooks/billing", b'{"type": "%b"}' % (b"x" * 300), "type"),
        ("/hooks/billing", b'{"type": "a", "specversion": "1.0"}', "id is missing"),
        ("/hooks/billing", b"[" * 1000 + b"]" * 1000, "deep"),
    ],
)
async def test_a_good_signature_does_not_make_an_event_of_everything(
    hooked: WebApp, service: FakeService, path: str, body: bytes, error: str
) -> None:
    reply = await ask(hooked, path=path, headers=SENT[path][1](body), body=body)
    assert (reply.status, reply.json["error_type"], reply.json["retryable"]) == (400, "EventError", False)
    assert error in reply.json["error"]
    assert service.stored == []


@pytest.mark.parametrize("name", ["x-github-delivery", "x-github-event"])
async def test_a_header_that_github_always_sends_is_named_when_it_is_missing(hooked: WebApp, name: str) -> None:
    headers = {key: value for key, value in by_github().items() if key != name}
    reply = await ask(hooked, path="/hooks/github", headers=headers, body=PUSH)
    assert reply.status == 400
    assert name in reply.json["error"]


async def test_the_error_for_a_form_of_github_names_the_setting(hooked: WebApp) -> None:
    body = b"payload=%7B%7D"
    headers = by_github(body, content_type="application/x-www-form-urlencoded")
    reply = await ask(hooked, path="/hooks/github", headers=headers, body=body)
    assert reply.status == 415
    assert "application/json" in reply.json["error"]


async def test_the_limits_are_those_of_every_request(service: FakeService) -> None:
    web = WebApp(service, WebOptions(webhooks=HOOKS, max_body=len(PUSH) - 1))
    assert (await ask(web, path="/hooks/github", headers=by_github(), body=PUSH)).status == 413
    impatient = WebApp(service, WebOptions(webhooks=HOOKS, body_timeout=0.01))
    slow = [chunk(b"") for _ in range(100_000)]
    assert (await ask(impatient, path="/hooks/github", headers=by_github(), messages=slow)).status == 408
    headers = [*by_github().items(), *(("x", "y"),) * 100]
    assert (await ask(web, path="/hooks/github", headers=headers, body=PUSH)).status == 431
    assert service.stored == []


async def test_memory_that_bodies_held_is_free_again(service: FakeService) -> None:
    web = WebApp(service, WebOptions(webhooks=HOOKS, max_buffered=2 * len(PUSH)))
    for _ in range(5):
        assert (await ask(web, path="/hooks/github", headers=by_github(secret="x"), body=PUSH)).status == 401
        assert (await ask(web, path="/hooks/github", headers=by_github(), body=PUSH)).status == 202


async def test_a_sender_gets_503_while_the_database_is_away(hooked: WebApp, service: FakeService) -> None:
    service.error = StorageUnavailableError("away")
    away = await ask(hooked, path="/hooks/github", headers=by_github(), body=PUSH)
    assert (away.status, away.json["retryable"]) == (503, True)
    service.error, service.state = None, State.DRAINING
    assert (await ask(hooked, path="/hooks/github", headers=by_github(), body=PUSH)).status == 503


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
async def test_a_webhook_supports_post_only(hooked: WebApp, method: str) -> None:
    reply = await ask(hooked, path="/hooks/github", method=method, headers=by_github(), body=PUSH)
    assert (reply.status, reply.headers["allow"]) == (405, "POST, OPTIONS")


async def test_the_handshake_is_as_on_every_path(hooked: WebApp) -> None:
    assert (await ask(hooked, path="/hooks/billing", method="OPTIONS")).status == 204


# Invalid settings


@pytest.mark.parametrize("kind", [GitHub, Stripe, StandardWebhooks])
@pytest.mark.parametrize(
    ("path", "secret", "error"),
    [
        ("hooks", STANDARD, "expected a path"),
        ("", STANDARD, "expected a path"),
        (None, STANDARD, "expected a path"),
        ("/hooks?a=1", STANDARD, "query"),
        ("/_edda", STANDARD, "/_edda"),
        ("/_edda/hooks", STANDARD, "/_edda"),
        ("/cancel/hooks", STANDARD, "/cancel"),
        ("/hooks", "", "empty"),
        ("/hooks", "  ", "empty"),
        ("/hooks", f"{STANDARD}\n", "white space"),
        ("/hooks", [], "a secret is required"),
        ("/hooks", [STANDARD, ""], "empty"),
        ("/hooks", None, "as a str, not NoneType"),
        ("/hooks", b"bytes", "as a str, not bytes"),
    ],
)
def test_a_webhook_that_cannot_work_is_refused_when_it_is_made(kind: Any, path: Any, secret: Any, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error) as refused:
        kind(path, secret)
    assert STANDARD not in str(refused.value)


@pytest.mark.parametrize("tolerance", [0, -1, float("nan")])
def test_a_window_is_longer_than_nothing(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance"):
        Stripe("/hooks", STRIPE, tolerance=tolerance)


def test_a_path_has_one_sender() -> None:
    with pytest.raises(ValueError, match="twice"):
        WebOptions(webhooks=(GitHub("/hooks", GITHUB), Stripe("/hooks", STRIPE)))


def test_an_app_has_the_webhooks_of_both_its_options() -> None:
    app = EddaApp("shop", "memory://", webhooks=HOOKS[:1], web=WebOptions(webhooks=HOOKS[1:]))
    assert set(app.web_options.webhooks) == set(HOOKS)
    with pytest.raises(ValueError, match="twice"):
        EddaApp("shop", "memory://", webhooks=HOOKS, web=WebOptions(webhooks=HOOKS))
    wrong: Any = ["/hooks"]
    with pytest.raises(TypeError, match="expected GitHub, Stripe or StandardWebhooks, not str"):
        EddaApp("shop", "memory://", webhooks=wrong)


@pytest.mark.parametrize("webhook", HOOKS)
def test_a_secret_is_not_shown(webhook: Webhook) -> None:
    shown = repr(webhook)
    assert webhook.path in shown
    assert not any(secret[6:] in shown for secret in (GITHUB, STRIPE, STANDARD))
    assert repr(webhook.keys[0]) not in shown


# With a real app


async def test_a_webhook_starts_one_run_however_often_it_is_delivered(database: Database) -> None:
    @workflow
    async def note_payment(ctx: WorkflowContext, event: ReceivedEvent) -> int:
        amount: int = event.data["data"]["object"]["amount"]
        return amount

    app = EddaApp("shop", storage=database.storage(), webhooks=HOOKS, workflows=[note_payment])
    app.on_event("stripe.invoice.paid")(note_payment)
    async with app:
        for _ in range(3):
            assert (await ask(app, path="/hooks/stripe", headers=by_stripe(), body=PAID)).status == 202
        (run,) = (await app.find_instances(workflow_name="note_payment"))["instances"]
        assert await app.handle(run["instance_id"]).result(timeout=30) == 100


PROGRAM = f"""
from edda import EddaApp
from edda.web import GitHub, StandardWebhooks
app = EddaApp("shop", "sqlite:///shop.db", webhooks=[GitHub("/github", {GITHUB!r}), StandardWebhooks("/in", {NEXT!r})])
"""


def path_with(folder: Path) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


async def test_a_served_app_accepts_webhooks_beside_events(tmp_path: Path) -> None:
    (tmp_path / "hooked_shop.py").write_text(PROGRAM.replace("shop.db", f"/{tmp_path}/shop.db"))
    port = free_port()
    command = ["-m", "edda", "serve", "hooked_shop:app", "--port", str(port)]
    async with running(command, PYTHONPATH=path_with(tmp_path)) as process:
        server = Server(process, port)
        await wait_until_ready(server)
        async with httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=TIMEOUT) as client:
            good = await client.post("/github", headers=by_github(), content=PUSH)
            assert (good.status_code, good.json()) == (202, {"status": "accepted"})
            bad = await client.post("/github", headers=by_github(), content=PUSH + b"\n")
            assert (bad.status_code, bad.json()["retryable"]) == (401, False)
            assert (await client.post("/in", headers=by_standard(secret=NEXT), content=USER)).status_code == 202
            events = {name: value for name, value in EVENT.items() if name != "host"}
            assert (await client.post("/events", headers=events, content=b"{}")).status_code == 202
