"""`LimitedConnection`: uvicorn's HTTP protocol with limits that uvicorn lacks.

It limits the size and the time of request headers, the time that a client may leave a response unread, and the number
of connections from one address. It works with both protocols of uvicorn (h11 and httptools), because it uses only
attributes that both have.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections import Counter
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

SECONDS = 15.0
"""Time for the headers of a request, and for the rest of a body whose response was sent before its end."""
MAX_HEADER_BYTES = 80 * 1024
"""A little more than the application allows, so that usually the application refuses and names the limit."""

WRITE_SECONDS = 30.0
"""How long a client may leave a response unread."""
PER_ADDRESS = "EDDA_CONNECTIONS_PER_ADDRESS"
"""Environment variable with the limit, which the processes of `--workers` inherit; 0 for no limit."""
MAX_PER_ADDRESS = 200

_LINGER_ZERO = struct.pack("ii", 1, 0)
"""`SO_LINGER` with 0 seconds: closing resets the connection."""

logger = logging.getLogger("edda.web")

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nretry-after: 5\r\nconnection: close\r\n\r\n"

_open: Counter[str] = Counter()
"""Connections of this process by the address of the client."""
_warned: set[str] = set()
"""Addresses over the limit whose warning was logged; removed with their last connection."""


if TYPE_CHECKING:

    class _Protocol(asyncio.Protocol):
        """The members that both protocols of uvicorn have."""

        config: Any

        def shutdown(self) -> None: ...

else:
    _Protocol = asyncio.Protocol


class _OpenOnly:
    """A transport that discards writes after it was closed.

    uvicorn continues to write the response of the first of several pipelined requests after the client has
    disconnected: uvloop then raises, and uvicorn logs a traceback; asyncio logs a line for each write.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class HeaderLimitProtocol(_Protocol):
    """A mixin before a protocol of uvicorn; `transport` and `cycle` are attributes of that protocol."""

    transport: asyncio.Transport
    cycle: Any
    _size = 0
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    """Runs while the write buffer is full, because the client does not read."""
    _close_timer: asyncio.TimerHandle | None = None
    _unsent = 0
    """Size of the write buffer of a closing connection at the last `_check_closing`."""
    _address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", _OpenOnly(transport)))
        self._close_timer = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._check_closing)
        if self._is_over_limit():
            self._close(_TOO_MANY)
        else:
            self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()
        else:
            self._start_header_timer()
            self._count_header_bytes(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        for timer in (self._write_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        if self._address:
            _open[self._address] -= 1
            if not _open[self._address]:
                del _open[self._address]
                _warned.discard(self._address)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _unsupported_upgrade_warning(self) -> None:
        """Replaces uvicorn's two log lines for each request with an `Upgrade` header; the header is ignored."""

    def _check_closing(self) -> None:
        """Aborts a closing connection whose client does not read: `transport.close()` waits without a time-out."""
        unsent = self.transport.get_write_buffer_size() if self.transport.is_closing() else 0
        if unsent and unsent == self._unsent:
            self._abort()
        else:
            self._unsent = unsent
            self._close_timer = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._check_closing)

    def _abort(self) -> None:
        logger.debug("connection aborted: the client did not read its response for %g s", WRITE_SECONDS)
        channel = self.transport.get_extra_info("socket")
        if channel is not None and channel.family != socket.AF_UNIX:
            # Without it, the kernel keeps megabytes of unread data for each connection, for minutes.
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        self.transport.abort()

    def _is_over_limit(self) -> bool:
        """Connections of trusted proxies are not counted: each carries the requests of many clients."""
        peer = self.transport.get_extra_info("peername")
        limit = int(os.environ.get(PER_ADDRESS) or MAX_PER_ADDRESS)
        if not limit or not isinstance(peer, tuple) or _is_trusted(peer[0], self.config):
            return False
        self._address = peer[0]
        _open[self._address] += 1
        if _open[self._address] <= limit:
            return False
        if self._address not in _warned:  # once per address: connections may come many times a second
            _warned.add(self._address)
            logger.warning("%s has %d connections open, more are refused (--connections-per-address)", peer[0], limit)
        return True

    def shutdown(self) -> None:
        """Called when the server stops: closes a started response, because a stream would never end."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
        else:
            super().shutdown()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = asyncio.get_running_loop().call_later(SECONDS, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        self._size = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _count_header_bytes(self, size: int) -> None:
        if self.cycle is not None and self.cycle.more_body:
            return  # the rest of a refused body; closing now would discard its response on the way
        self._size += size
        if self._size > MAX_HEADER_BYTES:
            self._close(_TOO_LARGE)

    def _on_header_timeout(self) -> None:
        self._close(_TOO_SLOW if self._size else b"")  # no response to a client that has sent nothing

    def _close(self, response: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(response)
            self.transport.close()


def _is_trusted(address: str, config: Any) -> bool:
    if not config.proxy_headers:
        return False
    trusted = config.forwarded_allow_ips
    parts = [part.strip() for part in (trusted.split(",") if isinstance(trusted, str) else trusted)]
    return any(part == "*" or _is_in(address, part) for part in parts if part)


def _is_in(address: str, network: str) -> bool:
    try:
        return ip_address(address) in ip_network(network, strict=False)
    except ValueError:  # a host name, or an address of the other family
        return address == network


LimitedConnection: type[asyncio.Protocol] = type("LimitedConnection", (HeaderLimitProtocol, AutoHTTPProtocol), {})
