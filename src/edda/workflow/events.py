"""Waiting for events, and sending them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, get_origin, overload

import msgspec
from typing_extensions import TypeVar

from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core import event_match as matching
from edda.core.channels import event_type, is_message_body, unpack_message
from edda.core.exceptions import decode_failure
from edda.core.logs import hides
from edda.core.model import EntryKind
from edda.core.options import hide_unknown, refuse_unknown
from edda.core.redact import REDACTED
from edda.core.validation import ValidationFailure, validate
from edda.errors import ArgumentError, EventTimeoutError, EventValidationError, NonDeterminismError

from .client import current_app
from .context import WorkflowContext, as_microseconds, execution_of, seconds_to_microseconds

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.core.model import Entry

    from .workflow import Workflow

D = TypeVar("D", default=Any)
M = TypeVar("M")
T = TypeVar("T")

Since = datetime | Literal["now"] | None
OnInvalid = Literal["skip", "raise"]
Check = Callable[[bytes], EventValidationError | None]
_LONGEST_TYPE = 255
_REQUIRED: Any = Parameter.empty
"""`inspect` shows the parameter as required; a call that left out the context gets as far as being told so."""
_OPTIONS = ("timeout_seconds", "model", "event_id", "match", "since", "on_invalid")


@dataclass(frozen=True)
class ReceivedEvent(Generic[D]):
    """An event as a workflow gets it. `time` is the sender's own text."""

    data: D
    type: str
    source: str
    id: str
    time: str | None = None
    datacontenttype: str | None = None
    subject: str | None = None
    extensions: dict[str, Any] = field(default_factory=dict)


class EventCall(msgspec.Struct, frozen=True):
    """What a driver needs to register a wait. Times are microseconds."""

    type: str
    match: Mapping[str, Any]
    since: int | Literal["now"] | None
    is_named: bool = False
    """By its author, who may give the same name again."""

    check: Check | None = None
    """What is wrong with the stored event for this wait. An event that it objects to does not end the wait."""

    floor: None = None
    once: bool = False

    @property
    def shape(self) -> str:
        return matching.match_paths(self.match)

    def key(self, run_id: str, *, own: bool = False) -> bytes:
        return matching.wait_key(self.type, self.match, run_id if own else None)

    def describe(self, *, values: bool = True) -> str:
        if values or not self.match:  # stored and searched as the run's reason, and part of errors: without secrets
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
    """Wait, durably, for the next event of a type, also for one that came since the run was started.

    `match` compares data by path and attributes by name: `{"order.id": "A-17", "@subject": "x"}`. `event_id` names
    the step. An event that does not fit `model` is recorded as rejected and the wait goes on; with
    `on_invalid="raise"` it ends the wait with an EventValidationError.
    """
    if unknown:
        refuse_unknown("wait_event()", unknown, _OPTIONS)
    execution, codec = execution_of(ctx, "wait_event(ctx, event_type)"), ctx.codec
    _check_type(event_type)
    check_on_invalid("wait_event", on_invalid)
    wanted = matching.parse_match(match)
    matching.match_paths(wanted)
    if model is not None and (client := current_app.get()) is not None:
        client.register_event_schema(ctx.workflow_name, event_type, model)
    may_raise = model is not None and on_invalid == "raise"

    def read(body: bytes) -> Any:
        event = stored_event(codec, body)
        return event if may_raise else to_received_event(event, model)

    check = None if model is None or may_raise else partial(find_misfit, read)
    call = EventCall(event_type, wanted, _since(since), event_id is not None, check)
    due = None
    if timeout_seconds is not None:
        due = execution.now + seconds_to_microseconds(timeout_seconds, "wait_event(timeout_seconds=)")

    wait = execution.call(
        EntryKind.EVENT,
        event_type,
        codec.encode(wanted),
        decode=lambda entry: _outcome(codec, entry, call, timeout_seconds, read),
        call=call,
        due=due,
        id=event_id,
        label=event_type.replace("/", "."),
    )
    return _convert(wait, model) if may_raise else wait


hide_unknown(wait_event)


async def _convert(wait: Coroutine[Any, Any, CloudEvent], model: Any) -> ReceivedEvent[Any]:
    """In the workflow's own code, which may catch what this raises."""
    return to_received_event(await wait, model)


