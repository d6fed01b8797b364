"""Migrations: numbered `.sql` files per database, applied once, never edited after a release.

An adapter keeps `edda_migration(name, checksum, applied_at)`, takes its own lock, and applies what
`missing` says, in one transaction where the database can.
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
        """The single statements; a semicolon at the end of a line ends one."""
        text = "\n".join(line for line in self.sql.splitlines() if not line.lstrip().startswith("--"))
        for statement in re.split(r";\s*(?:\n|$)", text):
            if statement.strip():
                yield statement.strip()


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    folder = resources.files("edda.storage").joinpath("migrations", dialect)
    files = sorted((f for f in folder.iterdir() if _NAME.match(f.name)), key=lambda f: f.name)
    return tuple(_read(f.name, f.read_text("utf-8")) for f in files)


def _read(name: str, sql: str) -> Migration:
    return Migration(name.removesuffix(".sql"), sql, hashlib.sha256(sql.encode()).hexdigest())


def missing(dialect: str, applied: Mapping[str, str]) -> tuple[Migration, ...]:
    """What is still to be applied; refuses a database whose applied migrations are not the ones we know.

    Names we do not know are fine: a newer release may have been here (releases N and N+1 share a database).
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
