"""PostgreSQL 12 or newer, through asyncpg."""

from .storage import PostgresStorage

__all__ = ["PostgresStorage"]
