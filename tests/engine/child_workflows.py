"""Workflows for tests of children, and how to find their runs."""

from __future__ import annotations

from edda import EddaApp, WorkflowContext, wait_event, workflow
from edda.workflow.workflow import Workflow


class ShopClosedError(Exception):
    def __init__(self, message: str, until: int) -> None:
        super().__init__(message, until)
        self.until = until


async def runs_of(app: EddaApp, name: str) -> list[str]:
    found = await app.find_instances(workflow_name=name, limit=1000)
    return [one["instance_id"] for one in found["instances"]]


def endless() -> Workflow[[], str]:
    """Ends when its event comes, or when it is cancelled."""

    @workflow(name="endless")
    async def wait(ctx: WorkflowContext) -> str:
        return str((await wait_event(ctx, "go")).data)

    return wait


def doubling() -> Workflow[[int], int]:
    @workflow(name="double")
    async def double(ctx: WorkflowContext, number: int) -> int:
        return 2 * number

    return double
