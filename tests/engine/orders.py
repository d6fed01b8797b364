"""A table of the user's own beside Edda's, and the two ways in which an activity writes to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import String, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool

from edda import WorkflowContext
from tests.conftest import Database

from .conftest import url_of

SQL_KINDS = ("sqlite", "postgres", "mysql")
WAYS = ("session", "transaction")

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgres": "postgresql+asyncpg", "mysql": "mysql+asyncmy"}
_INSERT = "INSERT INTO edda_test_order (item) VALUES "


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "edda_test_order"  # its name has it emptied together with Edda's own tables

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    item: Mapped[str] = mapped_column(String(50), unique=True)


class Orders:
    """The table as somebody sees it who has nothing to do with Edda."""

    def __init__(self, kind: str, engine: AsyncEngine) -> None:
        self.kind = kind
        self.engine = engine

    @property
    def session(self) -> AsyncSession:
        """A new one, such as a web handler has."""
        return AsyncSession(self.engine, expire_on_commit=False)

    async def items(self) -> list[str]:
        """What is committed, in the order of the names."""
        async with self.session as session:
            return sorted(await session.scalars(select(Order.item)))

    async def insert(self, connection: Any, item: str) -> None:
        """With the connection that `ctx.transaction()` gives."""
        if self.kind == "sqlite":
            await connection.execute(f"{_INSERT}(?)", (item,))
        elif self.kind == "postgres":
            await connection.execute(f"{_INSERT}($1)", item)
        else:
            async with connection.cursor() as cursor:
                await cursor.execute(f"{_INSERT}(%s)", (item,))

    async def write(self, way: str, ctx: WorkflowContext, item: str) -> None:
        """In one of the two ways, and sent to the database when this returns."""
        if way == "session":
            ctx.session.add(Order(item=item))
            await ctx.session.flush()
        else:
            async with ctx.transaction() as connection:
                await self.insert(connection, item)


def driver_url(database: Database) -> str:
    _, _, place = url_of(database).partition("://")
    return f"{_DRIVERS[database.kind]}://{place}"


@asynccontextmanager
async def open_orders(database: Database) -> AsyncIterator[Orders]:
    """An empty table, on an engine of its own."""
    engine = create_async_engine(driver_url(database), poolclass=NullPool)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield Orders(database.kind, engine)
    await engine.dispose()
