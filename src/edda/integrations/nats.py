"""Events to and from NATS JetStream, in the NATS protocol binding of CloudEvents.

The client's own reconnecting is off: it would publish buffered old events after newer ones. A lost connection is
closed with its buffers, and the next `send` or fetch opens a new one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, Self

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import CloudEvent
from edda.engine.outbox.sinks import TIMEOUT, message_id
from edda.engine.tasks import Backoff, cancel_and_wait, start_task
from edda.errors import EventError, EventPostponedError, EventRefusedError

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.client import JetStreamContext

logger = logging.getLogger(__name__)

PING_INTERVAL = 5
"""Seconds between pings; two unanswered pings close the connection."""
FETCH_TIMEOUT = 5.0
MORE_TIMEOUT = 0.02
"""Seconds that the first message waits for others, which are stored in the same commit."""
ACK_WAIT = 30.0
"""Seconds after which the server redelivers an unacknowledged message; longer than a call of the database may take."""
NAK_DELAY = 1.0
"""Seconds until the server redelivers messages that could not be stored."""

_TOO_LARGE = 10054
"""JetStream's error code for a message larger than the stream allows."""
_INVALID_IN_SUBJECT = re.compile(r"[\s*>\x00-\x1f\x7f]")


class NatsSink:
    """Publishes each event to a stream; `send` returns when the stream has acknowledged it.

    The event's source and id are the `Nats-Msg-Id`, so that a repeated event within the stream's duplicate window is
    stored once.

    Args:
        url: Server, or several separated by commas: "nats://host:4222".
        stream: Name of the JetStream stream; messages to another stream are refused.
        subject: Subject to publish to; "{type}" in it is replaced by the event's type. Default: "<stream>.{type}".
        timeout: Seconds to wait for the acknowledgement. Default 10.
        **options: Arguments of the client's `connect`, such as `user_credentials` or `tls`.
    """

    def __init__(
        self, url: str, *, stream: str, subject: str | None = None, timeout: float = TIMEOUT, **options: Any
    ) -> None:
        self._stream = stream
        self._subject = subject or f"{stream}.{{type}}"
        self._timeout = timeout
        self._connection = NatsConnection(url, options)

    async def send(self, event: CloudEvent) -> None:
        import nats.errors
        import nats.js.errors

        try:
            async with self._connection.limit(self._timeout):
                client = await self._connection.get()
                await client.jetstream().publish(
                    self._subject.replace("{type}", _INVALID_IN_SUBJECT.sub("_", event.type)),
                    json_format.emit_stored(event),
                    timeout=self._timeout,
                    stream=self._stream,
                    headers={"content-type": http_binding.STRUCTURED_TYPE, "Nats-Msg-Id": message_id(event)},
                )
        except nats.errors.MaxPayloadError as error:
            raise EventRefusedError(f"larger than the server allows: {error}") from error
        except nats.js.errors.APIError as error:
            if error.err_code == _TOO_LARGE:
                raise EventRefusedError(str(error)) from error
            raise EventPostponedError(str(error)) from error
        except TimeoutError:
            raise EventPostponedError(f"the stream {self._stream} did not acknowledge the event in time") from None
        except (nats.errors.Error, OSError) as error:
            raise EventPostponedError(str(error) or repr(error)) from error

    async def close(self) -> None:
        await self._connection.close()


class EventTarget(Protocol):
    """Implemented by EddaApp."""

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        """Store the events; all are committed when it returns."""
        ...


