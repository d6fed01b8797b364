"""The audit log: each operation that changes something writes an entry, and no other does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edda import EddaApp, RunStatus, WorkflowContext, wait_event, workflow
from edda.control.controller import OPERATIONS, PREFIX, Operation
from edda.control.views import AuditView, EventSearch
from edda.errors import TerminalError
from edda.web import Token, TokenScope
from tests.engine.conditions import until_status

from .calls import EVENT, Reply, ask

OPS, LOOKER = "kq3sJ9vN2xLw8Rt5Yb1Zc7Hd4Gf6Mp0A", "Zk3v9Qw8RtYpLm2NbVcXsD4fGhJ6aE7u"
TOKENS = (Token("ops", frozenset(TokenScope), OPS), Token("looker", frozenset({TokenScope.VIEW}), LOOKER))
ADDRESS = "192.0.2.7"
NOTED: dict[str, list[tuple[str, str]]] = {
    "start_run": [("start", "another")],
    "act_on_runs": [("cancel many", "1 run"), ("cancel", "waiting")],
    "delete_run": [("delete", "failed")],
    "cancel_run": [("cancel", "waiting")],
    "retry_run": [("retry", "failed")],
    "resume_run": [("resume", "waiting")],
    "send_event": [("send event", "e-1")],
    "resend_event": [("resend event", "")],
    "publish_message": [("publish message", "")],
    "retry_outbox": [("retry outbox", "0 events")],
    "drop_outbox": [("drop outbox", "0 events")],
}
"""Action and subject, the newest first; generated ids are left empty."""
BODIES: dict[str, dict[str, Any]] = {
    "start_run": {"workflow": "audited", "id": "another", "input": {"fail": False}},
    "act_on_runs": {"action": "cancel", "ids": ["waiting"]},
    "send_event": {"type": "order.paid", "id": "e-1"},
    "publish_message": {"channel": "kitchen", "data": 1},
    "retry_outbox": {"every": True},
    "drop_outbox": {"every": True},
}
SUBJECTS: dict[str, str | int] = {"get_definition": "audited", "cancel_run": "waiting", "resume_run": "waiting"}


@workflow(name="audited")
async def audited(ctx: WorkflowContext, fail: bool) -> None:
    if fail:
        raise TerminalError("as it was told")
    await wait_event(ctx, "never")


@pytest.fixture
async def app(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EddaApp]:
    async with EddaApp("audited", "memory://", tokens=TOKENS, workflows=[audited]) as app:
        await app.start(audited.options(id="waiting"), False)
        await app.start(audited.options(id="failed"), True)
        await until_status(app, "waiting", RunStatus.WAITING_FOR_EVENT)
        await until_status(app, "failed", RunStatus.FAILED)
        await app.send_event("order.placed", "/tests")
        monkeypatch.setattr(app.client, "resume_run", as_if_parked)
        yield app


async def as_if_parked(run_id: str) -> bool:
    return True


async def perform(app: EddaApp, operation: Operation[Any], secret: str) -> Reply:
    number = (await app.control.list_events(EventSearch())).items[0].number
    subject = number if "{number}" in operation.path else SUBJECTS.get(operation.name, "failed")
    path = PREFIX + operation.address(*(subject,) * operation.path.count("{"))
    body = json.dumps(BODIES[operation.name]).encode() if operation.name in BODIES else b""
    headers = EVENT | {"authorization": f"Bearer {secret}"}
    return await ask(app, method=operation.method, path=path, headers=headers, body=body, client=(ADDRESS, 1))


async def audits(app: EddaApp) -> tuple[AuditView, ...]:
    return (await app.control.list_audits(None, 10)).items


def test_every_operation_that_changes_something_is_in_the_table() -> None:
    assert NOTED.keys() == {operation.name for operation in OPERATIONS if operation.method != "GET"}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_changes_are_audited_and_reads_are_not(app: EddaApp, operation: Operation[Any]) -> None:
    before = await app.engine.storage.now()
    reply = await perform(app, operation, OPS)
    assert reply.status == 200, reply.body
    expected = NOTED.get(operation.name, [])
    noted = await audits(app)
    assert [
        (one.action, one.subject if subject else "") for one, (_, subject) in zip(noted, expected, strict=True)
    ] == expected
    assert {(one.who, one.origin) for one in noted} <= {("ops", ADDRESS)}
    assert all(one.at.timestamp() * 1e6 >= before - 1 for one in noted)


@pytest.mark.parametrize("name", NOTED)
async def test_refused_actions_are_neither_done_nor_audited(app: EddaApp, name: str) -> None:
    operation = next(one for one in OPERATIONS if one.name == name)
    assert (await perform(app, operation, LOOKER)).status == 403
    assert await audits(app) == ()
    assert [(await app.handle(id).status()).value for id in ("waiting", "failed")] == ["waiting_for_event", "failed"]
