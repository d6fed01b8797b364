"""The settings of the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass

from edda.web.security.tokens import Token
from edda.web.security.webhooks import Webhook, check_webhooks

KIB = 1024
MIB = 1024 * KIB

_ABOVE_ZERO = (
    "max_body",
    "max_header_bytes",
    "max_header_count",
    "max_buffered",
    "max_concurrent",
    "body_timeout",
    "min_rate",
    "write_timeout",
    "service_timeout",
    "retry_after",
)


@dataclass(frozen=True, slots=True)
class WebOptions:
    auth: str | None = None
    """None: whoever has a token, or without tokens this machine alone. "none": everybody, on purpose."""
    tokens: tuple[Token, ...] = ()
    read_only: bool = False
    """Nobody does more than look: no events are taken, and nothing is done to runs."""
    query_token: bool = False
    """Take a token as `?access_token=` too. Off, because addresses end up in the logs of every proxy."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of this server, such as "shop.example" or "*.shop.example"; loopback names are always served.
    Empty: any name, if there are tokens or auth="none"."""
    allowed_origins: tuple[str, ...] = ()
    """Senders that pass the webhook handshake, such as "sender.example", or "*"."""
    allowed_rate: int | None = None
    """Events per minute that the handshake grants to a sender; None: as many as it likes."""
    webhooks: tuple[Webhook, ...] = ()
    """Paths where a signature is asked for, and nothing else."""
    max_body: int = MIB
    max_header_bytes: int = 64 * KIB
    max_header_count: int = 100
    max_batch: int = 100
    """Events in one request; 0: no batches."""
    max_buffered: int = 64 * MIB
    """Bytes of bodies held at once, over all requests."""
    max_concurrent: int = 100
    """Requests that wait for the database at once; more are told to come back."""
    body_timeout: float = 15.0
    min_rate: int = KIB
    """Bytes per second below which a body is given up."""
    write_timeout: float = 30.0
    """Seconds for which a client may leave its answer unread."""
    service_timeout: float = 15.0
    """Seconds the database gets before a request is told to come back."""
    retry_after: int = 5
    """Seconds after which to come back while the database is away."""

    def __post_init__(self) -> None:
        if self.auth not in {None, "none"}:
            raise ValueError(f'auth={self.auth!r}: expected None, or "none" to serve everybody without a token')
        if self.auth == "none" and self.tokens:
            raise ValueError('auth="none" serves everybody, yet there are tokens: give one of the two')
        for name in ("tokens", "allowed_hosts", "allowed_origins", "webhooks"):
            if isinstance(getattr(self, name), str):  # it would be taken for its letters
                raise TypeError(f"{name}: expected a tuple, not a text")
        check_webhooks(self.webhooks)
        for name in _ABOVE_ZERO:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected more than 0")
        if self.max_batch < 0:
            raise ValueError(f"max_batch={self.max_batch}: expected 0, for no batches, or more")

    @property
    def local_only(self) -> bool:
        """Without tokens, and not opened on purpose, only this machine is served."""
        return self.auth is None and not self.tokens
