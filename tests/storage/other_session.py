"""Another session on the same PostgreSQL database, and what it can see of Edda's sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import asyncpg
import pytest

Outsider: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

# Within a transaction the server repeats its first snapshot of statistics, unless that is cleared.
WAITING = """
SELECT (SELECT count(*) FROM pg_stat_activity
         WHERE application_name = 'edda' AND datname = current_database() AND wait_event_type = 'Lock')
  FROM (SELECT pg_stat_clear_snapshot() OFFSET 0) again"""


async def become(fact: Callable[[], Awaitable[object]]) -> None:
    for _ in range(1000):
        if await fact():
            return
        await asyncio.sleep(0.01)  # between two checks
    pytest.fail("it never became so")


class Log:
    """A probe that records the statements, and raises an error at chosen ones."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.fail_before: dict[str, BaseException] = {}
        self.fail_after: dict[str, BaseException] = {}

    def before(self, statement: str) -> None:
        self.sent.append(statement)
        if statement in self.fail_before:
            raise self.fail_before[statement]

    def after(self, statement: str) -> None:
        if statement in self.fail_after:
            raise self.fail_after[statement]


class Death(BaseException):
    """Stands for the death of the process."""
