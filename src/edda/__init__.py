"""Durable execution for Python, on your own database: workflows continue after crashes, restarts and deployments."""

from edda.app import EddaApp
from edda.core.redact import clean_logs
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
from edda.outbox import OutboxRelayer
from edda.version import __version__
from edda.workflow.activity import Happened, activity
from edda.workflow.channels import ChannelMessage, publish, receive, send_to, subscribe, unsubscribe
from edda.workflow.context import WorkflowContext
from edda.workflow.events import ReceivedEvent, wait_event
from edda.workflow.saga import compensation, on_failure, register_compensation
from edda.workflow.send_event import send_event, send_event_transactional
from edda.workflow.waits import First, sleep, sleep_until, wait_any, wait_timer, wait_until
from edda.workflow.workflow import WorkflowHandle, workflow
from edda.wsgi import create_wsgi_app

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
