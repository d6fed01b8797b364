"""The tables, brought up to date by whoever comes first."""

from __future__ import annotations

import asyncio

from edda.errors import StorageConflictError, StorageError
from edda.storage.shared.migrations import missing

from .clock import NOW
from .pool import ConnectionFactory, Pool
from .session import Session
from .statement import Statement

DIALECT = "mysql"
_ATTEMPTS = 20
_PAUSE = 0.2

# Names of locks are the whole server's, and 64 characters long at most.
LOCK = b"SELECT GET_LOCK(CONCAT('edda_', MD5(DATABASE())), 3600)"
CREATE = b"""CREATE TABLE IF NOT EXISTS edda_migration (
    name VARCHAR(255) NOT NULL PRIMARY KEY, checksum CHAR(64) NOT NULL, applied_at BIGINT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin"""
EXISTS = b"""SELECT 1 FROM information_schema.tables
    WHERE table_schema = DATABASE() AND table_name = 'edda_migration'"""
APPLIED = b"SELECT name, checksum FROM edda_migration"
RECORD = b"INSERT IGNORE INTO edda_migration (name, checksum, applied_at) VALUES (%b, %b, " + NOW + b")"


async def migrate(address: ConnectionFactory) -> tuple[str, ...]:
    """The lock is one of the server's. In a cluster another process may apply the same at another node; what it made
    between our look and our statement is an error here, and the next attempt sees it."""
    for _ in range(_ATTEMPTS):
        try:
            return await _migrate(address)
        except StorageError:
            if not address.is_certified:
                raise
            await asyncio.sleep(_PAUSE)
    return await _migrate(address)


async def _migrate(address: ConnectionFactory) -> tuple[str, ...]:
    # A session of its own, that waits for as long as it takes: for the lock, or for a change of a large table.
    session = await address.connect(patience=None)
    try:
        if (await session.run(LOCK)).rows[0][0] != 1:
            raise StorageConflictError("another migration has been running for an hour")
        await session.run(CREATE)
        return await _apply_missing(session)
    finally:
        await session.close()  # which frees the lock, too


async def _apply_missing(session: Session) -> tuple[str, ...]:
    pending = missing(DIALECT, await _applied(session))
    for migration in pending:
        for statement in migration.statements():
            await session.send(Statement(statement, statement.encode()))
        await session.run(RECORD, migration.name, migration.checksum)
    return tuple(migration.name for migration in pending)


async def pending(pool: Pool) -> tuple[str, ...]:
    async with pool.session() as session:
        applied = await _applied(session) if (await session.run(EXISTS)).rows else {}
        return tuple(migration.name for migration in missing(DIALECT, applied))


async def _applied(session: Session) -> dict[str, str]:
    return dict((await session.run(APPLIED)).rows)
