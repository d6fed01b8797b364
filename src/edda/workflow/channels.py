"""Channels between runs: subscribe, receive, publish, send_to.

A message is stored in the same commit as the outcome of the step that publishes it. A received message is recorded in
the history like an event; the run's cursor in a channel is computed from its history.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
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
from edda.core.model import EntryKind, StagedEvent, StagedKind
from edda.core.states import ENDED
from edda.errors import (
    ChannelError,
    InstanceNotFoundError,
    MessageTimeoutError,
    NotInWorkflowError,
)

from .activity import inline_step
from .client import current_context, get_client, running_context
from .context import ActivityContext, RunContext, WorkflowContext, as_datetime, seconds_to_microseconds
from .events import Check, OnInvalid, check_on_invalid, fit_model, issue_wait

if TYPE_CHECKING:
    from edda.core.codec import Codec

    from .client import Client

D = TypeVar("D", default=Any)
M = TypeVar("M")

Mode = Literal["broadcast", "competing", "direct"]


@dataclass(frozen=True)
class ChannelMessage(Generic[D]):
    """A received message. `published_at` is an aware datetime in UTC."""

    id: str
    channel: str
    data: D
    metadata: dict[str, Any] = field(default_factory=dict)
    published_at: datetime | None = None


class Subscription(Struct, frozen=True):
    mode: ChannelMode
    cursor: int | None = None
    """In broadcast mode: only messages with a higher number are received."""


def carried_subscriptions(codec: Codec, value: bytes) -> dict[str, Subscription]:
    """The subscriptions of the generation before, which the first entry of a generation records."""
    _, _, subscriptions, _ = codec.decode(value)
    return {channel: Subscription(ChannelMode(mode), cursor) for channel, (mode, cursor) in subscriptions.items()}


class MessageCall(Struct, frozen=True):
    """What the engine needs to register a wait for a message."""

    channel: str
    mode: ChannelMode
    cursor: int | None
    is_named: bool = False
    check: Check | None = None
    """Returns why a stored message does not fit the model; such a message is recorded as rejected, and the wait
    continues."""
    since: None = None
    match_paths: None = None
    """A message is found by the keys of its channel, so no match paths have to be indexed."""

    @property
    def type(self) -> str:
        return event_type(self.channel)

    @property
    def exclusive(self) -> bool:
        return self.mode is ChannelMode.COMPETING

    def parse(self, codec: Codec, body: bytes) -> Message:
        return unpack_message(codec, body)

    def convert(self, message: Message, model: Any) -> ChannelMessage[Any]:
        return _as_received(message, model)

    def timeout_error(self, seconds: float | None) -> MessageTimeoutError:
        return _timeout_error(self.channel, seconds)

    def key(self, run_id: str, *, own: bool = False) -> bytes:
        return channel_key(self.channel, self.mode, run_id)

    def describe(self, *, values: bool = True) -> str:
        return f"a message on {self.channel} ({self.mode})"


class Publisher(Protocol):
    """Implemented by EddaApp."""

    @property
    def client(self) -> Client: ...


# Receiving


def subscribe(ctx: WorkflowContext, channel: str, mode: Mode = "broadcast") -> Coroutine[Any, Any, None]:
    """Subscribe the run to a channel, until it ends or unsubscribes; `ctx.recur()` keeps subscriptions.

    Args:
        channel: Name of the channel, 1 to 200 characters.
        mode: "broadcast" (default): receive every message that is published from now on. "competing": each message
            goes to one of the competing subscribers. "direct": receive what is sent to this run with `send_to`.
    """
    check_channel(channel)
    return _subscribe(_run_context(ctx, "subscribe"), channel, check_mode(mode))


async def _subscribe(ctx: RunContext, channel: str, mode: ChannelMode) -> None:
    if _is_subscribed(ctx, channel, mode):
        return
    cursor = None
    if mode is ChannelMode.BROADCAST:
        cursor = await inline_step(ctx, "subscribe", _newest, (channel,), None)
    if not _is_subscribed(ctx, channel, mode):  # another task may have subscribed: its earlier cursor must be kept
        ctx.subscriptions[channel] = Subscription(mode, cursor)


def _is_subscribed(ctx: RunContext, channel: str, mode: ChannelMode) -> bool:
    known = ctx.subscriptions.get(channel)
    if known is not None and known.mode is not mode:
        raise ChannelError(
            f"subscribe({channel!r}, {mode.value!r}): this run is subscribed as {known.mode.value!r}; unsubscribe first"
        )
    return known is not None


async def _newest(_channel: str) -> int:
    return await get_client().last_event()


def unsubscribe(ctx: WorkflowContext, channel: str) -> Coroutine[Any, Any, None]:
    """End the run's subscription to a channel; without one it does nothing."""
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
    """Wait durably for the next message of a channel that the run is subscribed to.

    In an activity it takes the next message of a competing channel in the activity's transaction: if the activity
    fails, another receiver gets the message. There it waits only with `timeout_seconds`, and a message that does not
    fit `model` always raises.

    Args:
        channel: Name of the channel.
        timeout_seconds: Seconds, or a timedelta, after which it raises `MessageTimeoutError`. Default None: no limit.
        message_id: Id of the step. Default None: generated.
        model: Type that the data is validated against and converted to. Default None: plain values.
        on_invalid: "skip" (default): a message that does not fit `model` is recorded as rejected, and the wait
            continues. "raise": it ends the wait with an `EventValidationError`.
    """
    check_channel(channel)
    may_raise = check_on_invalid("receive", on_invalid)
    if isinstance(ctx, ActivityContext):
        return _receive_in_activity(ctx, channel, timeout_seconds, model)
    ctx = _run_context(ctx, "receive")
    call = MessageCall(channel, *_mode_and_cursor(ctx, channel), message_id is not None)
    return issue_wait(
        *(ctx, EntryKind.MESSAGE, channel, str(call.mode), call, timeout_seconds, message_id, model),
        may_raise=may_raise,
    )


