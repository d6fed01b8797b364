"""Functions that are called for an event: a workflow of one step, so that the call survives whatever happens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .activity import Activity
from .context import WorkflowContext
from .events import ReceivedEvent
from .workflow import Workflow, registry


def as_workflow(handler: Callable[[ReceivedEvent[Any]], Any] | Workflow[Any, Any]) -> Workflow[Any, Any]:
    if isinstance(handler, Workflow):
        return handler
    name = f"on_event.{handler.__module__}.{handler.__qualname__}"
    step: Activity[[ReceivedEvent[Any]], Any] = Activity(_with_context(handler), handler.__name__, None)

    async def handle(ctx: WorkflowContext, event: ReceivedEvent[Any]) -> Any:
        return await step(ctx, event)

    handle.__module__ = handler.__module__
    made: Workflow[Any, Any] = Workflow(handle, name[:255])
    registry.add(made)
    return made


def _with_context(handler: Callable[[ReceivedEvent[Any]], Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(handler):

        async def call(ctx: WorkflowContext, event: ReceivedEvent[Any]) -> Any:
            return await handler(event)

        return call

    def call_sync(ctx: WorkflowContext, event: ReceivedEvent[Any]) -> Any:
        return handler(event)

    return call_sync
