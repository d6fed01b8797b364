"""Channels: how a message finds those who receive it, and how it is kept.

A message is kept in the log of events, where receivers ask for it by key: one key for all who get every message, one
for those who share them, and one for each run that is written to. Events of the outside world have other keys, and
their sources are never empty, so the two cannot be taken for each other.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from edda.errors import PayloadError

from .codec import Codec
from .model import Event, EventKey, RunId

LONGEST_CHANNEL = 200
DIRECT = "__direct__"
"""The channel of `send_to`, if it is not told another one."""

_SOURCE = ""
_MARK = "message"
_LOG = "channel/"


class ChannelMode(StrEnum):
    BROADCAST = "broadcast"
    """Every subscriber gets every message."""
    COMPETING = "competing"
    """Every message goes to one of the subscribers."""
    DIRECT = "direct"
    """Only what is sent to this run."""


class Message(Struct, frozen=True):
    id: str
    channel: str
    target: str | None
    data: Any
    metadata: dict[str, Any]
    published_at: int
    offer: int = 0
    """How often it was given back by a receiver that did not take it after all."""


def check_channel(channel: str) -> str:
    if not isinstance(channel, str) or not 0 < len(channel) <= LONGEST_CHANNEL or not is_storable_text(channel):
        raise ValueError(f"channel {channel!r}: expected a text of 1 to {LONGEST_CHANNEL} characters")
    return channel


def is_storable_text(text: str) -> bool:
    """By every database."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def check_mode(mode: str) -> ChannelMode:
    try:
        return ChannelMode(mode)
    except ValueError:
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(ChannelMode)}") from None


def channel_key(channel: str, mode: ChannelMode, run_id: str = "") -> bytes:
    """Under which a subscriber asks for messages; the run counts only if it is written to directly."""
    digest = blake2b(digest_size=16, person=b"edda-channel")
    for part in (mode, channel, run_id if mode is ChannelMode.DIRECT else ""):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.digest()


def message_keys(message: Message) -> tuple[EventKey, ...]:
    if message.target is not None:
        key = channel_key(message.channel, ChannelMode.DIRECT, message.target)
        return (EventKey(key, key),)
    shared = channel_key(message.channel, ChannelMode.COMPETING)
    if message.offer:  # who gets every message has it already
        return (EventKey(shared, shared, once=True),)
    everybody = channel_key(message.channel, ChannelMode.BROADCAST)
    return (EventKey(everybody, everybody), EventKey(shared, shared, once=True))


def message_event(message: Message, body: bytes) -> Event:
    id = f"{message.id}~{message.offer}" if message.offer else message.id
    target = None if message.target is None else RunId(message.target)
    return Event(_SOURCE, id, event_type(message.channel), target, body)


def event_type(channel: str) -> str:
    """The type that its messages have in the log of events."""
    return _LOG + channel


def is_message(event: Event) -> bool:
    """Whether it is a message, not an event of the outside world."""
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
    """As it is offered to the others."""
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
    """Whether a body of the log, unsealed, is a message."""
    return data.startswith(b'["message",')
