"""The control API under requests that its description allows and others: every response is as described.

`EDDA_API_CASES` says how many cases for each operation, `EDDA_API_DATABASES` on which databases. To make one up takes
longer than to send it, so each is sent to all of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import booleans, integers
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.checks import negative_data_rejection

from edda.control.controller import OPERATIONS, PREFIX, Operation
from edda.web.openapi import describe

from .api_fixture import DEAD, ENDED, FAILED, IDLE, LASTING, MANY
from .conftest import ANSWERS

CASES = int(os.environ.get("EDDA_API_CASES", "100"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
]
TIMEOUT = 60.0
"""Seconds: generous, because only a wrong response should fail, not a busy machine."""
LEAST = 0.02
"""Share of the allowed cases that must succeed, so that each operation is really exercised."""
SCHEMA = schemathesis.openapi.from_dict(describe())

Known = dict[str, tuple[Any, ...]]

KNOWN: Known = {
    "id": LASTING,
    "number": (1, 2, 3, 4, 5),
    "workflow": ("desk_order", "desk_anything"),
    "generation": (0,),
    "parent": ("family",),
    "status": (["failed"], ["open", "completed"], ["parked"]),
    "input": (["order_id=good"], ["amount=1", "order_id=waiting"]),
    "cursor": ("3",),
    "state": ("pending", "dead"),
    "source": ("/desk",),
    "channel": ("news",),
    "target": ("waiting",),
}
"""Values that exist in the test app."""
KNOWN_TO: dict[str, Known] = {
    "list_runs": {"id": ("many-",), "cursor": ("9000000000000000:good",)},
    "count_runs": {"id": ("many-",), "cursor": ("9000000000000000:good",)},
    "act_on_runs": {
        "ids": tuple([one] for one in MANY),
        "action": ("cancel", "retry", "resume", "delete"),
        "search": ({"id": "many-1"}, {"id": "many-", "status": ["failed"], "limit": 5}),
    },
    "start_run": {"id": ()},
    "delete_run": {"id": ENDED},
    "cancel_run": {"id": IDLE},
    "retry_run": {"id": FAILED},
    "resume_run": {"id": ("stuck",)},
    "list_events": {"id": ()},
    "send_event": {"id": ()},
    "list_waits": {"cursor": ('["good","pay:1"]',)},
    "retry_outbox": {"ids": tuple([one] for one in DEAD)},
    "drop_outbox": {"ids": tuple([one] for one in DEAD)},
}


def _with_modes() -> Iterator[tuple[Operation[Any], GenerationMode, int]]:
    for operation in OPERATIONS:
        if not (operation.query or operation.body or "{" in operation.path):
            yield operation, GenerationMode.POSITIVE, 1  # the operation has no parameters
        elif not (operation.query or operation.body or "{number}" in operation.path):
            yield operation, GenerationMode.POSITIVE, CASES  # every text is a valid id
        else:
            yield operation, GenerationMode.POSITIVE, CASES // 2
            yield operation, GenerationMode.NEGATIVE, CASES // 2


@pytest.mark.timeout(60 + 2 * CASES)
@pytest.mark.parametrize(
    ("operation", "mode", "cases"),
    tuple(_with_modes()),
    ids=lambda value: str(getattr(value, "name", value)).lower(),
)
def test_every_response_matches_the_description(
    desks: dict[str, str],
    operation: Operation[Any],
    mode: GenerationMode,
    cases: int,
    record_property: Callable[[str, object], None],
) -> None:
    """No 5xx, no undescribed status, type or field; and invalid requests are refused."""
    answers: Counter[int] = Counter()

    @given(case=SCHEMA[operation.path][operation.method].as_strategy(mode), named=booleans(), choice=integers(0, 999))
    @settings(
        max_examples=cases,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )
    def send(case: schemathesis.Case[Any], named: bool, choice: int) -> None:
        if named:
            _name_what_there_is(case, KNOWN | KNOWN_TO.get(operation.name, {}), choice)
        _spare_others(case)
        for desk in desks.values():
            response = case.call(base_url=desk + PREFIX, session=session, timeout=operation.seconds or TIMEOUT)
            answers[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

    with requests.Session() as session:
        session.trust_env = False  # looking for proxies takes as long as sending
        send()
    record_property(ANSWERS, (operation.name, {**answers}))
    assert mode is GenerationMode.NEGATIVE or answers[200] >= LEAST * answers.total(), answers


def _name_what_there_is(case: schemathesis.Case[Any], known: Known, choice: int) -> None:
    """Random ids are replaced by existing ones. Invalid queries and bodies stay: they are what is tested."""
    assert case.meta is not None
    rest = () if case.meta.generation.mode.is_negative else (case.query, case.body)
    for part in (case.path_parameters, *rest):
        for name, value in part.items() if isinstance(part, dict) else ():
            values = known.get(name)
            if values and type(value) is type(values[0]):
                part[name] = values[choice % len(values)]


def _spare_others(case: schemathesis.Case[Any]) -> None:
    """Bulk actions get only runs that exist for that purpose."""
    search = case.body.get("search") if isinstance(case.body, dict) else None
    if isinstance(search, dict) and isinstance(search.get("id", ""), str):
        search["id"] = "many-"
