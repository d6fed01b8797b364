"""An app to be served over HTTP: `edda serve tests.engine.programs.inbox:app`, on the database in EDDA_DB_URL."""

from __future__ import annotations

from typing import Any

from edda import EddaApp, WorkflowContext, wait_event, workflow


@workflow(event_handler=True)
async def ordered(ctx: WorkflowContext, number: int) -> int:
    return number


@workflow
async def order(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "paid")).data


app = EddaApp("inbox", workflows=[ordered, order])
