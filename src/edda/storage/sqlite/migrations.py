"""The schema's migrations, all that are missing in one transaction: DDL rolls back like anything else."""

from __future__ import annotations

from edda.storage.shared.migrations import missing

from .connection import Connection

_TABLE = """
CREATE TABLE IF NOT EXISTS edda_migration (
    name TEXT PRIMARY KEY NOT NULL, checksum TEXT NOT NULL, applied_at INTEGER NOT NULL
) WITHOUT ROWID"""
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'edda_migration'"
_APPLIED = "SELECT name, checksum FROM edda_migration"
_APPLY = "INSERT INTO edda_migration (name, checksum, applied_at) VALUES (?, ?, ?)"


def migrate(db: Connection, now: int) -> tuple[str, ...]:
    db.run(_TABLE)
    todo = missing("sqlite", dict(db.rows(_APPLIED)))
    for migration in todo:
        for statement in migration.statements():
            db.run(statement)
        db.run(_APPLY, (migration.name, migration.checksum, now))
    return tuple(migration.name for migration in todo)


def pending(db: Connection) -> tuple[str, ...]:
    applied = dict(db.rows(_APPLIED)) if db.row(_HAS_TABLE) else {}
    return tuple(migration.name for migration in missing("sqlite", applied))
