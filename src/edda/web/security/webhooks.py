"""Webhooks of others: whose signature is taken at which path, and what event each becomes.

What an event is made of has to be signed, as far as the sender signs it: a `Content-Type` or a `ce-` header is not, and
whoever gets hold of one request could send its body again under other headers.
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

_OURS = ("/_edda", "/cancel")
_IN_PATHS = "/-._~!$&'()*+,;=:@"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Webhook(ABC):
    """One sender: the path that it posts to, and the secret that it signs with, or several while it is changed."""

    path: str
    secret: InitVar[str | Sequence[str]]
    keys: tuple[bytes, ...] = field(init=False, repr=False)
    header: ClassVar[bytes]
    """Where the signature is."""

    def __post_init__(self, secret: str | Sequence[str]) -> None:
        if not isinstance(self.path, str) or not self.path.startswith("/"):
            # What was given is not shown: the secret may stand in the place of the path.
            raise ValueError(f'{type(self).__name__}(path, secret): expected a path such as "/hooks/billing"')
        _check_path(self.name, self.path)
        secrets = _each(secret)
        if not secrets:
            raise ValueError(f"{self.name}: a secret is needed")
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
        """`SignatureError` if the headers alone show that the request is not to be taken."""

    @abstractmethod
    def read_events(self, headers: Headers, body: bytes, max_batch: int) -> tuple[CloudEvent, ...]:
        """The events in a body whose signature is good; `EventError` if there are none."""


@dataclass(frozen=True, slots=True)
class GitHub(Webhook):
    """`github.push` and so on, from `github/owner/repository`. Only the body is signed, without a time."""

    header: ClassVar[bytes] = signatures.GITHUB

    def read_claim(self, headers: Headers, now: float) -> SignatureClaim:
        return signatures.read_github(headers)

    def read_events(self, headers: Headers, body: bytes, max_batch: int) -> tuple[CloudEvent, ...]:
        if _find(headers, b"content-type").startswith("application/x-www-form-urlencoded"):
            raise EventError("choose the content type application/json in the webhook's settings at GitHub", status=415)
        id, kind = _need(headers, b"x-github-delivery"), _need(headers, b"x-github-event")
        data = read_raw(body, "body")
        repository = _look(data, _GitHubBody, "perhaps a repository with its full_name").repository
        source = "github" if repository is None else f"github/{quote(repository.full_name, safe=_IN_PATHS)}"
        return (_event(id, f"github.{kind}", source, data),)


@dataclass(frozen=True, slots=True)
class _Dated(Webhook):
    """The time is signed too."""

    tolerance: float = TOLERANCE
    """Seconds that a signature may be old, or ahead of our clock."""

    def __post_init__(self, secret: str | Sequence[str]) -> None:
        Webhook.__post_init__(self, secret)
        if not self.tolerance > 0:
            raise ValueError(
                f"{type(self).__name__}({self.path!r}): tolerance={self.tolerance!r}: expected more than 0"
            )


@dataclass(frozen=True, slots=True)
class Stripe(_Dated):
    """`stripe.invoice.paid` and so on, from `stripe`."""

    header: ClassVar[bytes] = signatures.STRIPE

    def read_claim(self, headers: Headers, now: float) -> SignatureClaim:
        return signatures.read_stripe(headers, now, self.tolerance)

    def read_events(self, headers: Headers, body: bytes, max_batch: int) -> tuple[CloudEvent, ...]:
        data = read_raw(body, "body")
        found = _look(data, _StripeBody, "an id and a type")
        return (_event(found.id, f"stripe.{found.type}", "stripe", data),)


@dataclass(frozen=True, slots=True)
class StandardWebhooks(_Dated):
    """The type that the body names, from the path; or the CloudEvents that the body is, one or a batch."""

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
        found = _look(data, _StandardBody, "a type")
        if found.specversion is not None:  # a CloudEvent whatever the Content-Type says, which is not signed
            return (json_format.parse(body),)
        return (_event(_need(headers, b"webhook-id"), found.type, quote(self.path, safe=_IN_PATHS), data),)


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
    """Every path has one sender."""
    taken = set()
    for webhook in webhooks:
        if not isinstance(webhook, Webhook):
            raise TypeError(f"webhooks: expected GitHub, Stripe or StandardWebhooks, not {type(webhook).__name__}")
        if webhook.path in taken:
            raise ValueError(f"webhooks: the path {webhook.path!r} is given twice; for two secrets give both to one")
        taken.add(webhook.path)


def _check_path(name: str, path: str) -> None:
    if "?" in path or "#" in path:
        raise ValueError(f"{name}: expected a path alone, without a query")
    for ours in _OURS:
        if path == ours or path.startswith(f"{ours}/"):
            raise ValueError(f"{name}: {ours} and what is below it are taken")


def _each(secret: object) -> tuple[Any, ...]:
    """What is no secret at all, as a variable that is not set, is left for the check to name."""
    return tuple(secret) if isinstance(secret, Sequence) and not isinstance(secret, str | bytes) else (secret,)


def _check_secret(name: str, secret: object) -> None:
    if not isinstance(secret, str):
        raise TypeError(f"{name}: a secret is a text, not {type(secret).__name__}")
    if not secret.strip():
        raise ValueError(f"{name}: the secret is empty")
    if secret != secret.strip():
        raise ValueError(f"{name}: the secret has white space around it")


def _event(id: str, type: str, source: str, data: Raw) -> CloudEvent:
    event = CloudEvent(id=id, source=source, type=type, datacontenttype=JSON, data=data)
    check(event)
    return event


def _look(data: Raw, kind: type[T], expected: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise EventError(f"the body must be an object with {expected}") from None


def _find(headers: Headers, name: bytes) -> str:
    return next((value.strip().decode("latin-1").lower() for key, value in headers if key.lower() == name), "")


def _need(headers: Headers, name: bytes) -> str:
    found = [value.strip().decode("latin-1") for key, value in headers if key.lower() == name]
    if len(found) != 1:
        raise EventError(f"the header {name.decode()} must come once")
    return found[0]
