"""Events to and from NATS JetStream, as the NATS binding of CloudEvents says.

A connection that is lost is dropped with all that it still holds, and dialled anew by whoever needs it next: a client
that reconnects by itself would send old events late, behind newer ones.
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
"""Seconds; two that are not answered end a connection."""
FETCH_TIMEOUT = 5.0
MORE_TIMEOUT = 0.02
"""Seconds that the first message waits for others to share its commit."""
ACK_WAIT = 30.0
"""Seconds after which the server gives a message to somebody else; longer than a database may be waited for."""
REST = 1.0
"""Seconds until messages that could not be stored come again."""

_TOO_LARGE = 10054
"""JetStream's number for: larger than the stream allows."""
_NO_TOKEN = re.compile(r"[\s*>\x00-\x1f\x7f]")


class NatsSink:
    """Publishes each event to a stream, and has it only when the stream says so.

    `subject` may have `{type}` in it; else it is the stream's name and the event's type. A second try within the
    stream's window for duplicates is stored once, for it has the same `Nats-Msg-Id`.
    """

    def __init__(
        self, url: str, *, stream: str, subject: str | None = None, timeout: float = TIMEOUT, **options: Any
    ) -> None:
        """`options` go to the client's `connect`, such as `user_credentials` or `tls`."""
        self._stream = stream
        self._subject = subject or f"{stream}.{{type}}"
        self._timeout = timeout
        self._connection = Connection(url, options)

    async def send(self, event: CloudEvent) -> None:
        import nats.errors
        import nats.js.errors

        try:
            async with self._connection.limit(self._timeout):
                await self._publish(event)
        except nats.errors.MaxPayloadError as error:
            raise EventRefusedError(f"larger than the server allows: {error}") from error
        except nats.js.errors.APIError as error:
            if error.err_code == _TOO_LARGE:
                raise EventRefusedError(str(error)) from error
            raise EventPostponedError(str(error)) from error
        except TimeoutError:
            raise EventPostponedError(f"the stream {self._stream} did not say that it has it") from None
        except (nats.errors.Error, OSError) as error:
            raise EventPostponedError(str(error) or repr(error)) from error

    async def close(self) -> None:
        await self._connection.close()

    async def _publish(self, event: CloudEvent) -> None:
        client = await self._connection.get()
        await client.jetstream().publish(
            self._subject.replace("{type}", _NO_TOKEN.sub("_", event.type)),
            json_format.emit_stored(event),
            timeout=self._timeout,
            stream=self._stream,
            headers={"content-type": http_binding.STRUCTURED_TYPE, "Nats-Msg-Id": message_id(event)},
        )


class EventReceiver(Protocol):
    """An EddaApp is one."""

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        """All are stored when it returns."""
        ...


