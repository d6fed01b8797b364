"""Hostile values in every field of the control API are searched for or refused, and have no other effect."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from edda.control.controller import OPERATIONS, PREFIX, Operation

from .conftest import DATABASES

DONE_OR_REFUSED = {200, 400, 404, 409, 413, 422}
INJECTIONS = [
    f"{before}{what}{after}"
    for before in ("", "'", '"', "')", "1", "x' ", "\\'", "%27", "’")
    for what in (
        "",
        " OR 1=1",
        " OR '1'='1",
        "; DROP TABLE edda_run",
        " UNION SELECT NULL,NULL,NULL",
        "; ATTACH DATABASE '/tmp/x' AS x",
        " AND (SELECT 1 FROM pg_sleep(9))",
        "||(SELECT sqlite_version())",
        " LIKE '%'",
        "/*",
    )
    for after in ("", "--", "#")
]
ODDITIES = [
    *("%", "_", "\\", "\\%", "%%%%", "*", "[a-z]", "(?:a+)+$", "^", "$.a", "a.b.c=1", "=", "==", "a=", "=a", "a=b=c"),
    *("null", "true", "NaN", "-1", "0", "1e999", "9" * 19, "9" * 400, "0x1F", "١٢٣", "½"),
    *(
        "\x01",
        "\x7f",
        "\u202e",
        "\u2028",
        "\ufeff",
        "\ufffe",
        "\U0001f600",
        "e\u0301",
        "İ",
        "ß",
        "\ud7ff",
        "\t",
        "\r\n",
    ),
    *(
        "../../etc/passwd",
        "..\\..",
        "file:///etc/passwd",
        "http://169.254.169.254/",
        "{{7*7}}",
        "${7*7}",
        "%s%n",
        "<b>",
    ),
    *("1970-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00", "2026-01-01T00:00:00Z"),
    *("a" * 5_000, "AAAA" * 500, "eyJhIjoxfQ==", "W10=", "bnVsbA==", "WzEsMl0=", "////", "=====", "A-_"),
]
HOSTILE = [*INJECTIONS, *ODDITIES]
SENT = HOSTILE[:: max(1, len(HOSTILE) // int(os.environ.get("EDDA_API_CASES", "100")))]


@pytest.fixture(params=DATABASES)
def url(desks: dict[str, str], request: pytest.FixtureRequest) -> str:
    return desks[request.param] + PREFIX


@pytest.fixture
def client(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(trust_env=False, timeout=30) as client:
        yield client


READING = [one for one in OPERATIONS if one.method == "GET"]
FIELDS = [(one, name) for one in READING if one.query is not None for name in one.query.__struct_fields__]


def test_there_are_at_least_three_hundred() -> None:
    assert len(set(HOSTILE)) >= 300


@pytest.mark.parametrize(("operation", "field"), FIELDS, ids=lambda value: getattr(value, "name", value))
def test_a_query_finds_something_or_is_refused(
    url: str, client: httpx2.Client, operation: Operation[Any], field: str
) -> None:
    path = operation.address(*("good",) * operation.path.count("{"))
    for text in SENT:
        answer = client.get(url + path, params={field: text})
        assert answer.status_code in {200, 404, 422}, (text, answer.text)


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if "{" in one.path], ids=lambda one: one.name)
def test_an_id_is_nothing_but_an_id(url: str, client: httpx2.Client, operation: Operation[Any]) -> None:
    for text in SENT:
        if text and text != "1":  # an event number
            answer = client.request(operation.method, url + operation.address(text))
            assert answer.status_code == 404, (text, answer.text)


ORDERS: list[tuple[str, dict[str, Any], str]] = [
    ("/runs", {"workflow": "desk_order", "input": {"order_id": "x"}}, "id"),
    ("/runs", {"workflow": "desk_order"}, "workflow"),
    ("/runs/waiting/cancel", {}, "colour"),
    ("/runs/bulk", {"action": "delete", "search": {"id": "nobody"}}, "action"),
    ("/runs/bulk", {"action": "delete", "ids": ["nobody"], "count_only": True}, "reason"),
    ("/events", {"type": "nobody.waits"}, "type"),
    ("/events", {"type": "nobody.waits"}, "source"),
    ("/events", {"type": "nobody.waits"}, "id"),
    ("/events", {"type": "nobody.waits"}, "subject"),
    ("/events", {"type": "nobody.waits"}, "target"),
    ("/events", {"type": "nobody.waits"}, "data"),
    ("/channels/publish", {"channel": "nobody.listens"}, "channel"),
    ("/channels/publish", {"channel": "nobody.listens"}, "target"),
    ("/channels/publish", {"channel": "nobody.listens"}, "data"),
    ("/outbox/retry", {}, "ids"),
]
UNWRITABLE = ("\0", "a\0b", "\ud800", "a\udfff", "\ud83d", "\udc00\ud800")
"""The character 0 and lone surrogates: databases differ in what they do with them."""
ODD_VALUES: list[Any] = [
    *(10**18, 10**19, -(10**19), 10**40, 10**400, 1.7976931348623157e308, 5e-324, -0.0, 2**53 + 1),
    *(True, None, [], {}, [[]], {"": ""}, {"\0": "\0"}, {"$": "datetime", "v": "never"}, {"$": "bytes", "v": "?"}),
    *({"a" * 5_000: "b" * 50_000}, ["x"] * 10_000, "\ud800", {"\ud800": 1}),
]


@pytest.mark.parametrize(("path", "order", "field"), ORDERS)
def test_an_action_is_done_or_refused(
    url: str, client: httpx2.Client, path: str, order: dict[str, Any], field: str
) -> None:
    for text in (*SENT, *UNWRITABLE):
        # The ids of the test above must not exist.
        given = {"id": f"new{text}", "ids": [text]}.get(field, text)
        answer = post(client, url + path, order | {field: given})
        assert answer.status_code in DONE_OR_REFUSED, (text, answer.text)


@pytest.mark.parametrize(
    ("path", "order", "field"),
    [
        ("/runs", {"workflow": "desk_anything"}, "input"),
        ("/events", {"type": "nobody.waits"}, "data"),
        ("/events", {"type": "nobody.waits"}, "extensions"),
        ("/channels/publish", {"channel": "nobody.listens"}, "data"),
        ("/channels/publish", {"channel": "nobody.listens"}, "metadata"),
    ],
)
def test_a_value_is_kept_or_refused(
    url: str, client: httpx2.Client, path: str, order: dict[str, Any], field: str
) -> None:
    for value in ODD_VALUES:
        answer = post(client, url + path, order | {field: value if field == "data" else {"value": value}})
        assert answer.status_code in DONE_OR_REFUSED, (value, answer.text)
        if answer.status_code == 200 and path == "/runs":
            kept = client.get(f"{url}/runs/{answer.json()['subject']}")
            assert kept.status_code == 200, (value, kept.text)


def post(client: httpx2.Client, url: str, order: dict[str, Any]) -> httpx2.Response:
    """Non-ASCII characters as escapes: other encoders refuse a lone surrogate."""
    return client.post(url, content=json.dumps(order), headers={"content-type": "application/json"})


def test_the_existing_runs_are_unchanged(url: str, client: httpx2.Client) -> None:
    for run_id in ("good", "waiting", "broken"):
        assert client.get(f"{url}/runs/{quote(run_id)}").json()["run"]["id"] == run_id
