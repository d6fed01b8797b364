"""OPTIONS: the webhook handshake, and CORS preflights."""

from __future__ import annotations

import secrets

import pytest

from edda.web import Token, TokenScope, WebApp, WebOptions

from .calls import Reply, ask
from .fakes import FakeService

HERE = {"host": "localhost"}


async def shake(options: WebOptions, **headers: str) -> Reply:
    named = {f"webhook-request-{name}": value for name, value in headers.items()}
    return await ask(WebApp(FakeService(), options), method="OPTIONS", headers=HERE | named, body=b"")


def grants(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("webhook-")}


async def test_an_allowed_sender_gets_permission() -> None:
    reply = await shake(WebOptions(allowed_origins=("sender.example",)), origin="Sender.example")
    assert (reply.status, reply.headers["allow"]) == (200, "POST")
    assert grants(reply) == {"webhook-allowed-origin": "sender.example"}


@pytest.mark.parametrize(("rate", "granted"), [(None, "*"), (120, "120")])
async def test_a_sender_that_requests_a_rate_gets_one(rate: int | None, granted: str) -> None:
    reply = await shake(WebOptions(allowed_origins=("*",), allowed_rate=rate), origin="sender.example", rate="1000")
    assert grants(reply) == {"webhook-allowed-origin": "*", "webhook-allowed-rate": granted}


@pytest.mark.parametrize("asked", ["60", "*", "nonsense", ""])
@pytest.mark.parametrize(("rate", "granted"), [(None, "*"), (120, "120")])
async def test_the_requested_rate_does_not_change_the_granted_one(asked: str, rate: int | None, granted: str) -> None:
    reply = await shake(WebOptions(allowed_origins=("*",), allowed_rate=rate), origin="a", rate=asked)
    assert reply.headers["webhook-allowed-rate"] == granted


async def test_a_limit_is_stated_also_without_a_request_for_it() -> None:
    assert "webhook-allowed-rate" not in grants(await shake(WebOptions(allowed_origins=("*",)), origin="a"))
    reply = await shake(WebOptions(allowed_origins=("*",), allowed_rate=5), origin="a")
    assert grants(reply)["webhook-allowed-rate"] == "5"


async def test_the_permission_has_the_text_of_the_settings_and_nothing_of_the_request() -> None:
    reply = await shake(WebOptions(allowed_origins=("Sender.example",)), origin="sender.EXAMPLE")
    assert grants(reply) == {"webhook-allowed-origin": "Sender.example"}
    reply = await shake(WebOptions(allowed_origins=("*",)), origin="evil\r\nSet-Cookie: x")
    assert grants(reply) == {"webhook-allowed-origin": "*"}


@pytest.mark.parametrize("origin", ["other.example", "*", "sender.example.evil.com"])
async def test_a_similar_name_gets_no_permission(origin: str) -> None:
    assert grants(await shake(WebOptions(allowed_origins=("sender.example",)), origin=origin, rate="10")) == {}


async def test_an_empty_origin_is_no_handshake() -> None:
    reply = await shake(WebOptions(allowed_origins=("*",)), origin=" ")
    assert (reply.status, grants(reply)) == (204, {})


@pytest.mark.parametrize("origins", [(), ("other.example",)])
async def test_a_sender_that_is_not_allowed_gets_no_permission(origins: tuple[str, ...]) -> None:
    reply = await shake(WebOptions(allowed_origins=origins), origin="sender.example", rate="1")
    assert reply.status == 200
    assert grants(reply) == {}


async def test_a_callback_is_logged_and_never_fetched(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("something was to be connected to")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("asyncio.BaseEventLoop.create_connection", refuse)
    caplog.set_level("INFO")
    address = "http://169.254.169.254/confirm"
    await shake(WebOptions(allowed_origins=("*",)), origin="sender.example", callback=address)
    assert address in caplog.text


async def test_what_a_sender_writes_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await shake(WebOptions(), origin="x\nERROR forged" + "x" * 10_000)
    assert "\nERROR" not in caplog.text
    assert len(caplog.text) < 1000


async def test_a_preflight_of_a_browser_gets_no_cors_headers(web: WebApp) -> None:
    headers = HERE | {"origin": "http://evil.example", "access-control-request-method": "POST"}
    reply = await ask(web, method="OPTIONS", headers=headers)
    assert (reply.status, reply.headers["allow"]) == (204, "POST, OPTIONS")
    assert not any(name.startswith("access-control") for name in reply.headers)


async def test_options_returns_the_allowed_methods(web: WebApp) -> None:
    for path in ("/events", "*", "/"):
        reply = await ask(web, method="OPTIONS", path=path, headers=HERE)
        assert (reply.status, reply.headers["allow"], reply.body) == (204, "POST, OPTIONS", b"")


async def test_the_handshake_needs_no_token() -> None:
    token = Token("a", frozenset({TokenScope.EVENTS}), secrets.token_urlsafe(32))
    reply = await shake(WebOptions(tokens=(token,), allowed_origins=("*",)), origin="sender.example")
    assert grants(reply) == {"webhook-allowed-origin": "*"}


CORS = [
    ("OPTIONS", "/events", {"access-control-request-method": "POST"}, ()),
    ("OPTIONS", "/events", {"access-control-request-method": "POST"}, ("*",)),
    ("OPTIONS", "/events", {"access-control-request-headers": "authorization"}, ("evil.example",)),
    ("OPTIONS", "/cancel/run", {"access-control-request-method": "POST"}, ("*",)),
    ("OPTIONS", "/_edda/", {"access-control-request-method": "GET"}, ("*",)),
    ("OPTIONS", "/_edda/api/v1/runs", {"access-control-request-private-network": "true"}, ("*",)),
    ("OPTIONS", "/events", {"webhook-request-origin": "evil.example"}, ("*",)),
    ("GET", "/_edda/livez", {}, ("*",)),
    ("GET", "/_edda/readyz", {}, ()),
    ("GET", "/_edda/api/v1/runs", {}, ("*",)),
    ("POST", "/events", {}, ("*",)),
    ("HEAD", "/_edda/", {}, ("*",)),
]


@pytest.mark.parametrize(("method", "path", "headers", "origins"), CORS)
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost"])
async def test_no_page_of_another_origin_may_read_anything(
    method: str, path: str, headers: dict[str, str], origins: tuple[str, ...], origin: str
) -> None:
    """`allowed_origins` are senders of webhooks, not web pages."""
    web = WebApp(FakeService(), WebOptions(allowed_origins=origins))
    reply = await ask(web, method=method, path=path, headers=HERE | headers | {"origin": origin}, body=b"")
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert reply.headers["cross-origin-resource-policy"] == "same-origin"
