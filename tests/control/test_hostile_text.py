"""Requests with any text return a result or raise an `EddaError`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from edda import EddaApp, WorkflowContext, workflow
from edda.control.local import LocalController
from edda.control.views import (
    BulkRequest,
    EventRequest,
    EventSearch,
    HistorySearch,
    MessageRequest,
    OutboxRequest,
    RetryRequest,
    RunSearch,
    StartRequest,
)
from edda.errors import EddaError

HOSTILE = (
    "",
    "'",
    '"; DROP TABLE edda_run; --',
    "%",
    "_",
    "\\",
    "a\0b",
    "<script>alert(1)</script>",
    "🙂" * 50,
    "\u202e\ufeff",
    "x" * 10_000,
    "../../etc/passwd",
    "{}",
    "9" * 30,
    "=",
    "a=",
    "1:",
)

Ask = Callable[[LocalController, str], Awaitable[object]]
ASK: dict[str, Ask] = {
    "text": lambda control, word: control.list_runs(RunSearch(q=word)),
    "id": lambda control, word: control.list_runs(RunSearch(id=word)),
    "workflow": lambda control, word: control.count_runs(RunSearch(workflow=word)),
    "input": lambda control, word: control.list_runs(RunSearch(input=(word,))),
    "status": lambda control, word: control.list_runs(RunSearch(status=(word,))),
    "parent": lambda control, word: control.list_runs(RunSearch(parent=word)),
    "cursor": lambda control, word: control.list_runs(RunSearch(cursor=word)),
    "run": lambda control, word: control.get_run(word),
    "history": lambda control, word: control.get_history(word, HistorySearch()),
    "line": lambda control, word: control.get_history("run", HistorySearch(cursor=word)),
    "step": lambda control, word: control.get_history("run", HistorySearch(step=word)),
    "timeline": lambda control, word: control.get_timeline(word),
    "cancel": lambda control, word: control.cancel_run(word, word),
    "retry": lambda control, word: control.retry_run(word, RetryRequest()),
    "resume": lambda control, word: control.resume_run(word),
    "delete": lambda control, word: control.delete_run(word),
    "many": lambda control, word: control.act_on_runs(BulkRequest("cancel", ids=(word,), reason=word)),
    "start": lambda control, word: control.start_run(StartRequest("echo", {"word": word}, id=word)),
    "field": lambda control, word: control.start_run(StartRequest("echo", {word: word})),
    "unknown": lambda control, word: control.start_run(StartRequest(word)),
    "event": lambda control, word: control.send_event(EventRequest(word, source=word, data=word, id=word, target=word)),
    "extension": lambda control, word: control.send_event(EventRequest("news", extensions={word: word})),
    "events": lambda control, word: control.list_events(EventSearch(type=word, source=word, id=word)),
    "search events": lambda control, word: control.list_events(EventSearch(q=word)),
    "waits": lambda control, word: control.list_waits(word, None, 10),
    "place": lambda control, word: control.list_waits(None, word, 10),
    "message": lambda control, word: control.publish_message(MessageRequest(word, word, {word: word}, word)),
    "outbox": lambda control, word: control.list_outbox(word, None, 10),
    "retry outbox": lambda control, word: control.retry_outbox(OutboxRequest(ids=(word,))),
    "drop outbox": lambda control, word: control.drop_outbox(OutboxRequest(ids=(word,))),
    "definition": lambda control, word: control.get_definition(word),
    "audits": lambda control, word: control.list_audits(word, 10),
    "caller": lambda control, word: control.with_caller(word, word).send_event(EventRequest("news")),
}


@pytest.mark.parametrize("way", ASK)
async def test_every_word_gets_an_answer(app: EddaApp, way: str) -> None:
    @workflow
    async def echo(ctx: WorkflowContext, word: str) -> str:
        return word

    await app.run(echo, "hello")
    for word in HOSTILE:
        with suppress(EddaError):
            await ASK[way](app.control, word)
