"""Traces with OpenTelemetry, by its API alone: `EddaApp(..., hooks=TracingHooks())`.

All spans of a run are in one trace, whichever processes it runs in and however long it takes: the trace's id is made
from the run's. Replay makes no spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """One span for each attempt of a step whose outcome was recorded, and short ones where a run begins and ends, and
    where an event comes to it that carries a trace: that one has a link to who sent it.

    The body of a step has its span as the current one, and events that it sends carry it as `traceparent`. A `share`
    below 1 traces so many of the runs, each as a whole. The texts of errors are without secrets: the passwords of URLs,
    and what stands beside a name such as `token`, or one of `redact`.
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
        # Never detached: the context is the attempt's own, and goes with it.
        context.attach(trace.set_span_in_context(span))
        inherited_extensions.set(_written(span))
        return lambda error: self._end(span, error)

    async def on_workflow_start(self, instance_id: str, workflow_name: str, input_data: dict[str, Any]) -> None:
        self._mark(instance_id, workflow_name, f"{workflow_name} started")

    async def watch_arrival(self, arrival: EventReceived) -> None:
        """Where an event came from that says so: the run has a trace of its own, linked to that of the sender."""
        sender = _read(arrival.extensions)
        if sender.is_valid:
            self._mark(arrival.run_id, arrival.workflow, f"{arrival.type} received", links=[Link(sender)])

    async def on_workflow_complete(self, instance_id: str, workflow_name: str, result: Any) -> None:
        self._mark(instance_id, workflow_name, f"{workflow_name} completed")

    async def on_workflow_failed(self, instance_id: str, workflow_name: str, error: Exception) -> None:
        self._mark(instance_id, workflow_name, f"{workflow_name} failed", error)

    async def on_workflow_cancelled(self, instance_id: str, workflow_name: str) -> None:
        self._mark(instance_id, workflow_name, f"{workflow_name} cancelled")

    def _mark(
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
    """Where the spans of a run hang; there is no span with this id itself, for a run may be too long for one."""
    digest = blake2b(run_id.encode(), digest_size=24).digest()
    is_sampled = int.from_bytes(digest[8:16]) < share * (1 << 64)
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int.from_bytes(digest[:16]), int.from_bytes(digest[16:]), is_remote=True, trace_flags=flags)


def _run_attributes(run_id: str, workflow: str) -> dict[str, str | int]:
    return {"edda.run_id": run_id, "edda.workflow": workflow}


def _written(span: Span) -> Mapping[str, str]:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier


def _read(extensions: Mapping[str, Any]) -> SpanContext:
    carrier = {name: text for name, text in extensions.items() if isinstance(text, str)}
    return trace.get_current_span(_PROPAGATOR.extract(carrier, Context())).get_span_context()
