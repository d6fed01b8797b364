"""A table of the user's own, written through SQLAlchemy; the same for every system."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

ASYNC_DRIVERS = {"postgresql://": "postgresql+asyncpg://", "sqlite://": "sqlite+aiosqlite://"}


class Base(DeclarativeBase):
    pass


class Line(Base):
    __tablename__ = "bench_line"

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    body: Mapped[str]


def line(number: int) -> Line:
    return Line(number=number, body="two of the blue ones, gift-wrapped")


async def create_ledger(url: str) -> None:
    engine = open_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()


async def count_lines(url: str) -> int:
    engine = open_engine(url)
    async with engine.connect() as connection:
        count = await connection.scalar(select(func.count()).select_from(Line))
    await engine.dispose()
    return count or 0


def open_engine(url: str) -> AsyncEngine:
    for plain, named in ASYNC_DRIVERS.items():
        url = url.replace(plain, named)
    return create_async_engine(url)
