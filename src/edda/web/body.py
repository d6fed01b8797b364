"""Reading a body: never too much, never for too long, and not a moment after its sender has gone."""

from __future__ import annotations

import asyncio

from edda.web.answers import HTTPError, http_error, retry_later
from edda.web.options import WebOptions
from edda.web.request import Request

_ENCODINGS = frozenset({b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress"})
_HEAD_START = 5.0
"""Seconds before the rate counts: a slow start is no slow body."""


class DisconnectedError(Exception):
    """Nobody is there to be answered."""


class BodyReader:
    """Reads bodies and keeps account of the memory that they hold together."""

    def __init__(self, options: WebOptions) -> None:
        self._options = options
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """What was read is held until `release`."""
        _check_encoding(request)
        self._check_declared(request)
        body = bytearray()
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(begun + self._seconds_for(0)) as limit:
                while await self._read_more(request, body):
                    limit.reschedule(begun + self._seconds_for(len(body)))
        except BaseException as error:
            self.release(len(body))
            if isinstance(error, TimeoutError):
                raise _too_slow() from None
            raise
        return bytes(body)

    def release(self, size: int) -> None:
        self._held -= size

    async def _read_more(self, request: Request, body: bytearray) -> bool:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        chunk = message.get("body", b"")
        more = bool(message.get("more_body", False))
        if chunk:
            self._check_size(len(body) + len(chunk))
            self._hold(len(chunk))
            body += chunk
        elif more:
            await asyncio.sleep(0)  # a server that has nothing and says so without waiting must not stop the others
        return more

    def _check_declared(self, request: Request) -> None:
        declared = request.header(b"content-length")
        if declared is None:
            return
        if not declared.isdigit():
            raise http_error(400, "Content-Length is not a number")
        # Python refuses to read numbers of thousands of digits: whatever has so many is too large in any case.
        self._check_size(int(declared[:30]))

    def _check_size(self, size: int) -> None:
        if size > self._options.max_body:
            raise http_error(413, f"the body is larger than {self._options.max_body} bytes (max_body)")

    def _hold(self, size: int) -> None:
        if self._held + size > self._options.max_buffered:
            raise HTTPError(retry_later(503, "too many large requests at once", self._options.retry_after))
        self._held += size

    def _seconds_for(self, size: int) -> float:
        return min(self._options.body_timeout, _HEAD_START + size / self._options.min_rate)


def _check_encoding(request: Request) -> None:
    encoding = request.header(b"content-encoding")
    name = b"identity" if encoding is None else encoding.strip().lower()
    if name != b"identity":
        # Decoded, a small body may be of any size, and a signature is of the bytes as they came.
        told = f" {name.decode()}" if name in _ENCODINGS else ""
        error = f"the Content-Encoding{told} is not taken here: send the body as it is"
        raise http_error(415, error, headers={"Accept-Encoding": "identity"})


def _too_slow() -> HTTPError:
    return http_error(408, "the body came too slowly", headers={"Connection": "close"})