def _mode_and_cursor(ctx: RunContext, channel: str) -> tuple[ChannelMode, int | None]:
    known = ctx.subscriptions.get(channel)
    if known is not None:
        return known.mode, known.cursor
    if channel == DIRECT:
        return ChannelMode.DIRECT, None
    raise ChannelError(f"receive({channel!r}): this run is not subscribed; call subscribe(ctx, {channel!r}) first")


def _as_received(message: Message, model: Any) -> ChannelMessage[Any]:
    data = message.data
    if model is not None:
        data = fit_model(model, data, None, f"message {message.id!r} on {message.channel}")
    return ChannelMessage(message.id, message.channel, data, message.metadata, as_datetime(message.published_at))


def _timeout_error(channel: str, seconds: float | None) -> MessageTimeoutError:
    return MessageTimeoutError(f"no message came on {channel}{f' within {seconds:g} seconds' if seconds else ''}")


async def _receive_in_activity(
    ctx: ActivityContext, channel: str, timeout: float | timedelta | None, model: Any
) -> ChannelMessage[Any]:
    wait = 0 if timeout is None else seconds_to_microseconds(timeout, "receive(timeout_seconds=)")
    body = await ctx.work.receive_message(channel_key(channel, ChannelMode.COMPETING), wait)
    if body is None:
        raise _timeout_error(channel, timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
    return _as_received(unpack_message(ctx.codec, body), model)


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
    """Publish a message on a channel; returns its id.

    In a workflow this is a recorded step. In an activity the message is stored in the commit of the activity's outcome.

    Args:
        ctx_or_app: The context of the workflow or activity, or an app; with an app the message is committed when this
            returns.
        channel: Name of the channel, 1 to 200 characters.
        data: Any value that can be stored.
        metadata: Further values for the receiver. Default None: `{}`.
        target_instance_id: Id of the only run that may receive it. Default None: all subscribers.
        session: With an app: SQLAlchemy session in whose transaction the message is stored. Default None.
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
        raise ValueError(
            "publish(session=...) is for code outside workflows: inside, the message commits with its step"
        )


async def _publish(channel: str, data: Any, metadata: dict[str, Any], target: str | None) -> str:
    """Runs in an activity, or in the inline step of a workflow."""
    ctx = current_context.get()
    assert isinstance(ctx, ActivityContext)
    id = blake2b(ctx.next_effect_id().encode(), digest_size=16).hexdigest()
    message = Message(id, channel, target, data, metadata, ctx.microseconds)
    ctx.work.dispatch(StagedEvent(StagedKind.MESSAGE, pack_message(ctx.codec, message)))
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
    """Send a message to one run; False if no run has this id, or if it has ended.

    Args:
        ctx: The context of the workflow or activity, or an app.
        instance_id: Id of the receiving run.
        data: Any value that can be stored.
        channel: Channel that the run receives from. Default: the one of `receive` without a subscription.
        metadata: Further values for the receiver. Default None: `{}`.
    """
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


def _client_of(app: WorkflowContext | Publisher, function: str) -> Client:
    if running_context() is not None:
        raise NotInWorkflowError(
            f"{function}() through an app in the code of a workflow would be repeated by every replay: pass ctx instead"
        )
    if isinstance(app, WorkflowContext) or not hasattr(app, "client"):
        raise TypeError(f"{function}(): expected the context of a workflow or an app, got {app!r}")
    return app.client


def _run_context(ctx: WorkflowContext, function: str) -> RunContext:
    if not isinstance(ctx, RunContext):
        raise NotInWorkflowError(f"{function}() works in the code of a workflow only, not in an activity")
    return ctx
