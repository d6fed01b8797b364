"""The page of answers has every answer that the endpoint gives, and none that it does not give."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from edda.errors import (
    AppError,
    EddaError,
    InstanceNotFoundError,
    LeaseLostError,
    OutcomeUnknownError,
    PayloadError,
    StorageConflictError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.web import State, Token, TokenScope, WebApp, WebOptions
from tests.web.calls import EVENT, Reply, ask, chunk
from tests.web.fakes import FakeService

from .pages import DOCS

Answer = tuple[int, str, bool, bool]
"""Status, error_type, retryable, whether Retry-After is there."""

_ROW = re.compile(r"^\| (\d{3}) \| (.*?) \| (yes|no) \| (.*?) ?\| .+ \|$", re.MULTILINE)
_SECRET = "aVeryLongSecretWith128RandomBitsInIt"
_VIEWER = Token("viewer", frozenset({TokenScope.VIEW}), _SECRET)


class Fault(Exception):
    """Stands for what nobody expected."""


def documented() -> set[Answer]:
    found = set()
    for status, types, retryable, after in _ROW.findall((DOCS / "reference" / "http.md").read_text()):
        for name in re.findall(r"`(\w+)`", types) or [Fault.__name__]:
            found.add((int(status), name, retryable == "yes", bool(after)))
    return found


def without(header: str) -> dict[str, str]:
    return {name: value for name, value in EVENT.items() if name != header}


def request(**changes: Any) -> Callable[[FakeService], Any]:
    return lambda service: ask(WebApp(service), **changes)


def with_options(options: WebOptions, **changes: Any) -> Callable[[FakeService], Any]:
    return lambda service: ask(WebApp(service, options), **changes)


def while_failing(error: Exception, **changes: Any) -> Callable[[FakeService], Any]:
    async def call(service: FakeService) -> Reply:
        service.error = error
        return await ask(WebApp(service), **changes)

    return call


async def cancel_what_has_ended(service: FakeService) -> Reply:
    service.ended.add("run-1")
    return await ask(WebApp(service), path="/cancel/run-1", body=b"")


async def send_slowly(service: FakeService) -> Reply:
    messages = [chunk(b"") for _ in range(100_000)]
    return await ask(WebApp(service, WebOptions(body_timeout=0.01)), messages=messages)


async def send_while_another_waits(service: FakeService) -> Reply:
    web = WebApp(service, WebOptions(max_concurrent=1))
    service.open.clear()
    waiting = asyncio.create_task(ask(web))
    await service.until_waiting()
    reply = await ask(web)
    service.open.set()
    await waiting
    return reply


async def send_to_a_database_that_says_nothing(service: FakeService) -> Reply:
    service.open.clear()
    return await ask(WebApp(service, WebOptions(service_timeout=0.01)))


async def send_while_draining(service: FakeService) -> Reply:
    service.state = State.DRAINING
    return await ask(WebApp(service))


AWAY: tuple[type[EddaError], ...] = (
    StorageUnavailableError,
    OutcomeUnknownError,
    StorageConflictError,
    AppError,
    LeaseLostError,
)
CALLS: tuple[Callable[[FakeService], Any], ...] = (
    request(headers=without("ce-id")),
    request(headers=[*EVENT.items(), ("host", "twice")]),
    while_failing(PayloadError("no")),
    while_failing(StorageRejectedError("no")),
    with_options(WebOptions(tokens=(_VIEWER,))),
    with_options(WebOptions(tokens=(_VIEWER,)), headers=EVENT | {"authorization": f"Bearer {_SECRET}"}),
    request(path="/_edda/elsewhere", method="GET"),
    while_failing(InstanceNotFoundError("no"), path="/cancel/run-1", body=b""),
    request(method="PUT"),
    send_slowly,
    cancel_what_has_ended,
    with_options(WebOptions(max_body=1)),
    with_options(
        WebOptions(max_batch=1),
        headers=EVENT | {"content-type": "application/cloudevents-batch+json"},
        body=b"[{}, {}]",
    ),
    request(headers={"host": "localhost", "content-type": "text/plain"}),
    request(headers=EVENT | {"content-encoding": "gzip"}),
    send_while_another_waits,
    request(headers=[*EVENT.items(), *(("x", "y"),) * 100]),
    while_failing(Fault()),
    *(while_failing(error("away")) for error in AWAY),
    send_to_a_database_that_says_nothing,
    send_while_draining,
)


@pytest.fixture
async def given() -> set[Answer]:
    return {answer_of(await call(FakeService())) for call in CALLS}


def answer_of(reply: Reply) -> Answer:
    return reply.status, reply.json["error_type"], reply.json["retryable"], "retry-after" in reply.headers


async def test_every_answer_is_on_the_page_as_it_is_given(given: set[Answer]) -> None:
    assert given - documented() == set()


async def test_no_answer_is_on_the_page_that_is_never_given(given: set[Answer]) -> None:
    assert documented() - given == set()


async def test_the_refusal_that_the_page_shows_is_a_real_one() -> None:
    reply = await ask(WebApp(FakeService()), headers=without("ce-source"))
    assert reply.body.decode() in (DOCS / "reference" / "http.md").read_text()
