"""Migrations: numbered `.sql` files per database, applied once, never edited after a release.

A storage keeps the table `edda_migration(name, checksum, applied_at)`, takes a lock, and applies the migrations that
`missing` returns, in one transaction where the database allows it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources

from msgspec import Struct

from edda.errors import MigrationError

_NAME = re.compile(r"^\d{4}_[a-z0-9_]+\.sql$")


class Migration(Struct, frozen=True):
    name: str
    sql: str
    checksum: str

    def statements(self) -> Iterator[str]:
        """The single statements: each ends with a semicolon at the end of a line."""
        text = "\n".join(line for line in self.sql.splitlines() if not line.lstrip().startswith("--"))
        for statement in re.split(r";\s*(?:\n|$)", text):
            if statement.strip():
                yield statement.strip()


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    folder = resources.files("edda.storage").joinpath("migrations", dialect)
    files = sorted((f for f in folder.iterdir() if _NAME.match(f.name)), key=lambda f: f.name)
    texts = ((f.name.removesuffix(".sql"), f.read_text("utf-8")) for f in files)
    return tuple(Migration(name, sql, hashlib.sha256(sql.encode()).hexdigest()) for name, sql in texts)


def missing(dialect: str, applied: Mapping[str, str]) -> tuple[Migration, ...]:
    """The migrations to apply. Raises if an applied migration differs from this release's file of the same name.

    Unknown names are allowed: a newer release may use the same database (releases N and N+1 share one).
    """
    known = migrations(dialect)
    for migration in known:
        checksum = applied.get(migration.name)
        if checksum is not None and checksum != migration.checksum:
            raise MigrationError(
                f"migration {migration.name} was applied with checksum {checksum[:12]}, but this release has "
                f"{migration.checksum[:12]}. A released migration is never edited: install the release that "
                "created this database, or restore the file."
            )
    return tuple(m for m in known if m.name not in applied)
