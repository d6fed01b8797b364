"""`from edda.outbox import ...`: what belongs to events for others."""

from edda.engine.outbox.sinks import HttpSink, Sink
from edda.workflow.send_event import send_event_transactional

from .outbox_relayer import OutboxRelayer

__all__ = ["HttpSink", "OutboxRelayer", "Sink", "send_event_transactional"]
