"""The description of the control API: complete, and what is served."""

from __future__ import annotations

import json
from typing import Any

from edda.control.controller import OPERATIONS, PREFIX
from edda.web import WebApp
from edda.web.openapi import describe

from .calls import ask
from .fake_controller import Showcase
from .fakes import FakeService


async def test_it_is_served_as_it_is_made(service: FakeService) -> None:
    showcase = Showcase()
    reply = await ask(
        WebApp(service, control=lambda: showcase),
        method="GET",
        path=f"{PREFIX}/openapi.json",
        headers={"host": "localhost"},
    )
    assert reply.json == json.loads(json.dumps(describe()))
    assert reply.json["openapi"] == "3.1.0"


def test_every_operation_is_described() -> None:
    paths = describe()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == {(one.method, one.path) for one in OPERATIONS} | {("GET", "/stream")}
    names = {method["operationId"] for methods in paths.values() for method in methods.values()}
    assert names == {one.name for one in OPERATIONS} | {"watch"}


def test_what_a_query_takes_is_described() -> None:
    parameters = describe()["paths"]["/runs"]["get"]["parameters"]
    found = {parameter["name"]: parameter["schema"] for parameter in parameters}
    assert found["limit"] == {"type": "integer", "default": 50, "minimum": 1, "maximum": 200}
    assert found["since"] == {"type": "string", "format": "date-time"}
    assert found["status"]["type"] == "array"
    assert found["workflow"] == {"type": "string"}


def test_the_allowed_words_are_described() -> None:
    """So that a program can offer them without trial and error."""
    described = describe()
    runs, outbox = (described["paths"][path]["get"]["parameters"] for path in ("/runs", "/outbox"))
    assert {"open", "failed"} < set(_find(runs, "status")["schema"]["items"]["enum"])
    assert _find(outbox, "state")["schema"]["enum"] == ["pending", "sent", "dead"]
    order = described["components"]["schemas"]["BulkRequest"]["properties"]
    assert order["action"]["enum"] == ["cancel", "retry", "resume", "delete"]


def _find(parameters: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(one for one in parameters if one["name"] == name)
