"""Webhook signatures: creates and checks those of Standard Webhooks, checks those of GitHub and Stripe.

All are HMAC-SHA256. They differ in their headers, in the bytes that are signed before the body, and in how the key is
derived from the secret. Callers pass the current time.
"""

from __future__ import annotations

import hmac
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from urllib.parse import quote

from msgspec import Struct

TOLERANCE = 300.0
"""Seconds by which the time of a signature may differ from the clock."""
STANDARD = (b"webhook-id", b"webhook-timestamp", b"webhook-signature")
GITHUB = b"x-hub-signature-256"
STRIPE = b"stripe-signature"

_PREFIX = "whsec_"
_SECONDS = re.compile(rb"[0-9]{1,12}")
_DIGEST = re.compile(rb"[0-9a-fA-F]{64}")

Headers = Sequence[tuple[bytes, bytes]]


class SignatureError(Exception):
    """The signature is missing, expired or made with another secret; the text may be sent to the client."""


class SignatureClaim(Struct, frozen=True):
    """The signatures in the headers, for a body that has not been read yet."""

    prefix: bytes
    """Bytes that are signed before the body."""
    signatures: tuple[bytes, ...]
    """One of them must match; a sender that rotates its secret signs with both."""

    def check(self, keys: Sequence[bytes], body: bytes) -> None:
        """Compares all signatures with all keys, so that the time does not reveal which one matches."""
        fits = False
        for key in keys:
            digest = _digest(key, self.prefix, body)
            for signature in self.signatures:
                fits |= hmac.compare_digest(digest, signature)
        if not fits:
            raise SignatureError("the signature does not fit the body, or was made with another secret")


def standard_key(secret: str) -> bytes:
    """The key of a Standard Webhooks secret; errors do not repeat the secret."""
    encoded = secret.removeprefix(_PREFIX)
    try:
        key = a2b_base64(encoded + "=" * (-len(encoded) % 4), strict_mode=True)
    except ValueError:
        key = b""
    if not key or encoded == secret:
        raise ValueError(f"a secret of Standard Webhooks is {_PREFIX} and then base64")
    return key


def plain_key(secret: str) -> bytes:
    """The key of a GitHub or Stripe secret: its bytes. Stripe's also begin with whsec_, but are not base64."""
    return secret.encode()


def sign(secret: str | Sequence[str], id: str, timestamp: int, body: bytes) -> list[tuple[str, str]]:
    """The headers of Standard Webhooks, with one signature for each secret.

    The id is percent-encoded, dots included: it is then valid in a header, and a dot in it cannot be mistaken for the
    dots that separate it from the time and the body.
    """
    safe_id = quote(id, safe="").replace(".", "%2E")
    prefix = f"{safe_id}.{timestamp}.".encode()
    secrets = [secret] if isinstance(secret, str) else secret
    digests = (_digest(standard_key(one), prefix, body) for one in secrets)
    signatures = " ".join(f"v1,{b2a_base64(digest, newline=False).decode()}" for digest in digests)
    values = (safe_id, str(timestamp), signatures)
    return [(name.decode(), value) for name, value in zip(STANDARD, values, strict=True)]


def read_standard(headers: Headers, now: float, tolerance: float = TOLERANCE) -> SignatureClaim:
    id, timestamp, given = (_only(headers, name) for name in STANDARD)
    if not id or b"." in id:
        raise SignatureError("webhook-id must not be empty and must not have dots, which separate the signed parts")
    _check_time(timestamp, now, tolerance)
    entries = (entry.partition(b",") for entry in given.split())
    signatures = tuple(_decode_base64(text) for version, _, text in entries if version == b"v1")
    return _claim(b"%b.%b." % (id, timestamp), signatures)


def read_github(headers: Headers) -> SignatureClaim:
    """GitHub signs the body only, without a time."""
    scheme, _, text = _only(headers, GITHUB).partition(b"=")
    return _claim(b"", (_decode_hex(text),) if scheme == b"sha256" else ())


def read_stripe(headers: Headers, now: float, tolerance: float = TOLERANCE) -> SignatureClaim:
    entries = [entry.strip().partition(b"=") for entry in _only(headers, STRIPE).split(b",")]
    times = [value for name, _, value in entries if name == b"t"]
    if len(times) != 1:
        raise SignatureError("the signature must have one time: t=...")
    _check_time(times[0], now, tolerance)
    return _claim(b"%b." % times[0], tuple(_decode_hex(value) for name, _, value in entries if name == b"v1"))


def _claim(prefix: bytes, signatures: tuple[bytes, ...]) -> SignatureClaim:
    if not any(signatures):
        raise SignatureError("there is no signature of a supported version")
    return SignatureClaim(prefix, signatures)


def _only(headers: Headers, name: bytes) -> bytes:
    found = [value.strip(b" \t") for key, value in headers if key.lower() == name]
    if len(found) != 1:
        raise SignatureError(f"the header {name.decode()} {'came more than once' if found else 'is missing'}")
    return found[0]


def _check_time(timestamp: bytes, now: float, tolerance: float) -> None:
    if not _SECONDS.fullmatch(timestamp):
        raise SignatureError("the time of the signature must be whole seconds since 1970")
    age = now - int(timestamp)
    if abs(age) > tolerance:
        when = "ago" if age > 0 else "from now"
        raise SignatureError(f"it was signed more than {tolerance:g} seconds {when}: too old, or a clock is wrong")


def _digest(key: bytes, prefix: bytes, body: bytes) -> bytes:
    code = hmac.new(key, prefix, "sha256")
    code.update(body)
    return code.digest()


def _decode_base64(text: bytes) -> bytes:
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError:
        return b""  # which matches no digest


def _decode_hex(text: bytes) -> bytes:
    return bytes.fromhex(text.decode()) if _DIGEST.fullmatch(text) else b""
