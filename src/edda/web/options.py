"""Settings of the HTTP endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from edda.web.tokens import Token
from edda.web.webhooks import Webhook, check_webhooks

KIB = 1024
MIB = 1024 * KIB

_ABOVE_ZERO = (
    *("max_body", "max_header_bytes", "max_header_count", "max_buffered", "max_concurrent"),
    *("body_timeout", "min_rate", "write_timeout", "service_timeout", "retry_after"),
)


@dataclass(frozen=True, slots=True)
class WebOptions:
    auth: str | None = None
    """None: clients with a token, or, if no tokens are set, clients on this machine. "none": every client."""
    tokens: tuple[Token, ...] = ()
    read_only: bool = False
    """Reject events and every change of runs; only the scope `view` is left."""
    query_token: bool = False
    """Accept a token as `?access_token=` too. Off, because proxies write URLs into their logs."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names of this server, such as "shop.example" or "*.shop.example"; loopback names are always accepted.
    Empty: any name, if there are tokens or auth="none"."""
    allowed_origins: tuple[str, ...] = ()
    """Senders that the webhook handshake admits, such as "sender.example", or "*"."""
    allowed_rate: int | None = None
    """Events per minute that the handshake grants to a sender; None: no limit."""
    webhooks: tuple[Webhook, ...] = ()
    """Paths where a signature is required in place of a token."""
    max_body: int = MIB
    max_header_bytes: int = 64 * KIB
    max_header_count: int = 100
    max_batch: int = 100
    """Events in one request; 0 disables batches."""
    max_buffered: int = 64 * MIB
    """Bytes of request bodies in memory, of all requests together."""
    max_concurrent: int = 100
    """Requests that may wait for the database; further ones get 429."""
    body_timeout: float = 15.0
    min_rate: int = KIB
    """Bytes per second; a body that arrives more slowly is rejected with 408."""
    write_timeout: float = 30.0
    """Seconds that a client may take to read a part of its response."""
    service_timeout: float = 15.0
    """Seconds that a request may wait for the database before it gets 503."""
    retry_after: int = 5
    """Seconds in the header Retry-After of a 503."""

    def __post_init__(self) -> None:
        if self.auth not in {None, "none"}:
            raise ValueError(f'auth={self.auth!r}: expected None, or "none" to serve every client without a token')
        if self.auth == "none" and self.tokens:
            raise ValueError('auth="none" serves every client without a token, but tokens are set: give one of the two')
        for name in ("tokens", "allowed_hosts", "allowed_origins", "webhooks"):
            if isinstance(getattr(self, name), str):  # a str is iterable: each character would be an item
                raise TypeError(f"{name}: expected a tuple, not a str")
        check_webhooks(self.webhooks)
        for name in _ABOVE_ZERO:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected more than 0")
        if self.max_batch < 0:
            raise ValueError(f"max_batch={self.max_batch}: expected 0 (no batches) or more")

    @property
    def local_only(self) -> bool:
        """Only clients on this machine are served."""
        return self.auth is None and not self.tokens
