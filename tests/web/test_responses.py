"""Every response of the event and cancel endpoints."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from edda.errors import (
    AppError,
    EventError,
    InstanceNotFoundError,
    PayloadError,
    PayloadTooLargeError,
    StorageConflictError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.web import State, WebApp, WebOptions

from .calls import EVENT, Call, Reply, ask
from .fakes import FakeService

STRUCTURED = {"host": "localhost", "content-type": "application/cloudevents+json"}
BATCH = {"host": "localhost", "content-type": "application/cloudevents-batch+json"}
ORDER = {"specversion": "1.0", "id": "1", "source": "/tests", "type": "order.created"}


def assert_refused(reply: Reply, status: int, *, retryable: bool) -> None:
    assert reply.status == status
    assert isinstance(reply.json["error"], str)
    assert isinstance(reply.json["error_type"], str)
    assert reply.json["retryable"] is retryable


async def test_an_event_is_stored_and_then_accepted(web: WebApp, service: FakeService) -> None:
    service.open.clear()
    asked = asyncio.create_task(ask(web))
    await service.until_waiting()
    assert not asked.done()
    service.open.set()
    reply = await asked
    assert (reply.status, reply.json) == (202, {"status": "accepted"})
    assert [event.type for event in service.stored] == ["order.created"]


@pytest.mark.parametrize("path", ["/", "/events", "/a/b/c", "//", "/_eddas", "/cancelled", "/%2e", "/ö"])
async def test_every_path_accepts_events(web: WebApp, service: FakeService, path: str) -> None:
    assert (await ask(web, path=path)).status == 202
    assert len(service.stored) == 1


async def test_a_structured_event_is_accepted(web: WebApp, service: FakeService) -> None:
    assert (await ask(web, headers=STRUCTURED, body=json.dumps(ORDER).encode())).status == 202
    assert len(service.stored) == 1


async def test_a_batch_is_stored_as_a_whole(web: WebApp, service: FakeService) -> None:
    batch = [ORDER | {"id": str(number)} for number in range(100)]
    assert (await ask(web, headers=BATCH, body=json.dumps(batch).encode())).status == 202
    assert [event.id for event in service.stored] == [str(number) for number in range(100)]


async def test_an_empty_batch_is_accepted_without_the_database(web: WebApp, service: FakeService) -> None:
    service.error = StorageUnavailableError("gone")
    assert (await ask(web, headers=BATCH, body=b"[]")).status == 202


async def test_a_batch_over_the_limit_is_refused_as_a_whole(service: FakeService) -> None:
    web = WebApp(service, WebOptions(max_batch=2))
    reply = await ask(web, headers=BATCH, body=json.dumps([ORDER] * 3).encode())
    assert_refused(reply, 413, retryable=False)
    assert service.stored == []


async def test_an_invalid_event_is_refused_with_the_name_of_its_attribute(web: WebApp, service: FakeService) -> None:
    reply = await ask(web, headers={name: value for name, value in EVENT.items() if name != "ce-source"})
    assert_refused(reply, 400, retryable=False)
    assert (reply.json["error_type"], reply.json["attribute"]) == ("EventError", "source")
    assert service.stored == []


async def test_a_body_that_is_no_event_is_refused(web: WebApp) -> None:
    reply = await ask(web, headers={"host": "localhost", "content-type": "text/plain"}, body=b"hello")
    assert_refused(reply, 415, retryable=False)


async def test_an_event_error_has_its_own_status(web: WebApp, service: FakeService) -> None:
    service.error = EventError("not taken here", attribute="type", status=422)
    reply = await ask(web)
    assert_refused(reply, 422, retryable=False)
    assert reply.json["attribute"] == "type"


@pytest.mark.parametrize("error", [StorageUnavailableError, StorageConflictError, AppError, TimeoutError])
async def test_while_the_database_is_away_senders_get_503_and_retry_after(
    web: WebApp, service: FakeService, error: type[Exception]
) -> None:
    service.error = error("password=secret")
    reply = await ask(web)
    assert_refused(reply, 503, retryable=True)
    assert reply.headers["retry-after"] == "5"
    assert b"secret" not in reply.body


async def test_a_request_to_a_hanging_database_times_out(service: FakeService) -> None:
    service.open.clear()
    reply = await ask(WebApp(service, WebOptions(service_timeout=0.01)))
    assert_refused(reply, 503, retryable=True)
    assert service.waiting == 0


@pytest.mark.parametrize(
    ("error", "status"), [(PayloadError, 400), (StorageRejectedError, 400), (PayloadTooLargeError, 413)]
)
async def test_data_that_cannot_be_stored_is_an_error_of_the_sender(
    web: WebApp, service: FakeService, error: type[Exception], status: int
) -> None:
    service.error = error("bytes of the input")
    reply = await ask(web)
    assert_refused(reply, status, retryable=False)
    assert b"input" not in reply.body


async def test_an_unexpected_error_is_logged_and_its_text_not_sent(
    web: WebApp, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    service.error = ZeroDivisionError("secret")
    reply = await ask(web)
    assert_refused(reply, 500, retryable=True)
    assert reply.json["error_type"] == "ZeroDivisionError"
    assert b"secret" not in reply.body
    assert "Traceback" in caplog.text
    assert "secret" in caplog.text


async def test_a_draining_app_refuses_events(web: WebApp, service: FakeService) -> None:
    service.state = State.DRAINING
    for path in ("/events", "/cancel/run"):
        reply = await ask(web, path=path, body=b"")
        assert_refused(reply, 503, retryable=True)
        assert "retry-after" in reply.headers
        assert reply.receives == 0
    assert service.stored == []


async def test_an_app_that_was_never_started_says_how_to_start_it(
    web: WebApp, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    service.state = State.STOPPED
    for _ in range(3):
        reply = await ask(web)
        assert_refused(reply, 503, retryable=True)
        assert "await app.initialize()" in reply.json["error"]
        assert "lifespan" in reply.json["error"]
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1
    assert "await app.initialize()" in told[0].getMessage()


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "TRACE", "BREW"])
async def test_events_are_posted_and_nothing_else(web: WebApp, method: str) -> None:
    reply = await ask(web, method=method)
    assert (reply.status, reply.headers["allow"]) == (405, "POST, OPTIONS")


async def test_an_answer_to_head_has_no_body(web: WebApp) -> None:
    get, head = await ask(web, method="GET"), await ask(web, method="HEAD")
    assert (head.status, head.headers, head.body) == (get.status, get.headers, b"")


async def test_more_requests_than_allowed_get_429(service: FakeService) -> None:
    web = WebApp(service, WebOptions(max_concurrent=2))
    service.open.clear()
    waiting = [asyncio.create_task(ask(web)) for _ in range(2)]
    await service.until_waiting(2)
    reply = await ask(web)
    assert_refused(reply, 429, retryable=True)
    assert reply.headers["retry-after"] == "1"
    service.open.set()
    assert [(await one).status for one in waiting] == [202, 202]
    assert (await ask(web)).status == 202


@pytest.mark.parametrize(("count", "size", "status"), [(100, 10, 202), (101, 10, 431), (7, 70_000, 431)])
async def test_headers_are_limited_in_number_and_size(web: WebApp, count: int, size: int, status: int) -> None:
    headers = [*EVENT.items(), *((f"x-{number}", "x" * size) for number in range(count - len(EVENT)))]
    reply = await ask(web, headers=headers)
    assert reply.status == status
    assert status == 202 or reply.headers["connection"] == "close"


async def test_a_run_is_cancelled(web: WebApp, service: FakeService) -> None:
    reply = await ask(web, path="/cancel/run-1", body=b"")
    assert (reply.status, reply.json) == (202, {"status": "cancelling", "instance_id": "run-1"})
    assert service.cancelled == [("run-1", "cancelled")]


async def test_a_run_is_cancelled_for_a_reason(web: WebApp, service: FakeService) -> None:
    assert (await ask(web, path="/cancel/a/b", body=b'{"reason": "sold out"}')).status == 202
    assert service.cancelled == [("a/b", "sold out")]


@pytest.mark.parametrize(
    "body", [b"no", b"[]", b"{}", b'{"reason": 1}', b'{"reason": "\\u0000"}', b'{"x": 1}', b"\xff"]
)
async def test_a_reason_that_cannot_be_read_cancels_nothing(web: WebApp, service: FakeService, body: bytes) -> None:
    assert_refused(await ask(web, path="/cancel/run-1", body=body), 400, retryable=False)
    assert service.cancelled == []


async def test_a_reason_nested_without_end_is_refused(web: WebApp) -> None:
    body = b'{"reason": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert_refused(await ask(web, path="/cancel/run-1", body=body), 400, retryable=False)


async def test_a_run_that_does_not_exist_cannot_be_cancelled(web: WebApp, service: FakeService) -> None:
    service.error = InstanceNotFoundError("no run has the id 'run-1'")
    reply = await ask(web, path="/cancel/run-1", body=b"")
    assert_refused(reply, 404, retryable=False)
    assert reply.json["error_type"] == "InstanceNotFoundError"


@pytest.mark.parametrize("path", ["/cancel", "/cancel/", "/cancel/a\0b"])
async def test_what_is_no_id_is_not_found(web: WebApp, service: FakeService, path: str) -> None:
    assert_refused(await ask(web, path=path, body=b""), 404, retryable=False)
    assert service.cancelled == []


async def test_a_run_that_has_ended_cannot_be_cancelled(web: WebApp, service: FakeService) -> None:
    service.ended.add("run-1")
    assert_refused(await ask(web, path="/cancel/run-1", body=b""), 409, retryable=False)


async def test_cancelling_is_posted(web: WebApp) -> None:
    reply = await ask(web, path="/cancel/run-1", method="GET")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/_edda", "/_edda/", "/_edda/events", "/_edda/livez/", "/_edda/api/v1/runs"])
async def test_no_event_path_shadows_a_path_of_the_app(web: WebApp, service: FakeService, path: str) -> None:
    assert_refused(await ask(web, path=path), 404, retryable=False)
    assert service.stored == []


@pytest.mark.parametrize("state", list(State))
async def test_liveness_does_not_depend_on_the_state_of_the_app(
    web: WebApp, service: FakeService, state: State
) -> None:
    service.state, service.error = state, StorageUnavailableError("gone")
    reply = await ask(web, path="/_edda/livez", method="GET")
    assert (reply.status, reply.json, service.pings) == (200, {"status": "ok"}, 0)


async def test_an_app_is_ready_when_its_database_answers(web: WebApp, service: FakeService) -> None:
    reply = await ask(web, path="/_edda/readyz", method="GET")
    assert (reply.status, reply.json, service.pings) == (200, {"status": "ready"}, 1)


@pytest.mark.parametrize("error", [StorageUnavailableError("gone"), OSError("gone"), TimeoutError()])
async def test_an_app_without_its_database_is_not_ready(web: WebApp, service: FakeService, error: Exception) -> None:
    service.error = error
    reply = await ask(web, path="/_edda/readyz", method="GET")
    assert_refused(reply, 503, retryable=True)
    assert "database" in reply.json["error"]


@pytest.mark.parametrize(("state", "reason"), [(State.STOPPED, "not started"), (State.DRAINING, "shutting down")])
async def test_an_app_that_refuses_events_is_not_ready(
    web: WebApp, service: FakeService, state: State, reason: str
) -> None:
    service.state = state
    reply = await ask(web, path="/_edda/readyz", method="GET")
    assert_refused(reply, 503, retryable=True)
    assert reason in reply.json["error"]


async def test_concurrent_probes_share_one_ping(web: WebApp, service: FakeService) -> None:
    service.open.clear()
    probes = [asyncio.create_task(ask(web, path="/_edda/readyz", method="GET")) for _ in range(20)]
    await service.until_waiting()
    probes[0].cancel()  # the probe that started the ping may be cancelled
    service.open.set()
    assert {(await probe).status for probe in probes[1:]} == {200}
    assert service.pings == 1


@pytest.mark.parametrize("path", ["/_edda/livez", "/_edda/readyz"])
async def test_probes_support_only_get_and_head(web: WebApp, path: str) -> None:
    assert (await ask(web, path=path, method="HEAD")).status == 200
    reply = await ask(web, path=path)
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/events", "/a/b"])
@pytest.mark.parametrize("root", ["", "/edda", "/api/edda/", "/"])
@pytest.mark.parametrize("whole", [True, False])
async def test_the_app_can_be_mounted_at_any_prefix_under_any_server(
    web: WebApp, service: FakeService, root: str, path: str, whole: bool
) -> None:
    prefix = root.rstrip("/") if whole else ""
    assert (await ask(web, root_path=root, path=prefix + path)).status == 202
    assert (await ask(web, root_path=root, path=f"{prefix}/_edda/livez", method="GET")).status == 200
    assert (await ask(web, root_path=root, path=f"{prefix}/cancel/run", body=b"")).status == 202
    assert service.cancelled == [("run", "cancelled")]


async def test_the_mount_prefix_itself_accepts_events(web: WebApp) -> None:
    assert (await ask(web, root_path="/edda", path="/edda")).status == 202
    assert (await ask(web, root_path="/edda", path="/edda_events")).status == 202


async def test_a_whole_address_as_target_is_read_as_its_path(web: WebApp, service: FakeService) -> None:
    assert (await ask(web, path="http://127.0.0.1:8001/cancel/run", body=b"")).status == 202
    assert service.cancelled == [("run", "cancelled")]


async def test_a_websocket_is_closed_before_it_opens(web: WebApp) -> None:
    sent = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: object) -> None:
        sent.append(message)

    await web({"type": "websocket", "path": "/"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1000}]


async def test_a_client_that_disconnects_early_causes_no_error(web: WebApp, service: FakeService) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: object) -> None:
        raise ConnectionResetError

    await web(Call().scope(), receive, send)
    assert len(service.stored) == 1


async def test_a_cancelled_request_gets_no_response(web: WebApp, service: FakeService) -> None:
    service.error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await ask(web)
