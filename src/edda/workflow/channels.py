"""Workflows that talk: subscribe, receive, publish, send_to.

What a run publishes goes out with the commit of the step that publishes it. What it receives is recorded like any
other wait; its place in a channel follows from its history.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, overload

from msgspec import Struct
from typing_extensions import TypeVar

from edda.core.channels import (
    DIRECT,
    ChannelMode,
    Message,
    channel_key,
    check_channel,
    check_mode,
    event_type,
    pack_message,
    unpack_message,
)
from edda.core.exceptions import decode_failure
from edda.core.model import EntryKind, StagedEvent, StagedKind
from edda.core.states import ENDED
from edda.core.validation import ValidationFailure, validate
from edda.errors import (
    ChannelError,
    EventValidationError,
    InstanceNotFoundError,
    MessageTimeoutError,
    NotInWorkflowError,
)

from .activity import inline_step
from .children import running_context
from .client import current_app, current_context, get_client
from .context import ActivityContext, RunContext, WorkflowContext, as_datetime, seconds_to_microseconds
from .events import Check, OnInvalid, accepted, check_on_invalid, find_misfit

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.core.model import Entry

    from .client import Client

D = TypeVar("D", default=Any)
M = TypeVar("M")

Mode = Literal["broadcast", "competing", "direct"]


@dataclass(frozen=True)
class ChannelMessage(Generic[D]):
    """A message as a workflow gets it."""

    id: str
    channel: str
    data: D
    metadata: dict[str, Any] = field(default_factory=dict)
    published_at: datetime | None = None


class Subscription(Struct, frozen=True):
    mode: ChannelMode
    floor: int | None = None
    """Of a broadcast: only messages with a higher number."""


def carried_subscriptions(codec: Codec, value: bytes) -> dict[str, Subscription]:
    """What the first entry of a generation says of the one before."""
    _, _, places, _ = codec.decode(value)
    return {channel: Subscription(ChannelMode(mode), floor) for channel, (mode, floor) in places.items()}


class MessageCall(Struct, frozen=True):
    """What a driver needs to register a wait for a message."""

    channel: str
    mode: ChannelMode
    floor: int | None
    is_named: bool = False
    check: Check | None = None
    """What is wrong with the stored message for this wait. A message that it objects to does not end the wait."""
    since: None = None
    shape: None = None
    """Every message has the keys of its channel, so there is nothing to learn."""

    @property
    def type(self) -> str:
        return event_type(self.channel)

    @property
    def once(self) -> bool:
        return self.mode is ChannelMode.COMPETING

    def key(self, run_id: str, *, own: bool = False) -> bytes:
        return channel_key(self.channel, self.mode, run_id)

    def describe(self, *, values: bool = True) -> str:
        return f"a message on {self.channel} ({self.mode})"


class Publisher(Protocol):
    """An app."""

    @property
    def engine(self) -> Client: ...


# Receiving


def subscribe(ctx: WorkflowContext, channel: str, mode: Mode = "broadcast") -> Coroutine[Any, Any, None]:
    """Take part in a channel until the run ends or unsubscribes, also over `ctx.recur()`. Once is enough.

    `broadcast`: every message that is published from now on. `competing`: each message goes to one of those who
    compete for it. `direct`: what is sent to this run with `send_to`.
    """
    check_channel(channel)
    return _subscribe(_run_context(ctx, "subscribe"), channel, check_mode(mode))


async def _subscribe(ctx: RunContext, channel: str, mode: ChannelMode) -> None:
    if _is_subscribed(ctx, channel, mode):
        return
    floor = None
    if mode is ChannelMode.BROADCAST:
        floor = await inline_step(ctx, "subscribe", _newest, (channel,), None)
    if not _is_subscribed(ctx, channel, mode):  # by another branch meanwhile: what came since then is not passed over
        ctx.subscriptions[channel] = Subscription(mode, floor)


def _is_subscribed(ctx: RunContext, channel: str, mode: ChannelMode) -> bool:
    known = ctx.subscriptions.get(channel)
    if known is not None and known.mode is not mode:
        raise ChannelError(
            f"subscribe({channel!r}, {mode.value!r}): this run is subscribed to it as {known.mode.value!r}; "
            "unsubscribe first"
        )
    return known is not None


async def _newest(_channel: str) -> int:
    return await get_client().last_event()


def unsubscribe(ctx: WorkflowContext, channel: str) -> Coroutine[Any, Any, None]:
    """Take part in a channel no longer."""
    check_channel(channel)
    return _unsubscribe(_run_context(ctx, "unsubscribe"), channel)


async def _unsubscribe(ctx: RunContext, channel: str) -> None:
    ctx.subscriptions.pop(channel, None)


@overload
def receive(
    ctx: WorkflowContext,
    channel: str,
    timeout_seconds: float | timedelta | None = None,
    message_id: str | None = None,
    *,
    model: None = None,
    on_invalid: OnInvalid = "skip",
) -> Coroutine[Any, Any, ChannelMessage[Any]]: ...


@overload
def receive(
    ctx: WorkflowContext,
    channel: str,
    timeout_seconds: float | timedelta | None = None,
    message_id: str | None = None,
    *,
    model: type[M],
    on_invalid: OnInvalid = "skip",
) -> Coroutine[Any, Any, ChannelMessage[M]]: ...


def receive(
    ctx: WorkflowContext,
    channel: str,
    timeout_seconds: float | timedelta | None = None,
    message_id: str | None = None,
    *,
    model: Any = None,
    on_invalid: OnInvalid = "skip",
) -> Coroutine[Any, Any, ChannelMessage[Any]]:
    """Wait, durably, for the next message; `message_id` names the step. `MessageTimeoutError` if none came in time.

    A message that does not fit `model` is recorded as rejected and the wait goes on; with `on_invalid="raise"` it ends
    the wait with an EventValidationError.

    In an activity it takes the next message of a competing channel in the activity's own transaction: if the activity
    fails, the message goes to somebody else. There it waits only if it is given a timeout, and a message that does not
    fit always raises.
    """
    check_channel(channel)
    check_on_invalid("receive", on_invalid)
    if isinstance(ctx, ActivityContext):
        return _take(ctx, channel, timeout_seconds, model)
    ctx = _run_context(ctx, "receive")
    execution, codec = ctx.execution, ctx.codec
    may_raise = model is not None and on_invalid == "raise"

    def read(body: bytes) -> Any:
        message = unpack_message(codec, body)
        return message if may_raise else _as_received(message, model)

    check = None if model is None or may_raise else partial(find_misfit, read)
    call = MessageCall(channel, *_place_of(ctx, channel), message_id is not None, check)
    if model is not None and (client := current_app.get()) is not None:
        client.register_event_schema(ctx.workflow_name, call.type, model)
    due = None
    if timeout_seconds is not None:
        due = execution.now + seconds_to_microseconds(timeout_seconds, "receive(timeout_seconds=)")
    wait = execution.call(
        EntryKind.MESSAGE,
        channel,
        codec.encode(str(call.mode)),
        decode=lambda entry: _outcome(codec, entry, channel, timeout_seconds, read),
        call=call,
        due=due,
        id=message_id,
        label=channel.replace("/", "."),
    )
    return _convert(wait, model) if may_raise else wait


def _place_of(ctx: RunContext, channel: str) -> tuple[ChannelMode, int | None]:
    known = ctx.subscriptions.get(channel)
    if known is not None:
        return known.mode, known.floor
    if channel == DIRECT:
        return ChannelMode.DIRECT, None
    raise ChannelError(f"receive({channel!r}): this run is not subscribed to it; subscribe(ctx, {channel!r}) first")


async def _convert(wait: Coroutine[Any, Any, Message], model: Any) -> ChannelMessage[Any]:
    """In the workflow's own code, which may catch what this raises."""
    return _as_received(await wait, model)


