"""Access to the server, and the headers of every response."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product

import pytest

from edda.errors import EventError, StorageUnavailableError
from edda.web import State, Token, TokenScope, WebApp, WebOptions

from .calls import EVENT, Call, ask, deliver
from .fakes import FakeService

SECRETS = {scope: f"Vd0vzRQnC0d2yqW1sZ6b8HfJpK4uTgXe_{scope.value}" for scope in TokenScope}
TOKENS = tuple(Token(scope.value, frozenset({scope}), secret) for scope, secret in SECRETS.items())
ELSEWHERE = ("192.0.2.7", 50000)


def with_host(host: str) -> dict[str, str]:
    return EVENT | {"host": host}


def with_token(scope: TokenScope) -> dict[str, str]:
    return EVENT | {"authorization": f"Bearer {SECRETS[scope]}"}


@pytest.fixture
def guarded(service: FakeService) -> WebApp:
    return WebApp(service, WebOptions(tokens=TOKENS))


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", None, ""])
async def test_without_tokens_this_machine_is_served(web: WebApp, client: str | None) -> None:
    """A client on a Unix socket has no address."""
    assert (await ask(web, client=None if client is None else (client, 1))).status == 202


@pytest.mark.parametrize("client", ["192.0.2.7", "10.0.0.1", "::2", "::ffff:10.0.0.1", "testclient", "127.0.0.1.x"])
@pytest.mark.parametrize("path", ["/events", "/cancel/run", "/_edda/livez", "/_edda/readyz", "/_edda/x"])
async def test_without_tokens_other_machines_are_refused_with_the_setting_to_change(
    web: WebApp, service: FakeService, client: str, path: str
) -> None:
    for method in ("POST", "GET", "OPTIONS"):
        reply = await ask(web, client=(client, 1), path=path, method=method)
        assert (reply.status, reply.receives) == (403, 0)
        assert "EDDA_TOKENS" in reply.json["error"]
        assert 'auth="none"' in reply.json["error"]
    assert [*service.stored, *service.cancelled] == []


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "X-Forwarded-Host"])
async def test_a_request_forwarded_by_a_local_proxy_is_not_local(web: WebApp, header: str) -> None:
    assert (await ask(web, headers=EVENT | {header: "127.0.0.1"})).status == 403


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8001", "localhost.", "a.localhost", "127.0.0.1", "127.1.2.3:80", "[::1]:8001", "[::1]"],
)
async def test_without_tokens_this_machine_is_served_by_its_own_names(web: WebApp, host: str) -> None:
    assert (await ask(web, headers=with_host(host))).status == 202


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8001",
        "evil.example:80@localhost",
        "localhost:80:80",
        "localhost/",
        "0.0.0.0",
        "192.168.0.1",
        "[::2]",
        "::1",
        "",
        "x" * 300,
        "localhost evil.example",
    ],
)
async def test_a_foreign_name_that_resolves_to_this_machine_is_refused(
    web: WebApp, service: FakeService, host: str
) -> None:
    reply = await ask(web, headers=with_host(host))
    assert reply.status == 403
    assert "allowed_hosts" in reply.json["error"]
    assert (await ask(web, headers=with_host(host), method="GET", path="/_edda/readyz")).status == 403
    assert (service.stored, service.pings) == ([], 0)


async def test_a_request_without_a_name_or_with_two_is_refused(web: WebApp) -> None:
    assert (await ask(web, headers={k: v for k, v in EVENT.items() if k != "host"})).status == 403
    assert (await ask(web, headers=[*EVENT.items(), ("host", "localhost")])).status == 400


@pytest.mark.parametrize("auth", [None, "none"])
@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("shop.example", True),
        ("SHOP.example:443", True),
        ("a.b.example", True),
        ("localhost", True),
        ("b.example", False),
        ("xb.example", False),
        ("evil.example", False),
    ],
)
async def test_names_can_be_allowed(service: FakeService, auth: str | None, host: str, served: bool) -> None:
    web = WebApp(service, WebOptions(auth=auth, allowed_hosts=("shop.example", "*.b.example")))
    assert (await ask(web, headers=with_host(host))).status == (202 if served else 403)


async def test_every_client_is_served_only_with_auth_none(service: FakeService) -> None:
    web = WebApp(service, WebOptions(auth="none"))
    for path in ("/events", "/cancel/run"):
        assert (await ask(web, path=path, client=ELSEWHERE, headers=with_host("shop.example"), body=b"")).status == 202


CROSS_SITE = [
    ({}, True),
    ({"origin": "http://127.0.0.1:8001"}, True),
    ({"origin": "HTTP://127.0.0.1:8001"}, True),
    ({"origin": "http://127.0.0.1:9999"}, False),
    ({"origin": "http://evil.example"}, False),
    ({"origin": "null"}, False),
    ({"origin": ""}, False),
    ({"sec-fetch-site": "same-origin"}, True),
    ({"sec-fetch-site": "none"}, True),
    ({"sec-fetch-site": "same-site"}, False),
    ({"sec-fetch-site": "cross-site"}, False),
    ({"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:8001"}, False),
]


@pytest.mark.parametrize("auth", [None, "none"])
@pytest.mark.parametrize(("headers", "served"), CROSS_SITE)
@pytest.mark.parametrize("path", ["/events", "/cancel/run"])
async def test_a_page_of_another_origin_cannot_send(
    service: FakeService, auth: str | None, headers: dict[str, str], served: bool, path: str
) -> None:
    reply = await ask(WebApp(service, WebOptions(auth=auth)), path=path, headers=EVENT | headers, body=b"")
    assert reply.status == (202 if served else 403)
    assert bool(service.stored or service.cancelled) is served


async def test_a_token_is_valid_from_any_address_under_any_host(guarded: WebApp) -> None:
    headers = with_token(TokenScope.EVENTS) | {"host": "shop.example", "x-forwarded-for": "192.0.2.9"}
    assert (await ask(guarded, client=ELSEWHERE, headers=headers)).status == 202
    assert (await ask(guarded, headers=headers | {"origin": "http://elsewhere.example"})).status == 202


@pytest.mark.parametrize(("path", "needed"), [("/events", TokenScope.EVENTS), ("/cancel/run", TokenScope.CONTROL)])
@pytest.mark.parametrize("scope", list(TokenScope))
async def test_a_token_is_good_for_its_scope_only(
    guarded: WebApp, service: FakeService, path: str, needed: TokenScope, scope: TokenScope
) -> None:
    reply = await ask(guarded, path=path, headers=with_token(scope), body=b"")
    assert reply.status == (202 if scope is needed else 403)
    if scope is not needed:
        assert needed.value in reply.json["error"]
        assert [*service.stored, *service.cancelled] == []


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "Bearer wrong", "Bearer \xff", SECRETS[TokenScope.EVENTS]],
)
@pytest.mark.parametrize("client", [ELSEWHERE, ("127.0.0.1", 1)])
async def test_with_tokens_this_machine_needs_one_too(
    guarded: WebApp, service: FakeService, value: str | None, client: tuple[str, int]
) -> None:
    headers = EVENT if value is None else EVENT | {"authorization": value}
    reply = await ask(guarded, headers=headers, client=client)
    assert (reply.status, reply.receives) == (401, 0)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert service.stored == []


async def test_the_scheme_is_read_in_any_case(guarded: WebApp) -> None:
    secret = SECRETS[TokenScope.EVENTS]
    assert (await ask(guarded, headers=EVENT | {"authorization": f"bEARER  {secret} "})).status == 202


async def test_two_tokens_are_refused(guarded: WebApp) -> None:
    headers = [*with_token(TokenScope.EVENTS).items(), ("authorization", "Bearer x")]
    assert (await ask(guarded, headers=headers)).status == 400


async def test_probes_need_no_token(guarded: WebApp) -> None:
    for path in ("/_edda/livez", "/_edda/readyz"):
        assert (
            await ask(guarded, path=path, method="GET", client=ELSEWHERE, headers={"host": "10.0.0.9"})
        ).status == 200


def query(scope: TokenScope = TokenScope.EVENTS) -> bytes:
    return f"a=1&access_token={SECRETS[scope]}&b=2".encode()


async def test_a_token_in_the_query_is_accepted_if_enabled(service: FakeService) -> None:
    web = WebApp(service, WebOptions(tokens=TOKENS, query_token=True))
    reply = await ask(web, query=query())
    assert reply.status == 202
    assert "private" in reply.headers["cache-control"]
    assert (await ask(web, query=query(TokenScope.VIEW))).status == 403
    assert (await ask(web, query=b"access_token=wrong")).status == 401
    assert (await ask(web, query=query(), headers=with_token(TokenScope.EVENTS))).status == 400


async def test_a_token_in_the_query_is_off_by_default(guarded: WebApp) -> None:
    reply = await ask(guarded, query=query())
    assert reply.status == 401
    assert "query_token=False" in reply.json["error"]


async def test_a_token_in_the_query_is_gone_before_a_server_logs_it(service: FakeService) -> None:
    for on in (True, False):
        call = Call(query=query() + b"&" + query())
        scope = call.scope()
        await deliver(WebApp(service, WebOptions(tokens=TOKENS, query_token=on)), call, scope)
        assert scope["query_string"] == b"a=1&access_token=***&b=2&a=1&access_token=***&b=2"


async def test_no_token_is_in_any_log(service: FakeService, guarded: WebApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    service.error = RuntimeError("unexpected")
    await ask(guarded, headers=with_token(TokenScope.EVENTS))
    await ask(guarded, query=query())
    assert "unexpected" in caplog.text
    assert not any(secret in caplog.text for secret in SECRETS.values())


PROTECTION = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
CIRCUMSTANCES: dict[str, Callable[[FakeService], None]] = {
    "well": lambda service: None,
    "away": lambda service: setattr(service, "error", StorageUnavailableError("gone")),
    "broken": lambda service: setattr(service, "error", RuntimeError("bug")),
    "refusing": lambda service: setattr(service, "error", EventError("no", status=415)),
    "draining": lambda service: setattr(service, "state", State.DRAINING),
    "stopped": lambda service: setattr(service, "state", State.STOPPED),
}


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES)
@pytest.mark.parametrize("options", [WebOptions(), WebOptions(tokens=TOKENS), WebOptions(auth="none")])
async def test_every_answer_is_protected_and_none_is_a_redirect_or_open_to_other_origins(
    circumstances: str, options: WebOptions
) -> None:
    service = FakeService()
    CIRCUMSTANCES[circumstances](service)
    web = WebApp(service, options)
    paths = ("/", "/events", "/events/", "/cancel/run", "/cancel", "/_edda", "/_edda/livez", "/_edda/readyz")
    headers = [EVENT, with_token(TokenScope.EVENTS), with_token(TokenScope.CONTROL), with_host("evil.example"), {}]
    statuses = set()
    for path, method, pairs in product(paths, ("POST", "GET", "HEAD", "OPTIONS", "PUT"), headers):
        reply = await ask(web, path=path, method=method, headers=pairs)
        assert {name: reply.headers.get(name) for name in PROTECTION} == PROTECTION
        assert not any(name.startswith("access-control") or name == "server" for name in reply.headers)
        assert not 300 <= reply.status < 400
        assert reply.status < 400 or method == "HEAD" or reply.headers["content-type"] == "application/json"
        if reply.status >= 400 and method != "HEAD":
            assert reply.json["retryable"] is (reply.status in {408, 429} or reply.status >= 500)
        statuses.add(reply.status)
    assert 405 in statuses
