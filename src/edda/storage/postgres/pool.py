"""Connections that come back by themselves, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct

from edda.core.urls import show_url
from edda.errors import NotConnectedError
from edda.storage.ports import StatementProbe

from .session import Session
from .target import Target

SETTINGS = {
    "application_name": "edda",
    # A client that is stopped inside a transaction must not hold its locks for ever.
    "idle_in_transaction_session_timeout": "5s",
    "default_transaction_isolation": "read committed",
    # Compiling a plan costs more than any statement here.
    "jit": "off",
    # Everything is looked up by key, whatever the values: planned once, and never, because the tables were small at
    # the time, with reading all of them.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
}
# Nobody waits for an answer for ever, and no question takes the processors away from the runs. Each is planned for what
# it asks, but along the indexes and in their order: a page is full long before a sort or a hash of everything would be.
_SURVEY_SETTINGS = SETTINGS | {
    "plan_cache_mode": "force_custom_plan",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "max_parallel_workers_per_gather": "0",
    # What is gathered is sorted in memory.
    "work_mem": "32MB",
    "statement_timeout": "5s",
    "default_transaction_read_only": "on",
}
# A user's statements are planned as everywhere, and may wait; only its locks must not outlive its mind.
SHARED_SETTINGS = {"application_name": "edda", "idle_in_transaction_session_timeout": "60s"}


ANSWER_TIMEOUT = 30.0
"""Seconds without an answer after which a connection counts as lost."""
JOURNAL_PATIENCE = 10.0
"""The same for the journal, whose one connection all runs of a worker wait for. A batch waits a second for a lock at
most, and one without an answer is sent again and found by its token if it was in."""


class ConnectionFactory(Struct, frozen=True):
    """What the connections of one pool are for, and to which server they go."""

    target: Target
    probe: StatementProbe | None
    is_shared: bool = False
    """Whether users' code works on its connections."""
    is_survey: bool = False
    """Whether they only serve people who look."""
    lock_timeout: str = "5s"

    async def connect(self, answer_within: float | None) -> Session:
        try:
            connection = await self.target.connect(
                self._settings, answer_within=answer_within, is_shared=self.is_shared
            )
        except Exception as error:  # refused, unreachable, unknown host, wrong password, starting up: not there
            where, why = show_url(self.target.url), str(error) or type(error).__name__
            raise NotConnectedError(f"cannot connect to PostgreSQL at {where}: {why}") from error
        return Session(connection, self.probe, self.target.expect_foreign_statements)

    @property
    def _settings(self) -> dict[str, str]:
        if self.is_shared:
            return SHARED_SETTINGS
        return (_SURVEY_SETTINGS if self.is_survey else SETTINGS) | {"lock_timeout": self.lock_timeout}


class Pool:
    """At most `size` sessions, each used by one task at a time. A lost one is replaced when it is next needed."""

    def __init__(self, address: ConnectionFactory, size: int, answer_within: float | None = ANSWER_TIMEOUT) -> None:
        self._address = address
        self._answer_within = answer_within
        self._size = size
        self._room = asyncio.Semaphore(size)
        self._idle: list[Session] = []
        self._busy: set[Session] = set()
        self._open = True

    def open(self) -> None:
        if not self._open:  # the loop may be another than the one it was closed on
            self._room = asyncio.Semaphore(self._size)
        self._open = True

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        session = await self.acquire()
        try:
            yield session
        finally:
            self.release(session)

    async def acquire(self) -> Session:
        """For those who give it back by hand."""
        await self._room.acquire()
        try:
            return await self._take()
        except BaseException:  # even a cancel: the place is free again
            self._room.release()
            raise

    def release(self, session: Session) -> None:
        self._put_back(session)
        self._room.release()

    async def _take(self) -> Session:
        self._check_open()
        while self._idle:
            session = self._idle.pop()
            if session.is_open:
                break
        else:
            session = await self._address.connect(self._answer_within)
        self._busy.add(session)
        if not self._open:  # closed while it was being connected
            self._put_back(session)
            self._check_open()
        return session

    def _put_back(self, session: Session) -> None:
        self._busy.discard(session)
        if not self._open or session.is_demoted:
            session.close_now()
        elif session.is_open:
            self._idle.append(session)

    def _check_open(self) -> None:
        if not self._open:
            raise NotConnectedError("the storage is closed")

    async def close(self) -> None:
        self._open = False
        while self._idle:
            await self._idle.pop().close()
        self.kill()

    def kill(self) -> None:
        self._open = False
        for session in (*self._idle, *self._busy):
            session.kill()
        self._idle.clear()
