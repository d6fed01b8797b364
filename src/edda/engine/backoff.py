"""Waiting a little longer each time, never all at once."""

from __future__ import annotations

import asyncio
import logging
import random


class Backoff:
    def __init__(self, first: float = 0.01, most: float = 1.0) -> None:
        self._next = first
        self._most = most
        self._warned = False

    async def pause(self) -> None:
        await asyncio.sleep(self.next())

    def next(self) -> float:
        """Seconds of the next pause, for who waits by itself."""
        seconds = self._next * random.uniform(0.5, 1.0)
        self._next = min(self._next * 2, self._most)
        return seconds

    def warn(self, logger: logging.Logger, message: str, *args: object) -> bool:
        """The first time as a warning, and True; a database that is away for an hour need not fill the log. An error
        without a text, such as a `TimeoutError`, is told by its class."""
        told = [type(one).__name__ if isinstance(one, BaseException) and not str(one) else one for one in args]
        is_first, self._warned = not self._warned, True
        logger.log(logging.WARNING if is_first else logging.DEBUG, message, *told)
        return is_first
