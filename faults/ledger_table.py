"""A table of the users' own: one row for each thing that is to be done once. No constraint keeps a second one out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import text as sql

from edda import WorkflowContext

from .sql_client import Line, text
from .target_databases import Place

_TABLE = "CREATE TABLE faults_till (n {serial} PRIMARY KEY, place varchar(300) NOT NULL, item varchar(300) NOT NULL)"
_SERIAL = {"postgres": "bigserial", "mysql": "bigint AUTO_INCREMENT", "sqlite": "integer"}
_INSERT = "INSERT INTO faults_till (place, item) VALUES ('{place}', '{item}')"
COUNT_ITEMS = "SELECT count(DISTINCT item) FROM faults_till"


class Row(Struct, frozen=True):
    place: str
    """Which step wrote it, by its idempotency key."""
    item: str


async def open_till(place: Place) -> None:
    line = place.line()
    try:
        await line.once(_TABLE.format(serial=_SERIAL[place.kind]))
    finally:
        line.close()


async def read_till(line: Line) -> Sequence[Row]:
    return [Row(text(place), text(item)) for place, item in await line.rows("SELECT place, item FROM faults_till")]


async def put_by_transaction(ctx: WorkflowContext, item: str) -> None:
    async with ctx.transaction() as connection:
        await _execute(connection, _INSERT.format(place=ctx.idempotency_key, item=item))


async def put_by_session(session: Any, place: str, item: str) -> None:
    """A step's session, or anybody's."""
    await session.execute(sql(_INSERT.format(place=":place", item=":item").replace("'", "")), _values(place, item))


def _values(place: str, item: str) -> dict[str, str]:
    return {"place": place, "item": item}


async def _execute(connection: Any, statement: str) -> None:
    """By a connection that is each driver's own."""
    if type(connection).__module__.startswith("asyncmy"):
        async with connection.cursor() as cursor:
            await cursor.execute(statement)
    else:
        await connection.execute(statement)
