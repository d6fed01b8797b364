"""The control API: requests, responses and errors."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from itertools import product
from typing import Any
from urllib.parse import quote, unquote

import pytest

from edda import EddaApp
from edda.control.controller import OPERATIONS, PREFIX, Operation
from edda.control.views import ActionResult, RunSearch
from edda.errors import StorageUnavailableError
from edda.web import State, Token, TokenScope, WebApp, WebOptions

from .calls import EVENT, Call, Reply, ask, deliver
from .fake_controller import Showcase, a_run
from .fakes import FakeService
from .test_security import PROTECTION, SECRETS, TOKENS

EVERYTHING = "kq3sJ9vN2xLw8Rt5Yb1Zc7Hd4Gf6Mp0A"
HERE = {"host": "127.0.0.1:8001"}
JSON = HERE | {"content-type": "application/json"}
BODIES: dict[str, dict[str, Any]] = {
    "start_run": {"workflow": "order", "input": {"order_id": "A"}},
    "act_on_runs": {"action": "cancel", "ids": ["r-1"]},
    "send_event": {"type": "order.paid", "data": {"order_id": "A"}},
    "publish_message": {"channel": "prices", "data": 3},
    "retry_outbox": {"ids": ["o-1"]},
    "drop_outbox": {"every": True},
}
SUBJECTS = {"cancel_run": "r-1", "get_definition": "order", "get_event": 1, "resend_event": 1}


@pytest.fixture
def showcase() -> Showcase:
    return Showcase()


@pytest.fixture
def web(service: FakeService, showcase: Showcase) -> WebApp:
    return WebApp(service, control=lambda: showcase)


@pytest.fixture
def guarded(service: FakeService, showcase: Showcase) -> WebApp:
    return WebApp(service, WebOptions(tokens=TOKENS), control=lambda: showcase)


def address(operation: Operation[Any]) -> str:
    values = (SUBJECTS.get(operation.name, "r-2"),) if "{" in operation.path else ()
    return PREFIX + operation.address(*values)


async def perform(web: WebApp, operation: Operation[Any], headers: dict[str, str] | None = None) -> Reply:
    body = json.dumps(BODIES[operation.name]).encode() if operation.name in BODIES else b""
    return await ask(web, method=operation.method, path=address(operation), headers=JSON | (headers or {}), body=body)


async def get(web: WebApp, path: str, query: str = "", **changes: Any) -> Reply:
    return await ask(web, method="GET", path=PREFIX + path, query=query.encode(), headers=HERE, body=b"", **changes)


async def get_raw(web: WebApp, path: str, root: str = "") -> Reply:
    """As servers do: with the raw path beside the decoded one."""
    call = Call(method="GET", headers=HERE, body=b"", root_path=root)
    scope = {**call.scope(), "path": root + unquote(path), "raw_path": f"{quote(root)}{path}".encode()}
    return await deliver(web, call, scope)


async def post(
    web: WebApp | EddaApp, path: str, body: bytes | dict[str, Any] = b"", headers: dict[str, str] = JSON
) -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await ask(web, path=PREFIX + path, headers=headers, body=content)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_every_operation_answers(web: WebApp, operation: Operation[Any]) -> None:
    reply = await perform(web, operation)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("scope", [*TokenScope, None], ids=str)
async def test_a_token_opens_the_operations_of_its_scope_only(
    guarded: WebApp, showcase: Showcase, operation: Operation[Any], scope: TokenScope | None
) -> None:
    headers = {} if scope is None else {"authorization": f"Bearer {SECRETS[scope]}"}
    reply = await perform(guarded, operation, headers)
    expected = 401 if scope is None else 200 if scope == operation.scope else 403
    assert reply.status == expected, reply.body
    if expected != 200:
        assert (showcase.world.audits, showcase.world.searches) == ([], [])
    if expected == 403:
        assert operation.scope in reply.json["error"]


@pytest.mark.parametrize("name", ["openapi.json", "metrics", "stream"])
@pytest.mark.parametrize("scope", [*TokenScope, None], ids=str)
async def test_the_description_and_the_stream_need_the_view_scope(
    guarded: WebApp, name: str, scope: TokenScope | None
) -> None:
    headers = HERE if scope is None else HERE | {"authorization": f"Bearer {SECRETS[scope]}"}
    path = "/_edda/metrics" if name == "metrics" else f"{PREFIX}/{name}"
    reply = await ask(guarded, method="GET", path=path, headers=headers)
    assert reply.status == (401 if scope is None else 200 if scope is TokenScope.VIEW else 403)


async def test_the_audit_log_has_the_name_of_the_token(guarded: WebApp, showcase: Showcase) -> None:
    headers = JSON | {"authorization": f"Bearer {SECRETS[TokenScope.CONTROL]}"}
    await ask(guarded, path=f"{PREFIX}/runs/r-1/cancel", headers=headers, client=("192.0.2.7", 1), body=b"")
    noted = showcase.world.audits[0]
    assert (noted.who, noted.origin, noted.action, noted.subject) == ("control", "192.0.2.7", "cancel", "r-1")


async def test_without_a_controller_there_is_no_api(service: FakeService) -> None:
    bare = WebApp(service)
    for path in ("/runs", "/openapi.json", "/stream"):
        assert (await get(bare, path)).status == 404
    assert (await ask(bare, method="GET", path="/_edda/metrics", headers=HERE)).status == 404


# Addresses


@pytest.mark.parametrize("path", ["", "/", "/run", "/runs/", "/runs/r-1/", "/runs/r-1/x", "/runs//history", "/v2"])
async def test_there_is_nothing_at_an_unknown_address(web: WebApp, path: str) -> None:
    assert (await get(web, path)).status == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/runs", "GET, HEAD, POST"),
        ("POST", "/runs/r-1", "DELETE, GET, HEAD"),
        ("GET", "/runs/r-1/cancel", "POST"),
        ("POST", "/runs/count", "GET, HEAD"),
        ("GET", "/runs/bulk", "POST"),
        ("DELETE", "/stream", "GET, HEAD"),
        ("OPTIONS", "/openapi.json", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_gets_the_allowed_ones(web: WebApp, method: str, path: str, allowed: str) -> None:
    reply = await ask(web, method=method, path=PREFIX + path, headers=JSON)
    assert (reply.status, reply.headers["allow"]) == (405, allowed)


async def test_head_is_get_without_a_body(web: WebApp) -> None:
    reply = await ask(web, method="HEAD", path=f"{PREFIX}/runs", headers=HERE)
    assert (reply.status, reply.body) == (200, b"")
    assert int(reply.headers["content-length"]) > 0


@pytest.mark.parametrize("root", ["", "/mounted here"])
@pytest.mark.parametrize("id", ["a/b?c#d é", "count", "bulk", "..", "%2F", "a%b", "日本", " ", "x" * 500])
async def test_an_id_may_have_any_character(showcase: Showcase, web: WebApp, id: str, root: str) -> None:

    showcase.world.runs[id] = a_run(id, "completed")

    for operation in (one for one in OPERATIONS if one.name in {"get_run", "export_run"}):
        reply = await get_raw(web, PREFIX + operation.address(id), root)
        assert reply.status == 200, reply.body
        assert reply.json.get("detail", reply.json)["run"]["id"] == id
    assert reply.headers["content-disposition"].startswith('attachment; filename="run-')


@pytest.mark.parametrize("id", ["%00", "%FF", "a%ED%A0%80"])
async def test_what_can_be_no_id_is_not_found(web: WebApp, id: str) -> None:

    assert (await get_raw(web, f"{PREFIX}/runs/{id}")).status == 404


@pytest.mark.parametrize("number", ["x", "-1", "1.0", "9" * 19, "9" * 5000, "٣", "%31x", "99"])
async def test_what_is_no_number_of_an_event_is_not_found(web: WebApp, number: str) -> None:
    assert (await get(web, f"/events/{number}")).status == 404
    assert (await post(web, f"/events/{number}/resend")).status == 404


# Queries and bodies


async def test_a_query_is_read_into_a_search(web: WebApp, showcase: Showcase) -> None:
    query = "status=failed&status=waiting&workflow=order&q=null&input=a%3D1&since=2026-01-01T00:00:00Z&limit=200&id="
    assert (await get(web, "/runs", query)).status == 200
    assert showcase.world.searches == [
        RunSearch(
            status=("failed", "waiting"),
            workflow="order",
            q="null",
            input=("a=1",),
            since=datetime(2026, 1, 1, tzinfo=UTC),
            limit=200,
        )
    ]


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [
        ("/runs", "limit=0", "limit"),
        ("/runs", "limit=201", "limit"),
        ("/runs", "limit=-1", "limit"),
        ("/runs", "limit=" + "9" * 5000, "limit"),
        ("/runs", "limit=x", "limit"),
        ("/runs", "limit=1&limit=2", "limit"),
        ("/runs", "since=yesterday", "since"),
        ("/runs", "until=0.0", "until"),
        ("/events", "since=1.5e-7", "since"),
        ("/runs", "colour=red", "colour"),
        ("/runs", "q=%00", None),
        ("/runs", "q=%FF", None),
        ("/runs", "q=\xff", None),
        ("/runs", "&".join(["status=a"] * 300), None),
        ("/runs", "cursor=elsewhere", None),
        ("/events", "messages=perhaps", "messages"),
        ("/events", "limit=1000", "limit"),
        ("/runs/r-1/history", "generation=-1", "generation"),
        ("/runs/r-1/history", "generation=null", "generation"),
        ("/runs/r-1/history", "generation=1.0", "generation"),
        ("/runs/r-1/history", "generation=" + "9" * 30, "generation"),
        ("/waits", "limit=500", "limit"),
        ("/outbox", "state=gone", None),
        ("/audits", "limit=", ""),
    ],
)
async def test_an_error_in_a_query_names_the_field(web: WebApp, path: str, query: str, field: str | None) -> None:
    reply = await ask(web, method="GET", path=PREFIX + path, query=query.encode("latin-1"), headers=HERE)
    if field == "":
        assert reply.status == 200, "what was left empty in a form is not given"
        return
    assert reply.status == 422, reply.body
    assert reply.json.get("attribute") == field


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/runs", b"", 422, "workflow"),
        ("/runs", b'{"workflow": "a\\u0000b"}', 422, "workflow"),
        ("/runs/bulk", b'{"action": "cancel", "ids": ["a", "\\u0000"]}', 422, "ids"),
        ("/runs/bulk", b'{"action": "cancel", "search": {"q": "\\u0000"}}', 422, "q"),
        ("/runs/bulk", b'{"action": "cancel", "search": {"colour": "red"}}', 422, "search.colour"),
        ("/runs", b"[]", 422, None),
        ("/runs", b"{", 400, None),
        ("/runs", b"\xff", 400, None),
        ("/runs", b'{"workflow": "order", "workflow": "order"}', 400, None),
        ("/runs", b"[" * 5000, 400, None),
        ("/runs", b'{"workflow": "order", "input": {"order_id": NaN}}', 400, None),
        ("/runs", b'{"workflow": 1}', 422, "workflow"),
        ("/runs", b'{"workflow": "order", "input": 3}', 422, "input"),
        ("/runs", b'{"workflow": "order", "colour": "red"}', 422, "colour"),
        ("/runs", b'{"workflow": "order"}', 422, None),
        ("/runs", b'{"workflow": "unknown"}', 404, None),
        ("/runs/r-1/retry", b'{"from_start": "yes"}', 422, "from_start"),
        ("/runs/r-1/retry", b"", 409, None),
        ("/runs/r-9/retry", b"", 404, None),
        ("/runs/bulk", b'{"action": "burn"}', 422, None),
        ("/runs/bulk", b'{"action": "cancel", "search": {"limit": 9999}}', 422, "limit"),
        ("/runs/bulk", b'{"action": "cancel", "search": {"status": "failed"}}', 422, "search.status"),
        ("/events", b'{"type": ""}', 422, None),
    ],
)
async def test_an_error_in_a_body_names_the_field(
    web: WebApp, showcase: Showcase, path: str, body: bytes, status: int, field: str | None
) -> None:
    reply = await post(web, path, body)
    assert reply.status == status, reply.body
    assert reply.json.get("attribute") == field
    assert showcase.world.audits == []


@pytest.mark.databases("memory")
@pytest.mark.parametrize(
    ("request_body", "attribute"),
    [
        ({"type": ""}, "type"),
        ({"type": "order.paid", "source": "not a URI"}, "source"),
        ({"type": "order.paid", "extensions": {"region": 2**40}}, "region"),
    ],
)
async def test_an_invalid_event_is_refused_with_the_name_of_its_attribute(
    request_body: dict[str, Any], attribute: str
) -> None:
    async with EddaApp("shop", "memory://") as app:
        reply = await post(app, "/events", request_body)
    assert (reply.status, reply.json["attribute"]) == (422, attribute), reply.body


@pytest.mark.parametrize(
    ("path", "query", "error"),
    [
        ("/runs", "limit=x", "limit: expected a whole number"),
        ("/runs/r-1/history", "generation=x", "generation: expected a whole number"),
        ("/events", "messages=perhaps", "messages: expected true or false"),
        ("/events", "colour=red", "colour: there is no such field"),
        ("/runs", "since=2026-13-01T00:00:00Z", "since: expected a time with its zone, such as 2026-01-31T18:30:00Z"),
        ("/runs/nobody", "", "no run has the id 'nobody'"),
        ("/nowhere", "", f"there is nothing at this path; see {PREFIX}/openapi.json"),
    ],
)
async def test_a_refusal_names_the_thing_and_what_was_expected(web: WebApp, path: str, query: str, error: str) -> None:
    assert (await get(web, path, query)).json["error"] == error


async def test_only_json_is_accepted(web: WebApp) -> None:
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        reply = await post(web, "/runs", BODIES["start_run"], HERE | {"content-type": media})
        assert reply.status == 415
    assert (await post(web, "/runs", BODIES["start_run"], HERE)).status == 200
    assert (
        await post(web, "/runs", BODIES["start_run"], HERE | {"content-type": "Application/JSON ; q=1"})
    ).status == 200


async def test_a_body_over_the_limit_is_refused(service: FakeService, showcase: Showcase) -> None:
    web = WebApp(service, WebOptions(max_body=50), control=lambda: showcase)
    assert (await post(web, "/runs", b" " * 51)).status == 413


async def test_an_empty_body_means_the_defaults(web: WebApp, showcase: Showcase) -> None:
    assert (await post(web, "/runs/r-1/cancel")).json["words"] == "cancelled"
    assert (await post(web, "/runs/r-2/retry", {"from_start": True})).json["words"] == "from_start=True"


# Errors


@pytest.mark.parametrize(
    ("error", "status"), [(StorageUnavailableError("gone"), 503), (TimeoutError(), 503), (RuntimeError("bug"), 500)]
)
async def test_no_error_response_reveals_internals(
    web: WebApp, showcase: Showcase, error: Exception, status: int
) -> None:
    showcase.world.error = error
    reply = await get(web, "/runs")
    assert reply.status == status
    assert "bug" not in reply.body.decode()
    assert "gone" not in reply.body.decode()


@pytest.mark.parametrize("state", [State.DRAINING, State.STOPPED])
async def test_an_app_that_is_not_started_says_so(service: FakeService, web: WebApp, state: State) -> None:
    service.state = state
    for path in ("/runs", "/stream"):
        assert (await get(web, path)).status == 503
    assert (await get(web, "/openapi.json")).status == 200


@pytest.mark.parametrize("options", [WebOptions(), WebOptions(tokens=TOKENS), WebOptions(auth="none")])
@pytest.mark.parametrize("circumstances", ["well", "away", "broken", "draining"])
async def test_every_answer_is_protected(
    service: FakeService, showcase: Showcase, options: WebOptions, circumstances: str
) -> None:
    """Including those against framing by other origins."""
    errors = {"away": StorageUnavailableError("gone"), "broken": RuntimeError("bug")}
    showcase.world.error = errors.get(circumstances)
    service.state = State.DRAINING if circumstances == "draining" else State.STARTED
    web = WebApp(service, options, control=lambda: showcase)
    paths = [address(operation) for operation in OPERATIONS]
    paths += [f"{PREFIX}/{name}" for name in ("openapi.json", "stream", "x", "")] + ["/_edda/metrics", "/_edda/login"]
    senders = (JSON, JSON | {"authorization": f"Bearer {SECRETS[TokenScope.VIEW]}"}, JSON | {"host": "evil.example"})
    for path, method, headers in product(paths, ("GET", "POST", "HEAD", "PUT", "OPTIONS", "DELETE"), senders):
        reply = await ask(web, method=method, path=path, headers=headers, body=b"")
        assert {name: reply.headers.get(name) for name in PROTECTION} == PROTECTION
        assert not any(name.startswith("access-control") or name == "server" for name in reply.headers)
        assert not 300 <= reply.status < 400


# Read-only


async def test_a_read_only_server_refuses_every_change(service: FakeService, showcase: Showcase) -> None:
    control = Token("ops", frozenset(TokenScope), EVERYTHING)
    bearer = {"authorization": f"Bearer {EVERYTHING}"}
    for options, headers in ((WebOptions(read_only=True), {}), (WebOptions(read_only=True, tokens=(control,)), bearer)):
        web = WebApp(service, options, control=lambda: showcase)
        for operation in OPERATIONS:
            reply = await perform(web, operation, headers)
            assert reply.status == (200 if operation.scope == "view" else 403)
            assert operation.scope == "view" or "read_only" in reply.json["error"]
        assert (await ask(web, headers=EVENT | headers)).status == 403
        assert (await ask(web, path="/cancel/r-1", headers=EVENT | headers)).status == 403
    assert [*service.stored, *service.cancelled, *showcase.world.audits] == []


async def test_an_action_on_many_runs_may_take_longer(
    service: FakeService, showcase: Showcase, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = WebApp(service, WebOptions(service_timeout=0.02), control=lambda: showcase)

    async def take_a_while(*_: object) -> ActionResult:
        await asyncio.sleep(0.1)
        return ActionResult(True, "done")

    monkeypatch.setattr(Showcase, "act_on_runs", take_a_while)
    monkeypatch.setattr(Showcase, "send_event", take_a_while)
    assert (await post(web, "/runs/bulk", BODIES["act_on_runs"])).status == 200
    assert (await post(web, "/events", BODIES["send_event"])).status == 503