class NatsSource:
    """Takes events from a stream into an app's database; `async with`, or `await source.run()`.

    A message is acknowledged after its commit, so none is lost; one that comes again counts once, by source and id.
    Several processes with the same `durable` share the messages.
    """

    def __init__(
        self,
        app: EventReceiver,
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
        self._connection = Connection(url, options)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = start_task(self.run(), name="edda-nats-source")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def run(self) -> None:
        """For ever: a server or a stream that is not there is waited for."""
        import nats.errors

        backoff = Backoff(first=0.1, most=5.0)
        try:
            while True:
                try:
                    inbox = await self._subscribe()
                    backoff = Backoff(first=0.1, most=5.0)
                    await self._consume(inbox)
                except (nats.errors.Error, OSError, TimeoutError) as error:
                    backoff.warn(logger, "no messages of the stream %s: %r", self._stream, error)
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

    async def _consume(self, inbox: JetStreamContext.PullSubscription) -> None:
        try:
            while self._connection.is_open:
                if messages := await self._fetch(inbox):
                    await self._take(messages)
        finally:
            with suppress(Exception):  # it is gone already, or with the connection
                await inbox.unsubscribe()

    async def _fetch(self, inbox: JetStreamContext.PullSubscription) -> list[Msg]:
        """The client waits until a batch is full: so for one, and then for those that are there already."""
        messages: list[Msg] = []
        with suppress(TimeoutError):
            async with self._connection.limit(FETCH_TIMEOUT + 1.0):
                messages += await inbox.fetch(1, timeout=FETCH_TIMEOUT)
                if self._batch > 1:
                    messages += await inbox.fetch(self._batch - 1, timeout=MORE_TIMEOUT)
        return messages

    # Storing

    async def _take(self, messages: Sequence[Msg]) -> None:
        letters = []
        for message in messages:
            try:
                letters.append((message, read_message(message.headers, message.data)))
            except EventError as error:
                await self._drop(message, error)
        if letters and not await self._store(letters):
            await asyncio.sleep(REST * 1.1)  # what was given back comes first then, in its old order

    async def _store(self, letters: Sequence[tuple[Msg, tuple[CloudEvent, ...]]]) -> bool:
        """In one commit; False if they were given back."""
        try:
            await self._app.receive([event for _, events in letters for event in events])
        except EventError as error:
            if len(letters) > 1:
                return await self._store_one_by_one(letters)
            await self._drop(letters[0][0], error)
        except Exception as error:  # the database is away, or the app is not there: no message's fault
            logger.warning("%d messages of the stream %s come again: %s", len(letters), self._stream, error)
            await self._give_back(letters)
            return False
        else:
            for message, _ in letters:
                await message.ack()
        return True

    async def _store_one_by_one(self, letters: Sequence[tuple[Msg, tuple[CloudEvent, ...]]]) -> bool:
        for place, letter in enumerate(letters):
            if not await self._store([letter]):
                await self._give_back(letters[place + 1 :])
                return False
        return True

    async def _give_back(self, letters: Sequence[tuple[Msg, object]]) -> None:
        for message, _ in letters:
            await message.nak(delay=REST)

    async def _drop(self, message: Msg, error: EventError) -> None:
        number = message.metadata.sequence.stream
        logger.error("message %d of the stream %s is not taken, and never will be: %s", number, self._stream, error)
        await message.term()


def read_message(headers: dict[str, str] | None, body: bytes) -> tuple[CloudEvent, ...]:
    """Structured or binary by its headers; without any it is the event in JSON."""
    pairs = [(name.encode(), str(value).encode("utf-8", "replace")) for name, value in (headers or {}).items()]
    if any(name.lower() == b"content-type" or name[:3].lower() == b"ce-" for name, _ in pairs):
        return http_binding.parse(pairs, body).events
    return (json_format.parse(body),)


class Connection:
    """To one server or cluster; made when it is needed, by one for all who wait for it."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._servers = url.split(",")
        self._options = options
        self._client: Client | None = None
        self._dialling: asyncio.Task[Client] | None = None
        self._limits: set[asyncio.Timeout] = set()

    @property
    def is_open(self) -> bool:
        return self._client is not None and self._client.is_connected

    async def get(self) -> Client:
        if self._client is not None and self._client.is_connected:
            return self._client
        if self._dialling is None:
            self._dialling = start_task(self._dial(), name="edda-nats-connect")
            self._dialling.add_done_callback(self._dialled)
        return await asyncio.shield(self._dialling)

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """TimeoutError then, and at once if the connection is lost: what was asked is never answered."""
        async with asyncio.timeout(seconds) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    async def close(self) -> None:
        if self._dialling is not None:
            await cancel_and_wait(self._dialling)
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _dial(self) -> Client:
        from nats.aio.client import Client

        client = Client()

        async def closed() -> None:
            if self._client is client:
                self._give_up_waiting()

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

    def _dialled(self, dialling: asyncio.Task[Client]) -> None:
        self._dialling = None
        if not dialling.cancelled():
            dialling.exception()  # looked at: whoever waited for it may have gone

    async def _on_error(self, error: Exception) -> None:
        logger.debug("NATS: %r", error)

    def _give_up_waiting(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)
