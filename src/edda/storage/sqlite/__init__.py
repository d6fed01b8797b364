"""Everything in one file, without a server: see `storage`."""

from .storage import SQLiteStorage

__all__ = ["SQLiteStorage"]
