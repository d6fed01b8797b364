"""`from edda.events import ...`: the public names for events."""

from edda.errors import EventTimeoutError, EventValidationError
from edda.workflow.events import ReceivedEvent, wait_event
from edda.workflow.send_event import send_event

__all__ = ["EventTimeoutError", "EventValidationError", "ReceivedEvent", "send_event", "wait_event"]
