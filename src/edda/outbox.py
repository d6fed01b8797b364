"""`from edda.outbox import ...`: what belongs to events for others."""

from edda.engine.outbox.sinks import HttpSink, Sink
from edda.relaying import OutboxRelayer
from edda.workflow.sending import send_event_transactional

__all__ = ["HttpSink", "OutboxRelayer", "Sink", "send_event_transactional"]
