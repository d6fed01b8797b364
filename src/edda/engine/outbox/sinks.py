"""Where the relayer sends the events of the outbox: each event is accepted, rejected, or postponed."""

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
from edda.core.redact import split_credentials
from edda.engine.tasks import start_task
from edda.errors import EventError, EventPostponedError, EventRefusedError

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

TIMEOUT = 10.0
"""Seconds for the whole answer."""
MAX_BODY = 4096
"""Bytes of an answer's body that are read."""
MAX_REASON = 500
"""Characters of the body that are stored as the reason."""
BODY_TIMEOUT = 1.0
"""Seconds for an answer's body: the status alone decides."""

_RETRYABLE_STATUSES = frozenset({408, 425, 429})


class Sink(Protocol):
    async def send(self, event: CloudEvent) -> None:
        """Returns when the receiver has accepted it. Called for many events at once, and possibly twice for one.

        `EventRefusedError`: it is not sent again. `EventPostponedError`, and every other error: it is sent later.
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
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("the address of a receiver must be http://host/... or https://host/...")
        if mode not in {"structured", "binary"}:
            raise ValueError(f"mode must be 'structured' or 'binary', not {mode!r}")
        self._url, credentials = split_credentials(url)
        self._mode = http_binding.ContentMode(mode)
        if secret is not None and self._mode is http_binding.ContentMode.BINARY:
            raise ValueError(
                "HttpSink(mode='binary', secret=...): the signature covers the body alone, and in binary mode "
                "the event is in the headers; send it with mode='structured'"
            )
        self._secrets = () if secret is None else (secret,) if isinstance(secret, str) else tuple(secret)
        for one in self._secrets:
            standard_key(one)  # a wrong secret is an error here, not at the first event
        self._timeout = timeout
        given = dict(headers or {})
        if not any(name.lower() == "authorization" for name in given):
            given |= credentials
        self._headers = list(given.items())
        self._now = now
        self._pool: AsyncClient | None = None

    async def send(self, event: CloudEvent) -> None:
        import httpx2  # imported only by processes that send over HTTP

        headers, body = self._write(event)
        try:
            await _shield_from_cancel(lambda: self._post(headers, body))
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

    async def _post(self, headers: list[tuple[str, str]], body: bytes) -> None:
        import anyio

        with anyio.fail_after(self._timeout):
            async with self._client().stream("POST", self._url, content=body, headers=headers) as answer:
                text = await _read_beginning(answer)
        if answer.is_success:
            return
        reason = f"{answer.status_code} {answer.reason_phrase}: {text}".rstrip(": ")
        if 400 <= answer.status_code < 500 and answer.status_code not in _RETRYABLE_STATUSES:
            raise EventRefusedError(reason)
        raise EventPostponedError(reason, read_retry_after(answer.headers.get("retry-after"), self._now()))

    def _client(self) -> AsyncClient:
        import httpx2

        if self._pool is None:
            self._pool = httpx2.AsyncClient(
                timeout=self._timeout,
                follow_redirects=False,
                headers={"accept-encoding": "identity"},
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # no cookies: every try is the same
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0),
            )
        return self._pool


def message_id(event: CloudEvent) -> str:
    """One text for the source and id of an event, which together identify it."""
    digest = blake2b(digest_size=16)
    for part in (event.source, event.id):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.hexdigest()


def read_retry_after(text: str | None, now: float) -> float | None:
    """Seconds, from a number or a date; None if there is neither."""
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now)


async def _shield_from_cancel(post: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Cancel with an anyio scope, from which the connection pool shields its clean-up.

    The pool closes interrupted connections one after the other. asyncio's own cancel would interrupt that, and the
    connections that were not closed yet would stay open.
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


async def _read_beginning(answer: Response) -> str:
    """A body that is late or endless is cut: the status decides."""
    import anyio
    import httpx2

    read = bytearray()
    with suppress(httpx2.HTTPError), anyio.move_on_after(BODY_TIMEOUT):
        async for part in answer.aiter_raw():
            read += part
            if len(read) > MAX_BODY:
                break
    return bytes(read[:MAX_BODY]).decode(errors="replace")[:MAX_REASON]
