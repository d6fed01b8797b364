"""What is served while its pages are timed: an app with the code of one of the workflows."""

from __future__ import annotations

from edda import EddaApp, WorkflowContext, activity, wait_event, workflow


@activity
async def charge(ctx: WorkflowContext, order: str) -> dict[str, str]:
    return {"order": order}


@workflow
async def workflow3(ctx: WorkflowContext, order: str) -> dict[str, str]:
    await charge(ctx, order)
    await wait_event(ctx, "payment")
    return {}


app = EddaApp("scale")
