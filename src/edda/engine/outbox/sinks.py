"""Where the events of the outbox go. A sink says of each event: taken, never, or not now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from edda.cloudevents import http_binding
from edda.cloudevents.event import CloudEvent
from edda.cloudevents.signatures import sign, standard_key
from edda.core.urls import split_credentials
from edda.engine.tasks import start_task
from edda.errors import EventDeliveryError, EventError, EventPostponedError, EventRefusedError

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

TIMEOUT = 10.0
"""Seconds until an answer has to be there."""
MOST_READ = 4096
"""Bytes of an answer's body that are of interest, if any."""
MOST_TOLD = 500
"""Characters of it that are kept as the reason."""
BODY_PATIENCE = 1.0
"""Seconds for an answer's body: what it is about, its status has said already."""

_WORTH_TRYING_AGAIN = frozenset({408, 425, 429})


class Sink(Protocol):
    async def send(self, event: CloudEvent) -> None:
        """Returns when the receiver has it. May be called for many events at once, and twice for one.

        `EventRefusedError`: it is never to be tried again. `EventPostponedError`, and every other error: later.
        """
        ...

    async def close(self) -> None: ...


class HttpSink:
    """Posts each event to one address; signed as Standard Webhooks says if there is a secret.

    Several secrets sign side by side, so that the receiver can change over from one to the next.
    """

    def __init__(
        self,
        url: str,
        *,
        mode: str = "structured",
        secret: str | Sequence[str] | None = None,
        timeout: float = TIMEOUT,
        headers: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url, credentials = split_credentials(_check_url(url))
        self._mode = _check_mode(mode)
        if secret is not None and self._mode is http_binding.ContentMode.BINARY:
            raise ValueError(
                "HttpSink(mode='binary', secret=...): the signature covers the body alone, and in binary mode "
                "the event is in the headers; send it with mode='structured'"
            )
        self._secrets = () if secret is None else (secret,) if isinstance(secret, str) else tuple(secret)
        for one in self._secrets:
            standard_key(one)  # a wrong one is said here, not at the first event
        self._timeout = timeout
        given = dict(headers or {})
        if not any(name.lower() == "authorization" for name in given):
            given |= credentials
        self._headers = list(given.items())
        self._now = now
        self._pool: AsyncClient | None = None

    async def send(self, event: CloudEvent) -> None:
        import httpx2  # only who sends over HTTP pays for it

        headers, body = self._write(event)
        try:
            await _end_gently(lambda: self._post_in_time(headers, body))
        except TimeoutError:
            raise EventPostponedError(f"no answer within {self._timeout:g} seconds") from None
        except httpx2.HTTPError as error:
            raise EventPostponedError(repr(error)) from error

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()

    def _write(self, event: CloudEvent) -> tuple[list[tuple[str, str]], bytes]:
        try:
            headers, body = http_binding.emit(event, self._mode)
        except EventError as error:
            raise EventRefusedError(f"it cannot be sent in this mode: {error}") from error
        if self._secrets:
            headers += sign(self._secrets, message_id(event), int(self._now()), body)
        return [*self._headers, *headers], body

    async def _post_in_time(self, headers: list[tuple[str, str]], body: bytes) -> None:
        import anyio

        with anyio.fail_after(self._timeout):
            await self._post(headers, body)

    async def _post(self, headers: list[tuple[str, str]], body: bytes) -> None:
        async with self._client().stream("POST", self._url, content=body, headers=headers) as answer:
            said = await _beginning_of(answer)
        if not answer.is_success:
            raise self._refusal(answer, said)

    def _client(self) -> AsyncClient:
        import httpx2

        if self._pool is None:
            self._pool = httpx2.AsyncClient(
                timeout=self._timeout,
                follow_redirects=False,
                headers={"accept-encoding": "identity"},
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # every try is the same
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0),
            )
        return self._pool

    def _refusal(self, answer: Response, said: str) -> EventDeliveryError:
        reason = f"{answer.status_code} {answer.reason_phrase}: {said}".rstrip(": ")
        if 400 <= answer.status_code < 500 and answer.status_code not in _WORTH_TRYING_AGAIN:
            return EventRefusedError(reason)
        return EventPostponedError(reason, read_retry_after(answer.headers.get("retry-after"), self._now()))


def message_id(event: CloudEvent) -> str:
    """One text for the pair of source and id, which is the name of an event."""
    digest = blake2b(digest_size=16)
    for part in (event.source, event.id):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.hexdigest()


def read_retry_after(text: str | None, now: float) -> float | None:
    """Seconds, from a number or a date; None if it says nothing."""
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now)


async def _end_gently(post: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Cancelled in anyio's way, which the pool of connections shields itself from.

    It closes those that were cut one after the other, and asyncio's own cancel would get through to it: all that it had
    not come to yet would stay open, and belong to nobody.
    """
    import anyio

    scope = anyio.CancelScope()

    async def post_in_scope() -> None:
        with scope:
            await post()

    task = start_task(post_in_scope(), name="edda-outbox-post")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        scope.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _beginning_of(answer: Response) -> str:
    """A body that does not come, or without end, changes nothing: the status counts."""
    import anyio
    import httpx2

    read = bytearray()
    with suppress(httpx2.HTTPError), anyio.move_on_after(BODY_PATIENCE):
        async for part in answer.aiter_raw():
            read += part
            if len(read) > MOST_READ:
                break
    return bytes(read[:MOST_READ]).decode(errors="replace")[:MOST_TOLD]


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("the address of a receiver must be http://host/... or https://host/...")
    return url


def _check_mode(mode: str) -> http_binding.ContentMode:
    if mode not in {"structured", "binary"}:
        raise ValueError(f"mode must be 'structured' or 'binary', not {mode!r}")
    return http_binding.ContentMode(mode)
