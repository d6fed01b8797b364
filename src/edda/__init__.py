"""Durable execution for Python: workflows that survive anything, on your own database."""

from edda.app import EddaApp
from edda.core.retry import RetryPolicy
from edda.core.states import RunStatus
from edda.engine.hooks import HooksBase, WorkflowHooks
from edda.errors import (
    EddaError,
    EventTimeoutError,
    EventValidationError,
    LeaseLostError,
    NonDeterminismError,
    RetryExhaustedError,
    TerminalError,
    WorkflowCancelledError,
)
from edda.version import __version__
from edda.workflow.activity import activity
from edda.workflow.context import WorkflowContext
from edda.workflow.events import ReceivedEvent, wait_event
from edda.workflow.handle import WorkflowHandle
from edda.workflow.race import First, wait_any
from edda.workflow.sending import send_event
from edda.workflow.timers import sleep, sleep_until, wait_timer, wait_until
from edda.workflow.workflow import workflow

__all__ = [
    "EddaApp",
    "EddaError",
    "EventTimeoutError",
    "EventValidationError",
    "First",
    "HooksBase",
    "LeaseLostError",
    "NonDeterminismError",
    "ReceivedEvent",
    "RetryExhaustedError",
    "RetryPolicy",
    "RunStatus",
    "TerminalError",
    "WorkflowCancelledError",
    "WorkflowContext",
    "WorkflowHandle",
    "WorkflowHooks",
    "__version__",
    "activity",
    "send_event",
    "sleep",
    "sleep_until",
    "wait_any",
    "wait_event",
    "wait_timer",
    "wait_until",
    "workflow",
]
