"""MariaDB 10.6 or newer and MySQL 8.0 or newer, through asyncmy, in SQL that both accept."""

from .storage import MySQLStorage

__all__ = ["MySQLStorage"]
