"""Which receiver a URL means."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

from edda.engine.outbox.sinks import TIMEOUT, HttpSink, Sink


def resolve_sink(
    broker_url: str | None, sink: Sink | None, secret: str | Sequence[str] | None, timeout: float = TIMEOUT
) -> Sink:
    """The one that is given, or the one that the URL means."""
    if (broker_url is None) == (sink is None):
        raise ValueError("give either broker_url, such as https://example.com/events, or sink")
    if sink is not None:
        if secret is not None:
            raise ValueError("secret goes with broker_url; a sink has its own: HttpSink(url, secret=...)")
        return sink
    assert broker_url is not None
    return open_sink(broker_url, secret=secret, timeout=timeout)


def open_sink(url: str, *, secret: str | Sequence[str] | None = None, timeout: float = TIMEOUT) -> Sink:
    """http(s)://... is posted to, nats://host:port/stream?subject=... published to; nothing is connected yet."""
    parts = urlsplit(url)
    if parts.scheme in {"http", "https"}:
        return HttpSink(url, secret=secret, timeout=timeout)
    if parts.scheme in {"nats", "tls"}:
        if secret is not None:
            raise ValueError("a secret signs webhooks; a NATS server has its own ways to know who comes")
        return _open_nats(url, timeout)
    raise ValueError(
        f"broker_url with the scheme {parts.scheme!r}: expected http://..., https://... or nats://host:port/stream"
    )


def _open_nats(url: str, timeout: float) -> Sink:
    from edda.integrations.nats import NatsSink

    parts = urlsplit(url)
    stream = parts.path.strip("/")
    if not stream or "/" in stream:
        raise ValueError("a NATS broker_url names the stream: nats://host:port/stream?subject=...")
    subject = parse_qs(parts.query).get("subject", [None])[0]
    server = parts._replace(path="", query="").geturl()
    return NatsSink(server, stream=stream, subject=subject, timeout=timeout)
