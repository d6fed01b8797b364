"""The outbox: public names, the sink for a `broker_url`, and `OutboxRelayer`, which sends the events of a database in a
process without a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self
from urllib.parse import parse_qs, urlsplit

from edda.core.codec import Codec
from edda.databases import choose_url, close_storage, open_storage, prepare_schema
from edda.engine.client import CallLimit
from edda.engine.clock import DatabaseClock
from edda.engine.outbox.relayer import Relayer, RelaySettings
from edda.engine.outbox.sinks import TIMEOUT, HttpSink, Sink
from edda.engine.settings import Settings
from edda.engine.tasks import cancel_and_wait, start_task
from edda.engine.worker.maintenance import Pruner
from edda.storage.ports import Storage
from edda.workflow.send_event import send_event_transactional

__all__ = ["HttpSink", "OutboxRelayer", "RelaySettings", "Sink", "send_event_transactional"]

GRACE = 10.0
"""Seconds that `stop` waits for requests in flight."""


def resolve_sink(
    broker_url: str | None, sink: Sink | None, secret: str | Sequence[str] | None, timeout: float = TIMEOUT
) -> Sink:
    """The given `sink`, or a new one for `broker_url`."""
    if (broker_url is None) == (sink is None):
        raise ValueError("expected either broker_url, such as https://example.com/events, or sink")
    if sink is not None:
        if secret is not None:
            raise ValueError("a secret needs broker_url; give a sink its own: HttpSink(url, secret=...)")
        return sink
    assert broker_url is not None
    return open_sink(broker_url, secret=secret, timeout=timeout)


def open_sink(url: str, *, secret: str | Sequence[str] | None = None, timeout: float = TIMEOUT) -> Sink:
    """`HttpSink` for http(s)://..., `NatsSink` for nats://host:port/stream?subject=...; it connects when it sends."""
    parts = urlsplit(url)
    if parts.scheme in {"http", "https"}:
        return HttpSink(url, secret=secret, timeout=timeout)
    if parts.scheme in {"nats", "tls"}:
        if secret is not None:
            raise ValueError("a secret signs HTTP requests only; put the credentials of a NATS server into the URL")
        from edda.integrations.nats import NatsSink

        stream = parts.path.strip("/")
        if not stream or "/" in stream:
            raise ValueError("broker_url: expected the name of the NATS stream, nats://host:port/stream?subject=...")
        subject = parse_qs(parts.query).get("subject", [None])[0]
        server = parts._replace(path="", query="").geturl()
        return NatsSink(server, stream=stream, subject=subject, timeout=timeout)
    raise ValueError(
        f"broker_url with the scheme {parts.scheme!r}: expected http://..., https://... or nats://host:port/stream"
    )


class OutboxRelayer:
    """`async with relayer:` sends in the background; `await relayer.run()` sends until it is cancelled.

    Several relayers, and apps with `outbox_enabled`, can share a database: each event is claimed by one of them.

    Args:
        db_url: URL of the database. Default: the environment variable EDDA_DB_URL, else "sqlite:///edda.db".
        broker_url: Receiver of the events: "https://..." or "nats://host:port/stream?subject=...".
        sink: Receiver of the events as an object, instead of `broker_url`.
        secret: Signs requests to `broker_url`: one secret "whsec_...", or several. Default None: unsigned.
        settings: Time limits, leases and concurrency. Default None: `RelaySettings()`.
        retention_days: Days that sent events are kept. Default 7.
        auto_migrate: Create and update the tables at the start. Default True.
        codec: The codec of the apps on this database, if they encrypt. Default None.
        storage: A storage object, instead of `db_url`. Default None.
    """

    def __init__(
        self,
        db_url: str | None = None,
        broker_url: str | None = None,
        *,
        sink: Sink | None = None,
        secret: str | Sequence[str] | None = None,
        settings: RelaySettings | None = None,
        retention_days: float = 7.0,
        auto_migrate: bool = True,
        codec: Codec | None = None,
        storage: Storage | None = None,
    ) -> None:
        self._settings = settings or RelaySettings()
        self._sink = resolve_sink(broker_url, sink, secret, self._settings.timeout)
        self._storage = storage or open_storage(choose_url("OutboxRelayer", db_url or None), pool_size=2)
        self._codec = codec
        self._auto_migrate = auto_migrate
        self._retention = Settings(message_retention_days=retention_days)
        self._limit = CallLimit(self._retention.call_timeout)
        self._relayer: Relayer | None = None
        self._pruning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the database and start sending; a second call does nothing."""
        if self._pruning is not None:
            return
        async with self._limit.call("starting the outbox relayer: opening the database"):
            await self._storage.open()
        try:
            await prepare_schema(self._storage, self._limit, "the outbox relayer", self._auto_migrate)
        except BaseException:
            await close_storage(self._storage, self._limit)
            raise
        clock = DatabaseClock()
        self._relayer = Relayer(self._storage, self._sink, clock=clock, codec=self._codec, settings=self._settings)
        self._relayer.start()
        pruning = Pruner(self._storage, clock, self._retention).run(outbox_only=True)
        self._pruning = start_task(pruning, name="edda-outbox-retention")

    async def stop(self, grace: float = GRACE) -> None:
        """Wait up to `grace` seconds for requests in flight, then close; other relayers send the remaining events."""
        if self._relayer is None or self._pruning is None:
            return
        pruning, self._pruning = self._pruning, None
        await cancel_and_wait(pruning)
        try:
            await self._relayer.stop(grace)
            await self._sink.close()
        finally:
            await close_storage(self._storage, self._limit)

    async def run(self) -> None:
        """Send until this task is cancelled, then `stop`."""
        async with self:
            await asyncio.Event().wait()

    def kill(self) -> None:
        """Stop at once without releasing claimed events, like a crashed process. For tests."""
        if self._relayer is not None and self._pruning is not None:
            self._relayer.kill()
            self._pruning.cancel()
            self._pruning = None
        self._storage.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def sent(self) -> int:
        """Events that the receiver accepted, since the start."""
        return 0 if self._relayer is None else self._relayer.sent

    @property
    def postponed(self) -> int:
        """Failed attempts that will be repeated."""
        return 0 if self._relayer is None else self._relayer.postponed

    @property
    def refused(self) -> int:
        """Events that are dead: they are not sent again."""
        return 0 if self._relayer is None else self._relayer.refused
