"""Which session waits for which lock, on MySQL and MariaDB."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from edda.storage.mysql.connection import MySQLPool, MySQLSession

T = TypeVar("T")

CONNECTION = b"SELECT CONNECTION_ID()"
LOCK_RUN = b"SELECT 1 FROM edda_open_run WHERE run_id = %b FOR UPDATE"
LOCK_WAIT = b"SELECT 1 FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = %b AND trx_state = 'LOCK WAIT'"


async def connection_of(pool: MySQLPool) -> int:
    return int((await pool.run(CONNECTION)).rows[0][0])


async def shorten_lock_waits(pool: MySQLPool) -> None:
    await pool.run(b"SET SESSION innodb_lock_wait_timeout = 1")


async def until(fact: Callable[[], Awaitable[bool]], every: float = 0.01) -> None:
    for _ in range(round(10 / every)):
        if await fact():
            return
        await asyncio.sleep(every)
    pytest.fail("it did not happen in 10 seconds")


async def waiting(stranger: MySQLSession, pool: MySQLPool, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """The call, as soon as it waits for a lock of another session."""
    connection = await connection_of(pool)
    task = asyncio.create_task(call)

    async def waits() -> bool:
        return bool((await stranger.run(LOCK_WAIT, connection)).rows)

    await until(waits, every=0.2)  # the server caches the list until queries pause for a tenth of a second
    return task
