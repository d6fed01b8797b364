"""Security headers of every response: each path, with each status that it can have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edda.errors import (
    ActionRefusedError,
    ArgumentError,
    NotFoundError,
    PayloadError,
    PayloadTooLargeError,
    StorageUnavailableError,
)
from edda.web import State

from .calls import Reply
from .routes import ROUTES, Route, World
from .test_scopes import ALL, OWN, SECRETS, TOKENS, bearer, cookie
from .test_security import PROTECTION

GOOD = bearer(SECRETS[ALL])
SENDING = next(route for route in ROUTES if route.name == "POST /events")
INSIDE = "password=hunter2"
Circumstances = Callable[[Route], Awaitable[Reply]]


def failing(error: Exception) -> Circumstances:
    async def ask(route: Route) -> Reply:
        world = World(tokens=TOKENS)
        world.spy.error = world.service.error = error
        return await route.ask(world.web, GOOD)

    return ask


def asking(headers: dict[str, str], options: dict[str, Any] | None = None, **changes: Any) -> Circumstances:
    async def ask(route: Route) -> Reply:
        return await route.ask(World(**({"tokens": TOKENS} if options is None else options)).web, headers, **changes)

    return ask


async def draining(route: Route) -> Reply:
    world = World(tokens=TOKENS)
    world.service.state = State.DRAINING
    return await route.ask(world.web, GOOD)


async def crowded(route: Route) -> Reply:
    """One more call than `max_concurrent`."""
    world = World(tokens=TOKENS, max_concurrent=1)
    world.service.open.clear()
    first = asyncio.create_task(SENDING.ask(world.web, GOOD))
    await world.service.until_waiting()
    reply = await route.ask(world.web, GOOD)
    world.service.open.set()
    await first
    return reply


CIRCUMSTANCES: dict[str, tuple[Circumstances, set[int]]] = {
    "well": (asking(GOOD), {200, 202, 303}),
    "in a session": (asking(cookie(SECRETS[ALL])), {200, 303, 401}),
    "without a token": (asking({}), {200, 303, 401}),
    "with a wrong token": (asking(bearer("wrong")), {200, 401}),
    "without the scope": (asking(bearer(SECRETS[frozenset({"events"})])), {200, 202, 403}),
    "for looking only": (asking(OWN, {"read_only": True}), {200, 403}),
    "from elsewhere": (asking(OWN, {}, client=("192.0.2.7", 1)), {403}),
    "by a name made to point here": (asking({"host": "evil.example"}, {}), {403}),
    "from a page of others": (asking(cookie(SECRETS[ALL]) | {"sec-fetch-site": "cross-site"}), {200, 401, 403}),
    "with two names": (asking({"Host": "localhost"}, {}), {400}),
    "with the head only": (asking(GOOD, method="HEAD"), {200, 404, 405}),
    "with a preflight": (
        asking({"origin": "http://evil.example", "access-control-request-method": "POST"}, method="OPTIONS"),
        {204, 303, 401, 405},
    ),
    "with a method that is not taken": (asking(GOOD, method="PATCH"), {404, 405}),
    "with a method that nobody has": (asking(GOOD, method="BREW"), {404, 405}),
    "with a body that is no JSON": (asking(GOOD, body=b"{"), {400, 422}),
    "with another media type": (asking(GOOD | {"content-type": "text/plain"}), {415}),
    "with too large a body": (asking(GOOD, {"tokens": TOKENS, "max_body": 1}, body=b"x" * 100), {413}),
    "with too many headers": (asking(GOOD | {f"x-{number}": "x" for number in range(101)}), {431}),
    "with a field that is not known": (asking(GOOD, query=b"colour=red&limit=many"), {422}),
    "at an address below": (asking(GOOD, path="/_edda/api/v1/nowhere/at/all"), {404}),
    "while it drains": (draining, {503}),
    "with too many at once": (crowded, {429}),
    **{
        f"with {type(error).__name__}": (failing(error), {status})
        for error, status in (
            (ActionRefusedError("no"), 409),
            (ArgumentError("no"), 422),
            (NotFoundError("no"), 404),
            (PayloadError("no"), 400),
            (PayloadTooLargeError("no"), 413),
            (StorageUnavailableError(INSIDE), 503),
            (TimeoutError(INSIDE), 503),
            (RuntimeError(INSIDE), 500),
        )
    },
}


def protection_of(route: Route, reply: Reply) -> dict[str, str]:
    """Our forms have to send their origin; static files have a version in their URL and may be cached."""
    expected = dict(PROTECTION)
    if route.is_page and reply.headers.get("referrer-policy") == "same-origin":
        expected["referrer-policy"] = "same-origin"
    if route.name == "GET /static" and reply.status == 200:
        expected["cache-control"] = "public, max-age=31536000, immutable"
    return expected


@pytest.fixture(autouse=True)
def quick_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edda.web.sse._TICK", 0.01)


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES)
async def test_every_response_of_every_path_has_the_security_headers(circumstances: str) -> None:
    ask, reached = CIRCUMSTANCES[circumstances]
    statuses = set()
    for route in ROUTES:
        reply = await ask(route)
        named = (route.name, reply.status)
        assert {name: reply.headers.get(name) for name in PROTECTION} == protection_of(route, reply), named
        assert not any(name.startswith("access-control") or name == "server" for name in reply.headers), named
        assert INSIDE not in reply.body.decode("latin-1"), named
        statuses.add(reply.status)
    assert statuses >= reached