def _as_received(message: Message, model: Any) -> ChannelMessage[Any]:
    data = message.data if model is None else _fit(message, model)
    return ChannelMessage(message.id, message.channel, data, message.metadata, as_datetime(message.published_at))


def _fit(message: Message, model: Any) -> Any:
    try:
        return validate(message.data, None, model)
    except ValidationFailure as misfit:
        name = getattr(model, "__name__", None) or repr(model)
        fields = "\n".join(f"  {path}: {reason}" for path, reason in misfit.errors)
        raise EventValidationError(
            f"message {message.id!r} on {message.channel} does not fit {name}:\n{fields}"
        ) from None


def _outcome(
    codec: Codec, entry: Entry, channel: str, timeout: float | timedelta | None, read: Callable[[bytes], Any]
) -> Any:
    if entry.ok:
        return accepted(entry, read)
    if entry.value:
        return decode_failure(codec, entry.value)
    return _too_late(channel, timeout)


def _too_late(channel: str, timeout: float | timedelta | None) -> MessageTimeoutError:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    within = "" if not seconds else f" within {seconds:g} seconds"
    return MessageTimeoutError(f"no message came on {channel}{within}")


async def _take(
    ctx: ActivityContext, channel: str, timeout: float | timedelta | None, model: Any
) -> ChannelMessage[Any]:
    patience = 0 if timeout is None else seconds_to_microseconds(timeout, "receive(timeout_seconds=)")
    body = await ctx.work.receive_message(channel_key(channel, ChannelMode.COMPETING), patience)
    if body is None:
        raise _too_late(channel, timeout)
    return _as_received(unpack_message(ctx.values, body), model)


