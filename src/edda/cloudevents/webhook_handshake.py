"""The handshake of the webhook specification: may this sender send here, and how often?

A sender may ask for a callback to be fetched instead of an answer. That is only read here, never followed:
it would let anybody make this server send requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

ANY = "*"


class Policy(Struct, frozen=True):
    origins: frozenset[str] = frozenset()
    """Who may send, by the name they give themselves; `*` is everybody."""
    rate: int | None = None
    """Requests a minute; None is as many as they like."""


class Handshake(Struct, frozen=True):
    origin: str
    asks_rate: bool
    callback: str | None


def read(headers: Sequence[tuple[bytes, bytes]]) -> Handshake | None:
    """What an OPTIONS request asks for; None if it is no handshake, as a CORS preflight is none."""
    found = {name.lower(): value.strip(b" \t").decode("latin-1") for name, value in headers}
    origin = found.get(b"webhook-request-origin")
    if not origin:
        return None
    return Handshake(origin, b"webhook-request-rate" in found, found.get(b"webhook-request-callback"))


def answer(handshake: Handshake, policy: Policy) -> list[tuple[str, str]]:
    """The headers that give leave; none at all if the sender may not send."""
    origin = _granted(handshake.origin, policy)
    if origin is None:
        return []
    headers = [("Allow", "POST"), ("WebHook-Allowed-Origin", origin)]
    if handshake.asks_rate or policy.rate is not None:
        headers.append(("WebHook-Allowed-Rate", ANY if policy.rate is None else str(policy.rate)))
    return headers


def _granted(origin: str, policy: Policy) -> str | None:
    """Names are compared as DNS does; the answer is the policy's own word, so nothing sent comes back in a header."""
    if ANY in policy.origins:
        return ANY
    return next((allowed for allowed in policy.origins if allowed.lower() == origin.lower()), None)