def check_on_invalid(verb: str, on_invalid: str) -> None:
    if on_invalid not in ("skip", "raise"):
        raise ValueError(f'{verb}(on_invalid={on_invalid!r}): expected "skip" or "raise"')


def find_misfit(read: Callable[[bytes], object], body: bytes) -> EventValidationError | None:
    """What is wrong with the data that `read` makes a model of.

    None for a model that is broken itself: the data is not to blame, and the run is parked when it comes to it.
    """
    from pydantic.errors import PydanticUserError  # only waits with a model pay for it

    try:
        read(body)
    except EventValidationError as error:
        return error
    except PydanticUserError:
        return None
    except Exception as error:  # the model's validators are the user's code: data that they fail at does not fit
        return EventValidationError(f"the model raised {type(error).__qualname__}, which is not a ValueError")
    return None


def accepted(entry: Entry, read: Callable[[bytes], T]) -> T:
    """What the history says was accepted. On replay the model of today's code may be another: then the run is parked,
    for neither may the code see an error that it did not see before, nor may the data be passed over now."""
    try:
        return read(entry.value)
    except EventValidationError as error:
        raise NonDeterminismError(
            f"step {entry.step!r} accepted its data when it came, and the model does not accept it now: {error}\n"
            "The model changed while the run was under way, or its validators depend on more than the data: let it "
            "accept what was accepted, and the run goes on."
        ) from None


def to_received_event(event: CloudEvent, model: Any = None) -> ReceivedEvent[Any]:
    data = json_format.value_of(event)
    if model is not None:
        data = _validate(event, data, model)
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
    """Of an event, or of the messages of a channel."""
    data = codec.decrypt(body)
    if is_message_body(data):
        return event_type(unpack_message(codec, body).channel)
    return json_format.parse_stored(data).type


def _validate(event: CloudEvent, data: Any, model: Any) -> Any:
    raw = bytes(event.data) if isinstance(event.data, msgspec.Raw) else None
    try:
        return validate(data, raw, model)
    except ValidationFailure as misfit:
        name = getattr(model, "__name__", None) or repr(model)
        fields = "\n".join(f"  {path}: {message}" for path, message in misfit.errors)
        raise EventValidationError(
            f"event {event.id!r} of type {event.type} from {event.source} does not fit {name}:\n{fields}{_kind(event)}"
        ) from None


def _kind(event: CloudEvent) -> str:
    """A sender that posts a form, or text, sends no JSON that a model could read."""
    if event.data is None or isinstance(event.data, msgspec.Raw):
        return ""
    return f"\n  its data came as {event.datacontenttype or 'bytes'}, not as JSON: send it with application/json"


def _outcome(
    codec: Codec, entry: Entry, call: EventCall, timeout: float | timedelta | None, read: Callable[[bytes], Any]
) -> Any:
    if entry.ok:
        return accepted(entry, read)
    if entry.value:
        return decode_failure(codec, entry.value)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return EventTimeoutError(f"no event came within {seconds:g} seconds: {call.describe()}")


def _check_type(event_type: str) -> None:
    if not isinstance(event_type, str) or not event_type or len(event_type) > _LONGEST_TYPE:
        raise ValueError(f"wait_event(event_type={event_type!r}): expected a text of 1 to {_LONGEST_TYPE} characters")


def _since(since: Since) -> int | Literal["now"] | None:
    if since is None or since == "now":
        return cast(Literal["now"] | None, since)
    if not isinstance(since, datetime):
        raise TypeError(f'wait_event(since={since!r}): expected None, "now" or an aware datetime')
    return as_microseconds(since)


# Starting by event


def event_arguments(workflow: Workflow[Any, Any], event: CloudEvent) -> dict[str, Any]:
    """What a workflow that is started by this event is called with.

    A parameter annotated `ReceivedEvent` gets the whole event. Else an object's members are the arguments, and
    those that are no parameter are left out, as a sender may know more than we do; anything else is the only argument.
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
        f"{workflow.name}() takes {len(parameters)} arguments, so an event that starts it needs an object with them as "
        "its data"
    )
