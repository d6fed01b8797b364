"""Bringing the tables to the form this release needs."""

from __future__ import annotations

from edda.storage.shared.migrations import Migration, missing

from .clock import with_now
from .pool import Pool
from .session import Session

DIALECT = "postgres"

# A second migrator waits for the first, however long that takes; the tables themselves are not waited for like that.
WAIT_LONG = "SET LOCAL lock_timeout = 0"
LOCK = "SELECT pg_advisory_xact_lock(4711, hashtext('edda_migration'))"
WAIT_SHORT = "SET LOCAL lock_timeout = '5s'"

CREATE = """
CREATE TABLE IF NOT EXISTS edda_migration (
    name text COLLATE "C" PRIMARY KEY, checksum text NOT NULL, applied_at bigint NOT NULL)"""
EXISTS = "SELECT to_regclass('edda_migration') IS NOT NULL"
APPLIED = "SELECT name, checksum FROM edda_migration"
RECORD = with_now("INSERT INTO edda_migration (name, checksum, applied_at) VALUES ($1, $2, {now})")


async def migrate(line: Pool) -> tuple[str, ...]:
    """All that is missing in one transaction: the lock goes with it, and a second migrator finds nothing to do."""
    async with line.session() as session:
        async with session.transaction():
            await _lock(session)
            todo = await _missing(session)
            for migration in todo:
                await _apply(session, migration)
        await session.close()  # it is needed once in the life of a process
    return tuple(migration.name for migration in todo)


async def pending(line: Pool) -> tuple[str, ...]:
    async with line.session() as session:
        return tuple(migration.name for migration in await _missing(session))


async def _apply(session: Session, migration: Migration) -> None:
    await session.execute(CREATE)
    for statement in migration.statements():
        await session.execute(statement)
    await session.execute(RECORD, migration.name, migration.checksum)


async def _lock(session: Session) -> None:
    await session.execute(WAIT_LONG)
    await session.fetch(LOCK)
    await session.execute(WAIT_SHORT)


async def _missing(session: Session) -> tuple[Migration, ...]:
    exists = (await session.fetch(EXISTS))[0][0]
    applied = await session.fetch(APPLIED) if exists else []
    return missing(DIALECT, {row["name"]: row["checksum"] for row in applied})
