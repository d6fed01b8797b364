"""The database's time, in SQL."""

from __future__ import annotations

_NOW = "(extract(epoch from clock_timestamp()) * 1000000)::bigint"


def with_now(statement: str) -> str:
    """Put the database's time, in microseconds, where the statement says `{now}`.

    A comparison that should use an index says `(SELECT {now})`: the clock is volatile, and PostgreSQL
    looks up only what is computed once, ahead of the scan.
    """
    return statement.replace("{now}", _NOW)
