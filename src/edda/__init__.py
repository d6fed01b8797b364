"""Durable execution for Python: workflows that survive anything, on your own database."""

from edda.app import EddaApp
from edda.core.logs import clean_logs
from edda.core.retry import RetryPolicy
from edda.core.states import RunStatus
from edda.engine.hooks import HooksBase, WorkflowHooks
from edda.errors import (
    ActivityTimeoutError,
    ChannelError,
    CompensationError,
    EddaError,
    EventTimeoutError,
    EventValidationError,
    HeartbeatTimeoutError,
    LeaseLostError,
    MessageTimeoutError,
    NonDeterminismError,
    RetryExhaustedError,
    TerminalError,
    WorkflowCancelledError,
)
from edda.version import __version__
from edda.workflow.activity import Happened, activity
from edda.workflow.channels import ChannelMessage, publish, receive, send_to, subscribe, unsubscribe
from edda.workflow.context import WorkflowContext
from edda.workflow.events import ReceivedEvent, wait_event
from edda.workflow.handle import WorkflowHandle
from edda.workflow.saga import compensation, on_failure, register_compensation
from edda.workflow.send_event import send_event, send_event_transactional
from edda.workflow.timers import sleep, sleep_until, wait_timer, wait_until
from edda.workflow.wait_any import First, wait_any
from edda.workflow.workflow import workflow
from edda.wsgi import create_wsgi_app

from .outbox_relayer import OutboxRelayer

clean_logs()

__all__ = [
    "ActivityTimeoutError",
    "ChannelError",
    "ChannelMessage",
    "CompensationError",
    "EddaApp",
    "EddaError",
    "EventTimeoutError",
    "EventValidationError",
    "First",
    "Happened",
    "HeartbeatTimeoutError",
    "HooksBase",
    "LeaseLostError",
    "MessageTimeoutError",
    "NonDeterminismError",
    "OutboxRelayer",
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
    "compensation",
    "create_wsgi_app",
    "on_failure",
    "publish",
    "receive",
    "register_compensation",
    "send_event",
    "send_event_transactional",
    "send_to",
    "sleep",
    "sleep_until",
    "subscribe",
    "unsubscribe",
    "wait_any",
    "wait_event",
    "wait_timer",
    "wait_until",
    "workflow",
]