class NatsSource:
    """Stores the events of a stream in an app's database: `async with source:`, or `await source.run()`.

    A message is acknowledged after the commit of its event, so none is lost; a redelivered event is stored once, by
    its source and id.

    Args:
        app: The app that stores the events.
        url: Server, or several separated by commas: "nats://host:4222".
        stream: Name of the JetStream stream.
        durable: Name of the durable consumer; processes with the same name share the messages.
        subject: Only messages of this subject. Default None: all of the stream.
        batch: Messages that are stored in one commit, at most. Default 100.
        **options: Arguments of the client's `connect`, such as `user_credentials` or `tls`.
    """

    def __init__(
        self,
        app: EventTarget,
        url: str,
        stream: str,
        durable: str,
        *,
        subject: str | None = None,
        batch: int = 100,
        **options: Any,
    ) -> None:
        self._app = app
        self._stream = stream
        self._durable = durable
        self._subject = subject or ""
        self._batch = batch
        self._connection = NatsConnection(url, options)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = start_task(self.run(), name="edda-nats-source")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def run(self) -> None:
        """Receive until this task is cancelled; while the server or the stream is unavailable, retry with backoff."""
        import nats.errors

        backoff = Backoff(0.1, limit=5.0)
        try:
            while True:
                try:
                    subscription = await self._subscribe()
                    backoff = Backoff(0.1, limit=5.0)
                    await self._consume(subscription)
                except (nats.errors.Error, OSError, TimeoutError) as error:
                    backoff.warn(logger, "cannot receive from the stream %s: %r", self._stream, error)
                    await backoff.pause()
        finally:
            await self._connection.close()

    async def _subscribe(self) -> JetStreamContext.PullSubscription:
        from nats.js.api import AckPolicy, ConsumerConfig

        config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT)
        async with self._connection.limit(TIMEOUT):
            client = await self._connection.get()
            return await client.jetstream().pull_subscribe(
                self._subject, self._durable, stream=self._stream, config=config
            )

    async def _consume(self, subscription: JetStreamContext.PullSubscription) -> None:
        try:
            while self._connection.is_open:
                if messages := await self._fetch(subscription):
                    await self._process(messages)
        finally:
            with suppress(Exception):  # it ended already, or together with the connection
                await subscription.unsubscribe()

    async def _fetch(self, subscription: JetStreamContext.PullSubscription) -> list[Msg]:
        """Wait for one message, then take the others that are available: a fetch of n messages waits for all n."""
        messages: list[Msg] = []
        with suppress(TimeoutError):
            async with self._connection.limit(FETCH_TIMEOUT + 1.0):
                messages += await subscription.fetch(1, timeout=FETCH_TIMEOUT)
                if self._batch > 1:
                    messages += await subscription.fetch(self._batch - 1, timeout=MORE_TIMEOUT)
        return messages

    # Storing

    async def _process(self, messages: Sequence[Msg]) -> None:
        parsed = []
        for message in messages:
            try:
                parsed.append((message, read_message(message.headers, message.data)))
            except EventError as error:
                await self._reject(message, error)
        if parsed and not await self._store(parsed):
            await asyncio.sleep(NAK_DELAY * 1.1)  # the server then redelivers them first, in their order

    async def _store(self, parsed: Sequence[tuple[Msg, tuple[CloudEvent, ...]]]) -> bool:
        """Store the events in one commit; False if the server has to redeliver them."""
        try:
            await self._app.receive([event for _, events in parsed for event in events])
        except EventError as error:
            if len(parsed) > 1:
                return await self._store_one_by_one(parsed)
            await self._reject(parsed[0][0], error)
        except Exception as error:  # the database is unavailable or the app is stopped: the messages are not the cause
            logger.warning(
                "%d messages of the stream %s were not stored, and are redelivered in %g s: %s",
                *(len(parsed), self._stream, NAK_DELAY, error),
            )
            await self._request_redelivery(parsed)
            return False
        else:
            for message, _ in parsed:
                await message.ack()
        return True

    async def _store_one_by_one(self, parsed: Sequence[tuple[Msg, tuple[CloudEvent, ...]]]) -> bool:
        for index, one in enumerate(parsed):
            if not await self._store([one]):
                await self._request_redelivery(parsed[index + 1 :])
                return False
        return True

    async def _request_redelivery(self, parsed: Sequence[tuple[Msg, object]]) -> None:
        for message, _ in parsed:
            await message.nak(delay=NAK_DELAY)

    async def _reject(self, message: Msg, error: EventError) -> None:
        number = message.metadata.sequence.stream
        logger.error("message %d of the stream %s is rejected for good: %s", number, self._stream, error)
        await message.term()


def read_message(headers: dict[str, str] | None, body: bytes) -> tuple[CloudEvent, ...]:
    """The events of a structured or binary message, by its headers; without headers the body is the event in JSON."""
    pairs = [(name.encode(), str(value).encode("utf-8", "replace")) for name, value in (headers or {}).items()]
    if any(name.lower() == b"content-type" or name[:3].lower() == b"ce-" for name, _ in pairs):
        return http_binding.parse(pairs, body).events
    return (json_format.parse(body),)


class NatsConnection:
    """A connection to one server or cluster, opened on demand; concurrent callers of `get` share one attempt."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._servers = url.split(",")
        self._options = options
        self._client: Client | None = None
        self._connecting: asyncio.Task[Client] | None = None
        self._limits: set[asyncio.Timeout] = set()

    @property
    def is_open(self) -> bool:
        return self._client is not None and self._client.is_connected

    async def get(self) -> Client:
        if self._client is not None and self._client.is_connected:
            return self._client
        if self._connecting is None:
            self._connecting = start_task(self._connect(), name="edda-nats-connect")
            self._connecting.add_done_callback(self._on_connected)
        return await asyncio.shield(self._connecting)

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """`asyncio.timeout` that also expires when the connection is lost, because no answer can arrive then."""
        async with asyncio.timeout(seconds) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    async def close(self) -> None:
        if self._connecting is not None:
            await cancel_and_wait(self._connecting)
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _connect(self) -> Client:
        from nats.aio.client import Client

        client = Client()

        async def closed() -> None:
            if self._client is client:
                self._expire_limits()

        try:
            await client.connect(
                **{
                    "servers": self._servers,
                    "allow_reconnect": False,
                    "max_reconnect_attempts": 1,
                    "reconnect_time_wait": 0,
                    "ping_interval": PING_INTERVAL,
                    "name": "edda",
                    **self._options,
                    "error_cb": self._on_error,
                    "closed_cb": closed,
                }
            )
        except BaseException:
            await client.close()
            raise
        self._client = client
        return client

    def _on_connected(self, connecting: asyncio.Task[Client]) -> None:
        self._connecting = None
        if not connecting.cancelled():
            connecting.exception()  # retrieved: asyncio would log it if all callers of `get` were cancelled

    async def _on_error(self, error: Exception) -> None:
        logger.debug("NATS: %r", error)

    def _expire_limits(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)
