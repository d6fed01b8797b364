"""A connection of uvicorn's that does not wait for headers without end: uvicorn itself limits neither their size
nor their time.

Works on whichever of its two protocols is installed: it only looks at what both have.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

SECONDS = 15.0
"""For the headers of a request, and for the rest of a body that was answered before its end."""
MOST_BYTES = 80 * 1024
"""A little over what the application allows, so that it is the one who says so."""

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


if TYPE_CHECKING:

    class _Protocol(asyncio.Protocol):
        """What both of uvicorn's have."""

        def shutdown(self) -> None: ...

else:
    _Protocol = asyncio.Protocol


class Impatient(_Protocol):
    """In front of a protocol of uvicorn's, whose attributes these are."""

    transport: asyncio.Transport
    cycle: Any
    _size = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
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
        super().connection_lost(exc)

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


Connection: type[asyncio.Protocol] = type("Connection", (Impatient, AutoHTTPProtocol), {})
