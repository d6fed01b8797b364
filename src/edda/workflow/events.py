"""Waiting for events, and starting workflows by events."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, get_origin, overload

import msgspec
from typing_extensions import TypeVar

from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core import event_match as matching
from edda.core.channels import event_type, is_message_body, unpack_message
from edda.core.exceptions import decode_failure
from edda.core.model import EntryKind
from edda.core.options import hide_unknown, refuse_unknown
from edda.core.redact import REDACTED, hides
from edda.core.validation import ValidationFailure, validate
from edda.errors import ArgumentError, EventTimeoutError, EventValidationError, NonDeterminismError

from .activity import Activity
from .client import current_app
from .context import WorkflowContext, as_microseconds, execution_of, seconds_to_microseconds
from .workflow import Workflow, registry

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.core.model import Entry

D = TypeVar("D", default=Any)
M = TypeVar("M")
T = TypeVar("T")

Since = datetime | Literal["now"] | None
OnInvalid = Literal["skip", "raise"]
Check = Callable[[bytes], EventValidationError | None]
_MAX_TYPE_LENGTH = 255
_REQUIRED: Any = Parameter.empty
"""A default that `inspect` shows as required: a call without the context reaches the check that explains it."""
_OPTIONS = ("timeout_seconds", "model", "event_id", "match", "since", "on_invalid")


@dataclass(frozen=True)
class ReceivedEvent(Generic[D]):
    """A received event. `time` is the text that the sender wrote."""

    data: D
    type: str
    source: str
    id: str
    time: str | None = None
    datacontenttype: str | None = None
    subject: str | None = None
    extensions: dict[str, Any] = field(default_factory=dict)


class EventCall(msgspec.Struct, frozen=True, dict=True):
    """What the engine needs to register a wait for an event. Times are in microseconds."""

    type: str
    match: Mapping[str, Any]
    since: int | Literal["now"] | None
    is_named: bool = False
    """The user chose the step's id, and may use the same one again."""

    check: Check | None = None
    """Returns why a stored event does not fit the model; such an event is recorded as rejected, and the wait
    continues."""

    cursor: None = None
    exclusive: bool = False

    def parse(self, codec: Codec, body: bytes) -> CloudEvent:
        return stored_event(codec, body)

    def convert(self, event: CloudEvent, model: Any) -> ReceivedEvent[Any]:
        return to_received_event(event, model)

    def timeout_error(self, seconds: float | None) -> EventTimeoutError:
        return EventTimeoutError(f"no event came within {seconds:g} seconds: {self.describe()}")

    @cached_property
    def match_paths(self) -> str:
        return matching.match_paths(self.match)

    @cached_property
    def _key(self) -> bytes:
        return matching.wait_key(self.type, self.match)

    def key(self, run_id: str, *, own: bool = False) -> bytes:
        return matching.wait_key(self.type, self.match, run_id) if own else self._key

    def describe(self, *, values: bool = True) -> str:
        if values or not self.match:  # stored as the run's reason and part of errors, so secrets are redacted
            shown = {path: REDACTED if hides(path) else value for path, value in self.match.items()}
            return matching.describe(self.type, shown)
        return f"{self.type} where {' and '.join(self.match)} match"


@overload
def wait_event(
    ctx: WorkflowContext,
    event_type: str,
    timeout_seconds: float | timedelta | None = None,
    model: None = None,
    event_id: str | None = None,
    *,
    match: Mapping[str, Any] | None = None,
    since: Since = None,
    on_invalid: OnInvalid = "skip",
) -> Coroutine[Any, Any, ReceivedEvent[Any]]: ...


@overload
def wait_event(
    ctx: WorkflowContext,
    event_type: str,
    timeout_seconds: float | timedelta | None = None,
    *,
    model: type[M],
    event_id: str | None = None,
    match: Mapping[str, Any] | None = None,
    since: Since = None,
    on_invalid: OnInvalid = "skip",
) -> Coroutine[Any, Any, ReceivedEvent[M]]: ...


@overload
def wait_event(
    ctx: WorkflowContext,
    event_type: str,
    timeout_seconds: float | timedelta | None,
    model: type[M],
    event_id: str | None = None,
    *,
    match: Mapping[str, Any] | None = None,
    since: Since = None,
    on_invalid: OnInvalid = "skip",
) -> Coroutine[Any, Any, ReceivedEvent[M]]: ...


