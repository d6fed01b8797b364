"""The description of the control API: complete, and true whatever is sent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy, booleans, one_of
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from edda.control.operations import OPERATIONS, PREFIX, Operation
from edda.web import Web
from edda.web.openapi import describe

from .calls import ask
from .fakes import FakeService
from .listening import serving_desk
from .showcase import Showcase

CASES = int(os.environ.get("EDDA_API_CASES", "100"))
"""For each operation, half of them with what the description does not allow, if anything is."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
THERE: dict[str, tuple[Any, ...]] = {
    "id": ("good", "waiting", "broken"),
    "number": (1,),
    "workflow": ("desk_order",),
}
SPOKEN_OF = {"workflow": "desk_order", "action": "retry"}
SCHEMA = schemathesis.openapi.from_dict(describe())


async def test_it_is_served_as_it_is_made(service: FakeService) -> None:
    showcase = Showcase()
    reply = await ask(
        Web(service, control=lambda: showcase),
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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_desk(tmp_path_factory.mktemp("desk")) as url:
        yield url


def _with_modes() -> Iterator[tuple[Operation[Any], schemathesis.GenerationMode]]:
    for operation in OPERATIONS:
        yield operation, schemathesis.GenerationMode.POSITIVE
        if operation.query or operation.body or "{number}" in operation.path:  # else nothing about it can be wrong
            yield operation, schemathesis.GenerationMode.NEGATIVE


def _cases(operation: Operation[Any], mode: schemathesis.GenerationMode) -> SearchStrategy[schemathesis.Case[Any]]:
    """Half of them about what there is: nobody guesses an id."""
    described = SCHEMA[operation.path][operation.method]
    names = [part.strip("{}") for part in operation.parts if part.startswith("{")]
    real = [described.as_strategy(mode, path_parameters={name: value}) for name in names for value in THERE[name]]
    made_up: SearchStrategy[schemathesis.Case[Any]] = described.as_strategy(mode)
    return one_of(made_up, one_of(*real)) if real else made_up


def _name_what_there_is(case: schemathesis.Case[Any]) -> None:
    if isinstance(case.body, dict):
        case.body |= {name: value for name, value in SPOKEN_OF.items() if isinstance(case.body.get(name), str)}


@pytest.mark.timeout(60 + CASES)
@pytest.mark.parametrize(
    ("operation", "mode"), tuple(_with_modes()), ids=lambda value: getattr(value, "name", str(value)).lower()
)
def test_whatever_is_sent_is_answered_as_described(
    url: str, operation: Operation[Any], mode: schemathesis.GenerationMode
) -> None:
    """No 5xx, no status, type or field that the description does not have."""

    @given(case=_cases(operation, mode), named=booleans())
    @settings(
        max_examples=CASES // 2,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )
    def send(case: schemathesis.Case[Any], named: bool) -> None:
        if named:
            _name_what_there_is(case)
        response = case.call(base_url=url + PREFIX, session=session)
        case.validate_response(response, checks=CHECKS)

    with requests.Session() as session:
        send()
