"""Access: every path, requested with every kind of credentials.

The required scopes are listed here by hand: a table derived from the code would agree with any mistake in it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from edda.web import Token, TokenScope, WebOptions
from edda.web.access import SECONDS, LoginSessions
from edda.web.request import read_request

from .calls import Call, Reply
from .routes import ROUTES, Route, World

VIEW, CONTROL, EVENTS = (frozenset({scope}) for scope in ("view", "control", "events"))
NOTHING: frozenset[str] = frozenset()
NEEDED: dict[str, frozenset[str]] = {
    # the control API: the scope of the operation, and no other
    "list_runs": VIEW,
    "start_run": CONTROL,
    "count_runs": VIEW,
    "act_on_runs": CONTROL,
    "get_run": VIEW,
    "delete_run": CONTROL,
    "get_history": VIEW,
    "get_timeline": VIEW,
    "export_run": VIEW,
    "cancel_run": CONTROL,
    "retry_run": CONTROL,
    "resume_run": CONTROL,
    "list_events": VIEW,
    "send_event": EVENTS,
    "get_event": VIEW,
    "resend_event": EVENTS,
    "list_waits": VIEW,
    "list_channels": VIEW,
    "publish_message": EVENTS,
    "list_outbox": VIEW,
    "retry_outbox": CONTROL,
    "drop_outbox": CONTROL,
    "list_workers": VIEW,
    "list_definitions": VIEW,
    "get_definition": VIEW,
    "get_stats": VIEW,
    "list_audits": VIEW,
    "GET openapi.json": VIEW,
    "GET stream": VIEW,
    # pages: an action needs the scope view too
    "GET /": VIEW,
    "GET /workers": VIEW,
    "GET /workflows": VIEW,
    "GET /audit": VIEW,
    "GET /runs": VIEW,
    "GET /runs/bulk": VIEW,
    "GET /runs/*": VIEW,
    "GET /runs/*/export": VIEW,
    "GET /runs/*/cancel": VIEW,
    "GET /runs/*/retry": VIEW,
    "GET /runs/*/resume": VIEW,
    "GET /runs/*/delete": VIEW,
    "GET /start/*": VIEW,
    "GET /events": VIEW,
    "GET /events/send": VIEW,
    "GET /events/*": VIEW,
    "GET /events/*/resend": VIEW,
    "GET /waits": VIEW,
    "GET /channels": VIEW,
    "GET /channels/publish": VIEW,
    "GET /outbox": VIEW,
    "GET /outbox/retry": VIEW,
    "GET /outbox/drop": VIEW,
    "POST /runs/bulk": VIEW | CONTROL,
    "POST /runs/*/cancel": VIEW | CONTROL,
    "POST /runs/*/retry": VIEW | CONTROL,
    "POST /runs/*/resume": VIEW | CONTROL,
    "POST /runs/*/delete": VIEW | CONTROL,
    "POST /runs/*/answer": VIEW | EVENTS,
    "POST /start/*": VIEW | CONTROL,
    "POST /events/send": VIEW | EVENTS,
    "POST /events/*/resend": VIEW | EVENTS,
    "POST /channels/publish": VIEW | EVENTS,
    "POST /outbox/retry": VIEW | CONTROL,
    "POST /outbox/drop": VIEW | CONTROL,
    # public paths
    "GET /login": NOTHING,
    "GET /static": NOTHING,
    "GET /_edda/livez": NOTHING,
    "GET /_edda/readyz": NOTHING,
    # the rest
    "GET /_edda/metrics": VIEW,
    "POST /events": EVENTS,
    "POST /cancel": CONTROL,
}
DONE = frozenset({200, 202, 303})
BY_TOKEN_ONLY = frozenset({"POST /events", "POST /cancel"})
"""Paths outside `/_edda`, where no session counts."""

SECRETS = {
    scopes: f"Vd0vzRQnC0d2yqW1sZ6b8HfJpK4uTgXe_{'_'.join(sorted(scopes))}"
    for size in (1, 2, 3)
    for scopes in map(frozenset, combinations(("view", "control", "events"), size))
}
TOKENS = tuple(
    Token("+".join(sorted(scopes)), frozenset(map(TokenScope, scopes)), secret) for scopes, secret in SECRETS.items()
)
ALL = VIEW | CONTROL | EVENTS
OLD = "x1y2Z3a4B5c6D7e8F9g0H1i2J3k4L5m6"
WAS_ONE = Token("+".join(sorted(ALL)), frozenset(TokenScope), OLD)
"""The same name and all scopes, but a former secret."""
OWN = {"sec-fetch-site": "same-origin", "host": "127.0.0.1:8001"}


@pytest.fixture(autouse=True)
def quick_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edda.web.sse._TICK", 0.01)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}


def cookie(secret: str, tokens: tuple[Token, ...] = TOKENS, now: Callable[[], float] | None = None) -> dict[str, str]:
    """The cookie after a login with the token."""
    options = WebOptions(tokens=tokens)
    sessions = LoginSessions(options) if now is None else LoginSessions(options, now)
    answer = sessions.log_in(read_request(Call().scope(), nothing), f"token={secret}".encode())
    return {"cookie": dict(answer.headers)[b"set-cookie"].decode().partition(";")[0]} | OWN


def long_ago() -> float:
    return 1_700_000_000.0 - SECONDS


def is_login(reply: Reply) -> bool:
    return reply.status == 303 and reply.headers["location"].startswith("/_edda/login?next=")


def check(world: World, route: Route, reply: Reply, scopes: frozenset[str]) -> None:
    if NEEDED[route.name] <= scopes:
        assert reply.status in DONE, (route.name, reply.body)
        assert not is_login(reply), route.name
    else:
        assert reply.status == 403, (route.name, reply.status)
        assert world.is_untouched(), route.name


def check_stranger(world: World, route: Route, reply: Reply) -> None:
    if not NEEDED[route.name]:
        assert reply.status == 200, route.name
    elif route.is_page:
        assert is_login(reply), route.name
    else:
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer"), route.name
    assert world.is_untouched(), route.name


def test_every_address_is_in_the_table() -> None:
    assert {route.name for route in ROUTES} == NEEDED.keys()
    assert len({route.name for route in ROUTES}) == len(ROUTES)


@pytest.mark.parametrize("scopes", SECRETS, ids=lambda scopes: "+".join(sorted(scopes)))
async def test_a_token_does_what_its_scopes_say(scopes: frozenset[str]) -> None:
    for route in ROUTES:
        world = World(tokens=TOKENS)
        check(world, route, await route.ask(world.web, bearer(SECRETS[scopes])), scopes)


@pytest.mark.parametrize("scopes", SECRETS, ids=lambda scopes: "+".join(sorted(scopes)))
async def test_a_session_has_the_scopes_of_its_token_and_counts_below_edda_only(scopes: frozenset[str]) -> None:
    for route in ROUTES:
        world = World(tokens=TOKENS)
        reply = await route.ask(world.web, cookie(SECRETS[scopes]))
        if route.name in BY_TOKEN_ONLY:
            assert reply.status == 401
            assert world.is_untouched()
        else:
            check(world, route, reply, scopes)


STRANGERS = {
    "nothing": {},
    "an old session": cookie(SECRETS[ALL], now=long_ago),
    "a session of a secret that was changed": cookie(OLD, (WAS_ONE,)),
    "a cookie of somebody's making": {"cookie": "edda_session=Y29udHJvbA.99999999999.00"} | OWN,
}
IMPOSTORS = {
    "a wrong token": bearer("wrong"),
    "a secret that was changed": bearer(OLD),
    "half a token": bearer(SECRETS[ALL][:-1]),
    "another scheme": {"authorization": f"Basic {SECRETS[ALL]}"},
    "a wrong token beside a good session": bearer("wrong") | cookie(SECRETS[ALL]),
}


@pytest.mark.parametrize("who", STRANGERS)
async def test_without_valid_credentials_only_the_login_is_served(who: str) -> None:
    for route in ROUTES:
        world = World(tokens=TOKENS)
        check_stranger(world, route, await route.ask(world.web, STRANGERS[who]))


@pytest.mark.parametrize("who", IMPOSTORS)
async def test_a_token_that_is_wrong_is_refused_everywhere(who: str) -> None:
    for route in ROUTES:
        world = World(tokens=TOKENS)
        reply = await route.ask(world.web, IMPOSTORS[who])
        if route.name not in {"GET /_edda/livez", "GET /_edda/readyz"}:  # probes need no token
            assert reply.status == 401, route.name
        assert world.is_untouched(), route.name


@pytest.mark.parametrize("by", [bearer, cookie])
async def test_a_read_only_server_leaves_the_view_scope_only(by: Callable[[str], dict[str, str]]) -> None:
    for route in ROUTES:
        world = World(tokens=TOKENS, read_only=True)
        reply = await route.ask(world.web, by(SECRETS[ALL]))
        if route.name in BY_TOKEN_ONLY:
            assert reply.status == 403
            assert world.is_untouched()
        else:
            check(world, route, reply, VIEW)


@pytest.mark.parametrize(("read_only", "scopes"), [(False, ALL), (True, VIEW)])
@pytest.mark.parametrize("auth", [None, "none"])
async def test_without_tokens_this_machine_has_all_scopes(
    auth: str | None, read_only: bool, scopes: frozenset[str]
) -> None:
    for route in ROUTES:
        world = World(auth=auth, read_only=read_only)
        check(world, route, await route.ask(world.web, OWN), scopes)


async def test_without_tokens_other_machines_are_refused_everywhere() -> None:
    for route in ROUTES:
        world = World()
        reply = await route.ask(world.web, OWN, client=("192.0.2.7", 50000))
        assert reply.status == 403, route.name
        assert world.is_untouched(), route.name