def wait_event(
    ctx: WorkflowContext,
    event_type: str = _REQUIRED,
    timeout_seconds: float | timedelta | None = None,
    model: Any = None,
    event_id: str | None = None,
    *,
    match: Mapping[str, Any] | None = None,
    since: Since = None,
    on_invalid: OnInvalid = "skip",
    **unknown: Any,
) -> Coroutine[Any, Any, ReceivedEvent[Any]]:
    """Wait durably for the next event of a type; events that arrived since the start of the run count.

    Args:
        event_type: Attribute `type` of the event, 1 to 255 characters.
        timeout_seconds: Seconds, or a timedelta, after which it raises `EventTimeoutError`. Default None: no limit.
        model: Type that the data is validated against and converted to. Default None: plain JSON values.
        event_id: Id of the step. Default None: generated.
        match: Values of data by path and of attributes by name: `{"order.id": "A-17", "@subject": "x"}`. Default
            None: every event of the type.
        since: Oldest event that counts: an aware datetime, or "now". Default None: the start of the run.
        on_invalid: "skip" (default): an event that does not fit `model` is recorded as rejected, and the wait
            continues. "raise": it ends the wait with an `EventValidationError`.
    """
    if unknown:
        refuse_unknown("wait_event()", unknown, _OPTIONS)
    execution_of(ctx, "wait_event(ctx, event_type)")
    if not isinstance(event_type, str) or not event_type or len(event_type) > _MAX_TYPE_LENGTH:
        raise ValueError(
            f"wait_event(event_type={event_type!r}): expected a text of 1 to {_MAX_TYPE_LENGTH} characters"
        )
    wanted = matching.parse_match(match)
    matching.match_paths(wanted)  # raises if they are too long
    if since is None or since == "now":
        oldest: int | Literal["now"] | None = cast(Literal["now"] | None, since)
    elif isinstance(since, datetime):
        oldest = as_microseconds(since)
    else:
        raise TypeError(f'wait_event(since={since!r}): expected None, "now" or an aware datetime')

    call = EventCall(event_type, wanted, oldest, event_id is not None)
    return issue_wait(
        *(ctx, EntryKind.EVENT, event_type, wanted, call, timeout_seconds, event_id, model),
        may_raise=check_on_invalid("wait_event", on_invalid),
    )


hide_unknown(wait_event)


def check_on_invalid(function: str, on_invalid: str) -> bool:
    """Whether data that does not fit the model raises."""
    if on_invalid not in ("skip", "raise"):
        raise ValueError(f'{function}(on_invalid={on_invalid!r}): expected "skip" or "raise"')
    return on_invalid == "raise"


def issue_wait(
    ctx: WorkflowContext,
    kind: EntryKind,
    name: str,
    wanted: Any,
    call: Any,
    timeout: float | timedelta | None,
    id: str | None,
    model: Any,
    *,
    may_raise: bool,
) -> Coroutine[Any, Any, Any]:
    """The step that waits for an event, or for a message of a channel: `call` is an `EventCall` or a `MessageCall`."""
    execution, codec = ctx.execution, ctx.codec
    if model is not None and (client := current_app.get()) is not None:
        client.register_event_schema(ctx.workflow_name, call.type, model)
    may_raise = may_raise and model is not None

    def read(body: bytes) -> Any:
        stored = call.parse(codec, body)
        return stored if may_raise else call.convert(stored, model)

    if model is not None and not may_raise:
        call = msgspec.structs.replace(call, check=partial(find_misfit, read))

    def decode(entry: Entry) -> Any:
        if entry.ok:
            return accepted(entry, read)
        if entry.value:
            return decode_failure(codec, entry.value)
        return call.timeout_error(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)

    async def convert(wait: Coroutine[Any, Any, Any]) -> Any:
        # In the workflow's task, so that its code can catch the error.
        return call.convert(await wait, model)

    what = "wait_event" if kind is EntryKind.EVENT else "receive"
    due = None
    if timeout is not None:
        due = execution.now + seconds_to_microseconds(timeout, f"{what}(timeout_seconds=)")
    label, input = name.replace("/", "."), codec.encode(wanted)
    wait = execution.call(kind, name, input, decode=decode, call=call, due=due, id=id, label=label)
    return convert(wait) if may_raise else wait


def find_misfit(read: Callable[[bytes], object], body: bytes) -> EventValidationError | None:
    """Why the data does not fit the model that `read` converts it to; None if it fits.

    Also None if the model's definition is invalid: the run is then parked when it reads the data.
    """
    from pydantic.errors import PydanticUserError  # imported on demand: only waits with a model need it

    try:
        read(body)
    except EventValidationError as error:
        return error
    except PydanticUserError:
        return None
    except Exception as error:  # validators are user code and may raise anything: the data does not fit
        return EventValidationError(f"the model raised {type(error).__qualname__}, which is not a ValueError")
    return None