# Publishing


def publish(
    ctx_or_app: WorkflowContext | Publisher,
    channel: str,
    data: Any,
    metadata: Mapping[str, Any] | None = None,
    *,
    target_instance_id: str | None = None,
    session: Any = None,
) -> Coroutine[Any, Any, str]:
    """Put a message on a channel; returns its id.

    Through an app it is stored when this returns; with a `session` it is stored when that transaction commits. In an
    activity it goes out if and when the activity's outcome is recorded, in a workflow's own code it is a recorded step.
    """
    check_channel(channel)
    args = (channel, data, dict(metadata or {}), target_instance_id)
    if isinstance(ctx_or_app, RunContext):
        _refuse_session(session)
        return inline_step(ctx_or_app, "publish", _publish, args, None)
    if isinstance(ctx_or_app, ActivityContext):
        _refuse_session(session)
        return _publish(*args)
    return _publish_through(_client_of(ctx_or_app, "publish"), args, session)


def _refuse_session(session: Any) -> None:
    if session is not None:
        raise ValueError("publish(session=...) is for code outside of workflows: inside, it belongs to its step anyway")


async def _publish(channel: str, data: Any, metadata: dict[str, Any], target: str | None) -> str:
    """In the context of an activity, or of a step of the workflow's own."""
    ctx = current_context.get()
    assert isinstance(ctx, ActivityContext)
    id = blake2b(ctx.next_effect_id().encode(), digest_size=16).hexdigest()
    message = Message(id, channel, target, data, metadata, ctx.microseconds)
    ctx.work.dispatch(StagedEvent(StagedKind.MESSAGE, pack_message(ctx.values, message)))
    return id


async def _publish_through(client: Client, args: tuple[str, Any, dict[str, Any], str | None], session: Any) -> str:
    channel, data, metadata, target = args
    message = Message(client.new_id(), channel, target, data, metadata, client.microseconds)
    await client.publish(message, session)
    return message.id


def send_to(
    ctx: WorkflowContext | Publisher,
    instance_id: str,
    data: Any,
    channel: str = DIRECT,
    metadata: Mapping[str, Any] | None = None,
) -> Coroutine[Any, Any, bool]:
    """Write to one run; False if there is none with this id, or it has ended."""
    check_channel(channel)
    args = (instance_id, data, channel, dict(metadata or {}))
    if isinstance(ctx, RunContext):
        return inline_step(ctx, "send_to", _send_from_step, args, None)
    if isinstance(ctx, ActivityContext):
        return _send_from_step(*args)
    return _send_through(_client_of(ctx, "send_to"), *args)


async def _send_from_step(instance_id: str, data: Any, channel: str, metadata: dict[str, Any]) -> bool:
    if not await _is_open(get_client(), instance_id):
        return False
    await _publish(channel, data, metadata, instance_id)
    return True


async def _send_through(client: Client, instance_id: str, data: Any, channel: str, metadata: dict[str, Any]) -> bool:
    if not await _is_open(client, instance_id):
        return False
    await _publish_through(client, (channel, data, metadata, instance_id), None)
    return True


async def _is_open(client: Client, instance_id: str) -> bool:
    try:
        return (await client.read_run(instance_id)).status not in ENDED
    except InstanceNotFoundError:
        return False


def _client_of(app: WorkflowContext | Publisher, verb: str) -> Client:
    if running_context() is not None:
        raise NotInWorkflowError(
            f"{verb}() through an app in the body of a workflow would happen again at every replay: give it ctx"
        )
    if isinstance(app, WorkflowContext) or not hasattr(app, "engine"):
        raise TypeError(f"{verb}(): expected the context of a workflow or an app, got {app!r}")
    return app.engine


def _run_context(ctx: WorkflowContext, verb: str) -> RunContext:
    if not isinstance(ctx, RunContext):
        raise NotInWorkflowError(f"{verb}() belongs into a workflow's own code, not into an activity")
    return ctx
