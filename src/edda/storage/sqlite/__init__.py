"""Everything in one file, no server: see `storage`."""

from .storage import SQLiteStorage

__all__ = ["SQLiteStorage"]
