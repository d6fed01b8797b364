"""How long a call of the user's waits for the database, and what the caller is told when the time is over.

`Settings.call_timeout` bounds every such call as a whole, however many statements it needs and however often they are
sent again. When the time is over the statement under way is cancelled, which drops its connection: the server may or
may not have committed it. So the error of a call that changes something says that its outcome is unknown, unless no
statement was ever sent.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, cast

from edda.errors import (
    EddaError,
    NotConnectedError,
    OutcomeUnknownError,
    StorageConflictError,
    StorageUnavailableError,
)
from edda.storage.ports import Storage

from .tasks import Backoff


class Call:
    def __init__(self, doing: str, seconds: float, advice: str) -> None:
        self.may_have_happened = False
        """Whether a statement that changes something was sent and not refused."""
        self._doing = doing
        self._seconds = seconds
        self._advice = advice
        self.last: EddaError | None = None
        """Why there was no answer so far."""

    async def ask(self, question: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """What only reads, until there is an answer."""
        return await self._repeat(question, args, changes=False)

    async def order(self, order: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """What changes something and may be sent twice, until there is an answer."""
        return await self._repeat(order, args, changes=True)

    async def _repeat(self, send: Callable[..., Awaitable[Any]], args: tuple[Any, ...], *, changes: bool) -> Any:
        backoff, before = Backoff(), self.may_have_happened
        while True:
            self.may_have_happened = before or changes
            try:
                answer = await send(*args)
            except (NotConnectedError, StorageConflictError) as error:  # not sent, or rolled back
                self.may_have_happened, self.last = before, error
            except StorageUnavailableError as error:
                before, self.last = self.may_have_happened, error
            else:
                return answer
            await backoff.pause()

    def timed_out(self) -> StorageUnavailableError:
        why = f"{self._doing}: the database did not answer within {self._seconds:g} seconds"
        if self.last is not None:
            why += f" ({self.last})"
        if not self.may_have_happened:
            error = StorageUnavailableError(f"{why}; nothing was changed, try again")
        else:
            error = OutcomeUnknownError(f"{why}, so it is unknown whether it happened: {self._advice}")
        error.__cause__ = self.last
        return error


class CallLimit:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @asynccontextmanager
    async def call(self, doing: str, advice: str = "look before you do it again") -> AsyncIterator[Call]:
        """`advice`: what to do when it is unknown whether a change happened."""
        call = Call(doing, self.seconds, advice)
        try:
            async with asyncio.timeout(self.seconds) as scope:
                yield call
        except TimeoutError:
            if not scope.expired():
                raise
            raise call.timed_out() from None

    def bound(self, storage: Storage, changes: frozenset[str]) -> Storage:
        """The same storage, each of whose answers is waited for only so long. Nothing is sent twice; `changes` names
        the methods that change something."""
        return cast(Storage, _Bounded(storage, self, changes))


class _Bounded:
    def __init__(self, storage: Storage, limit: CallLimit, changes: frozenset[str]) -> None:
        self._storage = storage
        self._limit = limit
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if not inspect.iscoroutinefunction(method):
            return method

        @wraps(method)
        async def within_limit(*args: Any, **options: Any) -> Any:
            async with self._limit.call(name.replace("_", " ")) as call:
                call.may_have_happened = name in self._changes
                return await method(*args, **options)

        return within_limit
