"""Messages of channels: their keys in the event log, and how they are stored.

A message is stored in the event log, under one key for broadcast subscribers, one for competing subscribers, or one
for the run that it is sent to. CloudEvents have other keys, and their source is never empty, so that messages and
events cannot be confused.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from edda.errors import PayloadError

from .codec import Codec
from .model import Event, EventKey, RunId

MAX_CHANNEL_LENGTH = 200
DIRECT = "__direct__"
"""The default channel of `send_to`."""

_SOURCE = ""
_MARK = "message"
_TYPE_PREFIX = "channel/"


class ChannelMode(StrEnum):
    BROADCAST = "broadcast"
    """Every subscriber receives every message."""
    COMPETING = "competing"
    """Every message goes to one of the subscribers."""
    DIRECT = "direct"
    """Only messages that are sent to this run."""


class Message(Struct, frozen=True):
    id: str
    channel: str
    target: str | None
    data: Any
    metadata: dict[str, Any]
    published_at: int
    offer: int = 0
    """How often a receiver released it without using it."""


def check_channel(channel: str) -> str:
    if not isinstance(channel, str) or not 0 < len(channel) <= MAX_CHANNEL_LENGTH or not is_storable_text(channel):
        raise ValueError(f"channel {channel!r}: expected a text of 1 to {MAX_CHANNEL_LENGTH} characters")
    return channel


def is_storable_text(text: str) -> bool:
    """Whether all databases can store it: no NUL, no half of a surrogate pair."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def check_mode(mode: str) -> ChannelMode:
    try:
        return ChannelMode(mode)
    except ValueError:
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(ChannelMode)}") from None


def channel_key(channel: str, mode: ChannelMode, run_id: str = "") -> bytes:
    """The key of a subscriber's waits; `run_id` is part of it in direct mode only."""
    digest = blake2b(digest_size=16, person=b"edda-channel")
    for part in (mode, channel, run_id if mode is ChannelMode.DIRECT else ""):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.digest()


def message_keys(message: Message) -> tuple[EventKey, ...]:
    if message.target is not None:
        key = channel_key(message.channel, ChannelMode.DIRECT, message.target)
        return (EventKey(key, key),)
    competing = channel_key(message.channel, ChannelMode.COMPETING)
    if message.offer:  # broadcast subscribers have received it before its redelivery
        return (EventKey(competing, competing, exclusive=True),)
    broadcast = channel_key(message.channel, ChannelMode.BROADCAST)
    return (EventKey(broadcast, broadcast), EventKey(competing, competing, exclusive=True))


def message_event(message: Message, body: bytes) -> Event:
    id = f"{message.id}~{message.offer}" if message.offer else message.id
    target = None if message.target is None else RunId(message.target)
    return Event(_SOURCE, id, event_type(message.channel), target, body)


def event_type(channel: str) -> str:
    """The type of its messages in the event log."""
    return _TYPE_PREFIX + channel


def is_message(event: Event) -> bool:
    """Whether it is a message, not a CloudEvent."""
    return event.source == _SOURCE


def pack_message(codec: Codec, message: Message) -> bytes:
    """Raises `PayloadError` if the data cannot be stored."""
    if not isinstance(message.metadata, dict):
        raise PayloadError(f"metadata: expected a dict, got {type(message.metadata).__name__}")
    parts = [message.id, message.channel, message.target, message.metadata, message.published_at, message.offer]
    return codec.encode([_MARK, *parts, message.data])


def unpack_message(codec: Codec, body: bytes) -> Message:
    _, id, channel, target, metadata, published_at, offer, data = codec.decode(body)
    return Message(id, channel, target, data, metadata, published_at, offer)


def for_redelivery(message: Message) -> Message:
    """The message with a new id in the event log, for the other competing receivers."""
    return Message(
        message.id,
        message.channel,
        message.target,
        message.data,
        message.metadata,
        message.published_at,
        message.offer + 1,
    )


def is_message_body(data: bytes) -> bool:
    """Whether a decrypted body of the event log is a message."""
    return data.startswith(b'["message",')
