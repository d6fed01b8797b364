"""Webhooks of other services: whose signature is accepted at which path, and the event that each request becomes.

An event is made of signed content as far as the sender signs it. `Content-Type` and `ce-` headers are not signed: an
attacker who captured a request could send its body again with other headers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from edda.cloudevents import http_binding, json_format, signatures
from edda.cloudevents.data import JSON
from edda.cloudevents.event import CloudEvent, check
from edda.cloudevents.signatures import TOLERANCE, Headers, SignatureClaim
from edda.cloudevents.strict_json import read_raw
from edda.errors import EventError

_RESERVED = ("/_edda", "/cancel")
_SAFE_IN_PATHS = "/-._~!$&'()*+,;=:@"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Webhook(ABC):
    """One sender: the path that it posts to, and its secret, or two secrets while one replaces the other."""

    path: str
    secret: InitVar[str | Sequence[str]]
    keys: tuple[bytes, ...] = field(init=False, repr=False)
    header: ClassVar[bytes]
    """The header that has the signature."""

    def __post_init__(self, secret: str | Sequence[str]) -> None:
        if not isinstance(self.path, str) or not self.path.startswith("/"):
            # The given path is not shown: it may be the secret, if the arguments were swapped.
            raise ValueError(f'{type(self).__name__}(path, secret): expected a path such as "/hooks/billing"')
        _check_path(self.name, self.path)
        secrets = _as_tuple(secret)
        if not secrets:
            raise ValueError(f"{self.name}: a secret is required")
        for one in secrets:
            _check_secret(self.name, one)
        object.__setattr__(self, "keys", tuple(map(self.make_key, secrets)))

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @staticmethod
    def make_key(secret: str) -> bytes:
        return signatures.plain_key(secret)

    @abstractmethod
    def read_claim(self, headers: Headers, now: float) -> SignatureClaim:
        """Raises `SignatureError` if the headers suffice to reject the request."""

    @abstractmethod
    def read_events(self, headers: Headers, body: bytes, max_batch: int) -> tuple[CloudEvent, ...]:
        """The events in a verified body; raises `EventError` if the body holds none."""


@dataclass(frozen=True, slots=True)
class GitHub(Webhook):
    """`github.push` and so on, from `github/owner/repository`. Only the body is signed, without a time."""

    header: ClassVar[bytes] = signatures.GITHUB

    def read_claim(self, headers: Headers, now: float) -> SignatureClaim:
        return signatures.read_github(headers)

    def read_events(self, headers: Headers, body: bytes, max_batch: int) -> tuple[CloudEvent, ...]:
        if _find(headers, b"content-type").startswith("application/x-www-form-urlencoded"):
            raise EventError("set the content type of the webhook at GitHub to application/json", status=415)
        id, kind = _need(headers, b"x-github-delivery"), _need(headers, b"x-github-event")
        data = read_raw(body, "body")
        repository = _decode(data, _GitHubBody, "perhaps a repository with its full_name").repository
        source = "github" if repository is None else f"github/{quote(repository.full_name, safe=_SAFE_IN_PATHS)}"
        return (_event(id, f"github.{kind}", source, data),)


@dataclass(frozen=True, slots=True)
class _Dated(Webhook):
    """The signature includes a time."""

    tolerance: float = TOLERANCE
    """Seconds that the time of a signature may differ from our clock."""

    def __post_init__(self, secret: str | Sequence[str]) -> None:
        Webhook.__post_init__(self, secret)
        if not self.tolerance > 0:
            raise ValueError(f"{self.name}: tolerance={self.tolerance!r}: expected more than 0")


@dataclass(frozen=True, slots=True)
class Stripe(_Dated):
    """`stripe.invoice.paid` and so on, from `stripe`."""

    header: ClassVar[bytes] = signatures.STRIPE

    def read_claim(self, headers: Headers, now: float) -> SignatureClaim:
        return signatures.read_stripe(headers, now, self.tolerance)

    def read_events(self, headers: Headers, body: bytes, max_batch: int) -> tuple[CloudEvent, ...]:
        data = read_raw(body, "body")
        found = _decode(data, _StripeBody, "an id and a type")
        return (_event(found.id, f"stripe.{found.type}", "stripe", data),)


@dataclass(frozen=True, slots=True)
class StandardWebhooks(_Dated):
    """The body is an object with a `type`, and the source is the path; or it is a CloudEvent or a batch of them."""

    header: ClassVar[bytes] = signatures.STANDARD[-1]

    @staticmethod
    def make_key(secret: str) -> bytes:
        return signatures.standard_key(secret)

    def read_claim(self, headers: Headers, now: float) -> SignatureClaim:
        return signatures.read_standard(headers, now, self.tolerance)

    def read_events(self, headers: Headers, body: bytes, max_batch: int) -> tuple[CloudEvent, ...]:
        if _find(headers, b"content-type").startswith("application/cloudevents"):
            return http_binding.parse(headers, body, max_batch=max_batch).events
        if any(name.lower().startswith(b"ce-") for name, _ in headers):
            raise EventError("the signature does not cover ce- headers: send the event structured", status=415)
        data = read_raw(body, "body")
        found = _decode(data, _StandardBody, "a type")
        if found.specversion is not None:  # a CloudEvent under any Content-Type, as that header is not signed
            return (json_format.parse(body),)
        return (_event(_need(headers, b"webhook-id"), found.type, quote(self.path, safe=_SAFE_IN_PATHS), data),)


class _Repository(Struct):
    full_name: str


class _GitHubBody(Struct):
    repository: _Repository | None = None


class _StripeBody(Struct):
    id: str
    type: str


class _StandardBody(Struct):
    type: str
    specversion: object = None


def check_webhooks(webhooks: Iterable[Webhook]) -> None:
    """Raises if two webhooks have the same path."""
    paths = set()
    for webhook in webhooks:
        if not isinstance(webhook, Webhook):
            raise TypeError(f"webhooks: expected GitHub, Stripe or StandardWebhooks, not {type(webhook).__name__}")
        if webhook.path in paths:
            raise ValueError(f"webhooks: the path {webhook.path!r} occurs twice; give one webhook both secrets instead")
        paths.add(webhook.path)


def _check_path(name: str, path: str) -> None:
    if "?" in path or "#" in path:
        raise ValueError(f"{name}: expected a path without query and fragment")
    for reserved in _RESERVED:
        if path == reserved or path.startswith(f"{reserved}/"):
            raise ValueError(f"{name}: paths at and below {reserved} are reserved")


def _as_tuple(secret: object) -> tuple[Any, ...]:
    """A wrong type, such as None of an unset variable, is passed on to `_check_secret`."""
    return tuple(secret) if isinstance(secret, Sequence) and not isinstance(secret, str | bytes) else (secret,)


def _check_secret(name: str, secret: object) -> None:
    if not isinstance(secret, str):
        raise TypeError(f"{name}: expected the secret as a str, not {type(secret).__name__}")
    if not secret.strip():
        raise ValueError(f"{name}: the secret is empty")
    if secret != secret.strip():
        raise ValueError(f"{name}: the secret has white space around it")


def _event(id: str, type: str, source: str, data: Raw) -> CloudEvent:
    event = CloudEvent(id=id, source=source, type=type, datacontenttype=JSON, data=data)
    check(event)
    return event


def _decode(data: Raw, kind: type[T], expected: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise EventError(f"the body must be an object with {expected}") from None


def _find(headers: Headers, name: bytes) -> str:
    return next((value.strip().decode("latin-1").lower() for key, value in headers if key.lower() == name), "")


def _need(headers: Headers, name: bytes) -> str:
    found = [value.strip().decode("latin-1") for key, value in headers if key.lower() == name]
    if len(found) != 1:
        raise EventError(f"the header {name.decode()} must occur once")
    return found[0]