def accepted(entry: Entry, read: Callable[[bytes], T]) -> T:
    """The recorded data, which fitted the model when it arrived. If it does not fit the current model on replay, the
    run is parked: neither an error nor a skipped event would be deterministic."""
    try:
        return read(entry.value)
    except EventValidationError as error:
        raise NonDeterminismError(
            f"step {entry.step!r} accepted its data when it arrived, and the model does not accept it now: {error}\n"
            "The model changed after the run had started, or its validators depend on more than the data: let it "
            "accept the recorded data, and the run continues."
        ) from None


def to_received_event(event: CloudEvent, model: Any = None) -> ReceivedEvent[Any]:
    data = json_format.value_of(event)
    if model is not None:
        raw, hint = None, ""
        if isinstance(event.data, msgspec.Raw):
            raw = bytes(event.data)
        elif event.data is not None:  # a sender that posts a form or text: a model validates JSON only
            kind = event.datacontenttype or "bytes"
            hint = f"\n  its data came as {kind}, not as JSON: send it with application/json"
        data = fit_model(model, data, raw, f"event {event.id!r} of type {event.type} from {event.source}", hint)
    return ReceivedEvent(
        data=data,
        type=event.type,
        source=event.source,
        id=event.id,
        time=event.time,
        datacontenttype=event.datacontenttype,
        subject=event.subject,
        extensions=dict(event.extensions),
    )


def stored_event(codec: Codec, body: bytes) -> CloudEvent:
    return json_format.parse_stored(codec.decrypt(body))


def stored_event_type(codec: Codec, body: bytes) -> str:
    """The type of a stored event, or of a stored message of a channel."""
    data = codec.decrypt(body)
    if is_message_body(data):
        return event_type(unpack_message(codec, body).channel)
    return json_format.parse_stored(data).type


def fit_model(model: Any, data: Any, raw_json: bytes | None, what: str, hint: str = "") -> Any:
    try:
        return validate(data, raw_json, model)
    except ValidationFailure as failure:
        name = getattr(model, "__name__", None) or repr(model)
        fields = "\n".join(f"  {path}: {message}" for path, message in failure.errors)
        raise EventValidationError(f"{what} does not fit {name}:\n{fields}{hint}") from None


# Starting by event


def event_arguments(workflow: Workflow[Any, Any], event: CloudEvent) -> dict[str, Any]:
    """The arguments of a workflow that is started by this event.

    A parameter annotated `ReceivedEvent` gets the whole event. Otherwise the members of a JSON object are the
    arguments, and members without a parameter are ignored; other data is the only argument.
    """
    parameters = workflow.signature.parameters
    if len(parameters) == 1:
        ((name, hint),) = parameters.items()
        if hint is ReceivedEvent or get_origin(hint) is ReceivedEvent:
            return {name: to_received_event(event, *getattr(hint, "__args__", ()))}
    data = json_format.value_of(event)
    if isinstance(data, dict) and (len(parameters) != 1 or not parameters.keys().isdisjoint(data)):
        return data if workflow.signature.takes_any else {name: data[name] for name in parameters if name in data}
    if len(parameters) == 1:
        return {next(iter(parameters)): data}
    raise ArgumentError(
        f"{workflow.name}() takes {len(parameters)} arguments: the data of an event that starts it must be an object "
        "with them"
    )


def as_workflow(handler: Callable[[ReceivedEvent[Any]], Any] | Workflow[Any, Any]) -> Workflow[Any, Any]:
    """Wraps a function of `@app.on_event` in a workflow of one step, so that the call is durable and retried."""
    if isinstance(handler, Workflow):
        return handler
    handle_event: Callable[..., Any]
    if inspect.iscoroutinefunction(handler):

        async def handle_event(ctx: WorkflowContext, event: ReceivedEvent[Any]) -> Any:
            return await handler(event)

    else:

        def handle_event(ctx: WorkflowContext, event: ReceivedEvent[Any]) -> Any:
            return handler(event)

    step: Activity[[ReceivedEvent[Any]], Any] = Activity(handle_event, handler.__name__, None)

    async def run_step(ctx: WorkflowContext, event: ReceivedEvent[Any]) -> Any:
        return await step(ctx, event)

    run_step.__module__ = handler.__module__
    made: Workflow[Any, Any] = Workflow(run_step, f"on_event.{handler.__module__}.{handler.__qualname__}"[:255])
    registry.add(made)
    return made
