"""Traces with OpenTelemetry, through its API package only: `EddaApp(..., hooks=TracingHooks())`.

All spans of a run are in one trace, in whichever processes it runs, because the trace id is a hash of the run's id.
Replay creates no spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from traceback import format_exception
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from edda.core.redact import Redaction
from edda.engine.hooks import AttemptStarted, EventReceived, HooksBase, OnAttemptDone
from edda.errors import RetryExhaustedError
from edda.version import __version__
from edda.workflow.send_event import inherited_extensions

_PROPAGATOR = TraceContextTextMapPropagator()


class TracingHooks(HooksBase):
    """Creates a span for each attempt of a step, and short spans when a run starts, ends, or receives an event with a
    `traceparent`; that span is linked to the sender's.

    During an attempt its span is the current one, and events that the activity sends carry it as `traceparent`.
    Passwords in URLs and values beside secret names (`token`, ...) are removed from error texts.

    Args:
        tracer_provider: Provider of the tracer. Default None: the global provider.
        share: Fraction of runs that are traced, 0 to 1; a run is traced completely or not at all. Default 1.
        redact: Further names of secret fields. Default: none.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, *, share: float = 1.0, redact: Iterable[str] = ()
    ) -> None:
        self._tracer = trace.get_tracer("edda", __version__, tracer_provider)
        self._share = share
        self._redaction = Redaction(redact)

    def watch_attempt(self, attempt: AttemptStarted) -> OnAttemptDone:
        span = self._tracer.start_span(
            attempt.name,
            self._trace_of(attempt.run_id),
            attributes={
                **_run_attributes(attempt.run_id, attempt.workflow),
                "edda.step": attempt.step,
                "edda.attempt": attempt.number,
            },
        )
        # Not detached: the attempt has its own contextvars context, which ends with it.
        context.attach(trace.set_span_in_context(span))
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
        inherited_extensions.set(carrier)
        return lambda error: self._end(span, error)

    async def on_workflow_start(self, instance_id: str, workflow_name: str, input_data: dict[str, Any]) -> None:
        self._add_span(instance_id, workflow_name, f"{workflow_name} started")

    async def watch_arrival(self, arrival: EventReceived) -> None:
        """Links the run's trace to the trace of the event's sender."""
        carrier = {name: text for name, text in arrival.extensions.items() if isinstance(text, str)}
        sender = trace.get_current_span(_PROPAGATOR.extract(carrier, Context())).get_span_context()
        if sender.is_valid:
            self._add_span(arrival.run_id, arrival.workflow, f"{arrival.type} received", links=[Link(sender)])

    async def on_workflow_complete(self, instance_id: str, workflow_name: str, result: Any) -> None:
        self._add_span(instance_id, workflow_name, f"{workflow_name} completed")

    async def on_workflow_failed(self, instance_id: str, workflow_name: str, error: Exception) -> None:
        self._add_span(instance_id, workflow_name, f"{workflow_name} failed", error)

    async def on_workflow_cancelled(self, instance_id: str, workflow_name: str) -> None:
        self._add_span(instance_id, workflow_name, f"{workflow_name} cancelled")

    def _add_span(
        self, run_id: str, workflow: str, name: str, error: Exception | None = None, links: Sequence[Link] = ()
    ) -> None:
        attributes = _run_attributes(run_id, workflow)
        span = self._tracer.start_span(name, self._trace_of(run_id), attributes=attributes, links=links)
        self._end(span, error)

    def _end(self, span: Span, error: BaseException | None) -> None:
        if error is not None:
            reason = error.__cause__ or error if isinstance(error, RetryExhaustedError) else error
            message = self._redaction.censor(str(reason))
            stack = self._redaction.censor("".join(format_exception(reason)))
            span.record_exception(reason, {"exception.message": message, "exception.stacktrace": stack})
            span.set_status(Status(StatusCode.ERROR, message))
        span.end()

    def _trace_of(self, run_id: str) -> Context:
        return trace.set_span_in_context(NonRecordingSpan(trace_of(run_id, self._share)), Context())


def trace_of(run_id: str, share: float = 1.0) -> SpanContext:
    """The parent of all spans of a run. No span with this id is exported: a run may take longer than a span can."""
    digest = blake2b(run_id.encode(), digest_size=24).digest()
    is_sampled = int.from_bytes(digest[8:16]) < share * (1 << 64)
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int.from_bytes(digest[:16]), int.from_bytes(digest[16:]), is_remote=True, trace_flags=flags)


def _run_attributes(run_id: str, workflow: str) -> dict[str, str | int]:
    return {"edda.run_id": run_id, "edda.workflow": workflow}
