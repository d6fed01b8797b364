"""Waiting for events, and sending them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, get_origin, overload

import msgspec
from typing_extensions import TypeVar

from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core import match as matching
from edda.core.channels import holds_message, log_type, unpack_message
from edda.core.failure import decode_failure
from edda.core.model import EntryKind
from edda.core.validation import Misfit, validate
from edda.errors import ArgumentError, EventTimeoutError, EventValidationError

from .context import WorkflowContext, as_microseconds, seconds_to_microseconds
from .current import running

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.core.model import Entry

    from .workflow import Workflow

D = TypeVar("D", default=Any)
M = TypeVar("M")

Since = datetime | Literal["now"] | None
_LONGEST_TYPE = 255


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

    floor: None = None
    once: bool = False

    @property
    def shape(self) -> str:
        return matching.shape(self.match)

    def key(self, run_id: str, *, own: bool = False) -> bytes:
        return matching.wait_key(self.type, self.match, run_id if own else None)

    def describe(self, *, values: bool = True) -> str:
        if values or not self.match:
            return matching.describe(self.type, self.match)
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
    on_invalid: Literal["raise", "skip"] = "raise",
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
    on_invalid: Literal["raise", "skip"] = "raise",
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
    on_invalid: Literal["raise", "skip"] = "raise",
) -> Coroutine[Any, Any, ReceivedEvent[M]]: ...


def wait_event(
    ctx: WorkflowContext,
    event_type: str,
    timeout_seconds: float | timedelta | None = None,
    model: Any = None,
    event_id: str | None = None,
    *,
    match: Mapping[str, Any] | None = None,
    since: Since = None,
    on_invalid: Literal["raise", "skip"] = "raise",
) -> Coroutine[Any, Any, ReceivedEvent[Any]]:
    """Wait, durably, for the next event of a type, also for one that came since the run was started.

    `match` compares data by path and attributes by name: `{"order.id": "A-17", "@subject": "x"}`. `event_id` names
    the step. An event that does not fit `model` raises, or is passed over with `on_invalid="skip"`.
    """
    _check_type(event_type)
    if on_invalid not in ("raise", "skip"):
        raise ValueError(f'wait_event(on_invalid={on_invalid!r}): expected "raise" or "skip"')
    execution, codec = ctx.execution, ctx.codec
    wanted = matching.normalize(match)
    matching.shape(wanted)
    if model is not None and (client := running.get()) is not None:
        client.tell_form(ctx.workflow_name, event_type, model)
    call = EventCall(event_type, wanted, _since(since), event_id is not None)
    due = None
    if timeout_seconds is not None:
        due = execution.now + seconds_to_microseconds(timeout_seconds, "wait_event(timeout_seconds=)")

    def ask() -> Coroutine[Any, Any, CloudEvent]:
        return execution.call(
            EntryKind.EVENT,
            event_type,
            codec.encode(wanted),
            decode=lambda entry: _outcome(codec, entry, call, timeout_seconds),
            call=call,
            due=due,
            id=event_id,
            label=event_type.replace("/", "."),
        )

    return _receive(ctx, ask(), ask if on_invalid == "skip" else None, model)


async def _receive(
    ctx: WorkflowContext,
    wait: Coroutine[Any, Any, CloudEvent],
    ask_again: Callable[[], Coroutine[Any, Any, CloudEvent]] | None,
    model: Any,
) -> ReceivedEvent[Any]:
    while True:
        event = await wait
        try:
            return received(event, model)
        except EventValidationError as error:
            if ask_again is None:
                raise
            ctx.logger.warning("passed over: %s", error)
            wait = ask_again()


def received(event: CloudEvent, model: Any = None) -> ReceivedEvent[Any]:
    data = json_format.value_of(event)
    if model is not None:
        data = _fit(event, data, model)
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
    return json_format.parse_stored(codec.unseal(body))


def stored_type(codec: Codec, body: bytes) -> str:
    """Of an event, or of the messages of a channel."""
    data = codec.unseal(body)
    if holds_message(data):
        return log_type(unpack_message(codec, body).channel)
    return json_format.parse_stored(data).type


def _fit(event: CloudEvent, data: Any, model: Any) -> Any:
    raw = bytes(event.data) if isinstance(event.data, msgspec.Raw) else None
    try:
        return validate(data, raw, model)
    except Misfit as misfit:
        name = getattr(model, "__name__", None) or repr(model)
        fields = "\n".join(f"  {path}: {message}" for path, message in misfit.errors)
        raise EventValidationError(
            f"event {event.id!r} of type {event.type} from {event.source} does not fit {name}:\n{fields}"
        ) from None


def _outcome(codec: Codec, entry: Entry, call: EventCall, timeout: float | timedelta | None) -> Any:
    if entry.ok:
        return json_format.parse_stored(codec.unseal(entry.value))
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


def arguments(workflow: Workflow[Any, Any], event: CloudEvent) -> dict[str, Any]:
    """What a workflow that is started by this event is called with.

    A parameter annotated `ReceivedEvent` gets the whole event. Else an object's members are the arguments, and
    those that are no parameter are left out, as a sender may know more than we do; anything else is the only argument.
    """
    parameters = workflow.signature.parameters
    if len(parameters) == 1:
        ((name, hint),) = parameters.items()
        if hint is ReceivedEvent or get_origin(hint) is ReceivedEvent:
            return {name: received(event, *getattr(hint, "__args__", ()))}
    data = json_format.value_of(event)
    if isinstance(data, dict) and (len(parameters) != 1 or not parameters.keys().isdisjoint(data)):
        return data if workflow.signature.takes_any else {name: data[name] for name in parameters if name in data}
    if len(parameters) == 1:
        return {next(iter(parameters)): data}
    raise ArgumentError(
        f"{workflow.name}() takes {len(parameters)} arguments, so an event that starts it needs an object with them as "
        "its data"
    )
