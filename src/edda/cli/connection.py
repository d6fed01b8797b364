"""A connection of uvicorn's with the limits that uvicorn does not have: for the size and the time of headers, for a
client that does not read its answers, and for how many connections one address may have.

Works on whichever of its two protocols is installed: it only looks at what both have.
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
"""For the headers of a request, and for the rest of a body that was answered before its end."""
MOST_BYTES = 80 * 1024
"""A little over what the application allows, so that it is the one who says so."""

WRITE_SECONDS = 30.0
"""For which a client may leave unread what was written to it."""
PER_ADDRESS = "EDDA_CONNECTIONS_PER_ADDRESS"
"""In the environment, since uvicorn starts several processes anew: open connections of one address; 0 for no limit."""
MOST_PER_ADDRESS = 200

_AT_ONCE = struct.pack("ii", 1, 0)
"""`SO_LINGER` with no seconds: the connection ends with a reset."""

logger = logging.getLogger("edda.web")

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nretry-after: 5\r\nconnection: close\r\n\r\n"

_open: Counter[str] = Counter()
"""Connections of this process by the address of the other side."""
_told: set[str] = set()
"""Addresses that had too many, until they have none."""


if TYPE_CHECKING:

    class _Protocol(asyncio.Protocol):
        """What both of uvicorn's have."""

        config: Any

        def shutdown(self) -> None: ...

else:
    _Protocol = asyncio.Protocol


class _OpenOnly:
    """A transport that drops what is written after its end.

    uvicorn goes on answering the first of several pipelined requests when the client has gone. uvloop raises then, and
    uvicorn logs a traceback for each connection; asyncio logs a line for each write.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class HeaderLimitProtocol(_Protocol):
    """In front of a protocol of uvicorn's, whose attributes these are."""

    transport: asyncio.Transport
    cycle: Any
    _size = 0
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    """Runs while the client does not read what is written to it."""
    _watch: asyncio.TimerHandle | None = None
    _left = 0
    """Bytes that a closing connection had to write when `_look` last looked."""
    _address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", _OpenOnly(transport)))
        self._watch = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._look)
        if self._is_one_too_many():
            self._close(_TOO_MANY)
        else:
            self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._rest()
        else:
            self._expect()
            self._count(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        for timer in (self._unread, self._watch):
            if timer is not None:
                timer.cancel()
        if self._address:
            _open[self._address] -= 1
            if not _open[self._address]:
                del _open[self._address]
                _told.discard(self._address)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _unsupported_upgrade_warning(self) -> None:
        """Of uvicorn, with two lines for each request that asks for it: those are answered as if they had not asked."""

    def _look(self) -> None:
        """`transport.close()` waits for what is still to be written, for ever if the client reads nothing."""
        left = self.transport.get_write_buffer_size() if self.transport.is_closing() else 0
        if left and left == self._left:
            self._abort()
        else:
            self._left = left
            self._watch = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._look)

    def _abort(self) -> None:
        logger.debug("a client did not read its answer for %g seconds; its connection is closed", WRITE_SECONDS)
        channel = self.transport.get_extra_info("socket")
        if channel is not None and channel.family != socket.AF_UNIX:
            # Else the kernel keeps what was not read, megabytes for each connection, and offers it for minutes.
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _is_one_too_many(self) -> bool:
        """Proxies that are trusted have as many as they like: whose they are is known from what they say."""
        peer = self.transport.get_extra_info("peername")
        most = int(os.environ.get(PER_ADDRESS) or MOST_PER_ADDRESS)
        if not most or not isinstance(peer, tuple) or _is_trusted(peer[0], self.config):
            return False
        self._address = peer[0]
        _open[self._address] += 1
        if _open[self._address] <= most:
            return False
        if self._address not in _told:  # not for each of them: it may be many a second
            _told.add(self._address)
            logger.warning("%s has %d connections open, more are refused (--connections-per-address)", peer[0], most)
        return True

    def shutdown(self) -> None:
        """The server stops: answers may be finished, but a stream has no end, and would keep it from stopping."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
        else:
            super().shutdown()

    def _expect(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self._give_up)

    def _rest(self) -> None:
        self._size = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, size: int) -> None:
        if self.cycle is not None and self.cycle.more_body:
            return  # the rest of a body that nobody reads; closing now would destroy its answer on the way
        self._size += size
        if self._size > MOST_BYTES:
            self._close(_TOO_LARGE)

    def _give_up(self) -> None:
        self._close(_TOO_SLOW if self._size else b"")  # whoever has said nothing is told nothing

    def _close(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()


def _is_trusted(address: str, config: Any) -> bool:
    if not config.proxy_headers:
        return False
    named = config.forwarded_allow_ips
    parts = [part.strip() for part in (named.split(",") if isinstance(named, str) else named)]
    return any(part == "*" or _is_in(address, part) for part in parts if part)


def _is_in(address: str, network: str) -> bool:
    try:
        return ip_address(address) in ip_network(network, strict=False)
    except ValueError:  # a name, or an address of the other family
        return address == network


Connection: type[asyncio.Protocol] = type("Connection", (HeaderLimitProtocol, AutoHTTPProtocol), {})
