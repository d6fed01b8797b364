"""Which rows and pages a statement reads on PostgreSQL, by EXPLAIN (ANALYZE, BUFFERS)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from edda.storage.postgres import PostgresStorage
from edda.storage.postgres.connection import PostgresSession
from edda.storage.postgres.pool import PostgresConnectionFactory
from edda.storage.postgres.target import PostgresTarget
from tests import databases
from tests.conftest import need


@asynccontextmanager
async def seeded(seeds: Iterable[str] = ()) -> AsyncIterator[str]:
    server = need(databases.postgres(), "PostgreSQL", "EDDA_TEST_POSTGRES_URL")
    url = server.create()
    storage = PostgresStorage(url)
    await storage.migrate()
    await storage.close()
    for statement in seeds:
        server.execute(statement, url)
    yield url
    server.drop(url)


@asynccontextmanager
async def session_at(url: str) -> AsyncIterator[PostgresSession]:
    """A session as the storage opens it."""
    session = await PostgresConnectionFactory(PostgresTarget(url, 0), probe=None).connect(None)
    yield session
    await session.close()


@dataclass(frozen=True)
class Look:
    """What one execution of a statement read."""

    indexes: frozenset[str]
    read_whole: frozenset[str]
    """Tables that were scanned from end to end."""
    pages: int
    rows: int
    work: int
    """Rows that all nodes of the plan returned, summed over their loops."""


async def look(session: PostgresSession, statement: str, *values: object) -> Look:
    """Execute the statement, and roll it back."""
    call = f"EXECUTE looked_at ({', '.join(literal(value) for value in values)})" if values else "EXECUTE looked_at"
    await session.execute(f"PREPARE looked_at AS {statement}")
    await session.execute("BEGIN")
    answer = await session.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}")
    await session.execute("ROLLBACK")
    await session.execute("DEALLOCATE looked_at")
    plan = json.loads(answer[0][0])[0]["Plan"]
    nodes = list(walk(plan))
    return Look(
        indexes=frozenset(node["Index Name"] for node in nodes if "Index Name" in node),
        read_whole=frozenset(node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"),
        pages=plan["Shared Hit Blocks"] + plan["Shared Read Blocks"],
        rows=plan["Actual Rows"],
        work=sum(node["Actual Rows"] * node["Actual Loops"] for node in nodes),
    )


def walk(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from walk(child)


def literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return rf"'\x{value.hex()}'"
    if isinstance(value, list | tuple):
        return "'{" + ", ".join(element(item) for item in value) + "}'"
    return str(value) if isinstance(value, int) else f"'{value}'"


def element(item: object) -> str:
    if isinstance(item, tuple):
        return '"(' + ",".join(field(part) for part in item) + ')"'
    if isinstance(item, bytes):
        return rf'"\\x{item.hex()}"'
    return "NULL" if item is None else f'"{item}"'


def field(part: object) -> str:
    """A field of a row in an array: both the array and the row unescape backslashes."""
    if isinstance(part, bytes):
        return rf"\\\\x{part.hex()}"
    return "" if part is None else str(part)
