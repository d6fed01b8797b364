"""Statements as bytes, ready to send. Only this module writes values into the text of a statement.

The text protocol allows several statements in one message. Every session has a `sql_mode` without
NO_BACKSLASH_ESCAPES, so that only quotes and backslashes have to be escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from edda.errors import StorageRejectedError

Value = str | bytes | int | None | Sequence[str] | Sequence[bytes] | Sequence[int]


# The database's clock in microseconds; UTC, whatever the time zone of the server or the session.
NOW = b"TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', UTC_TIMESTAMP(6))"
READ_CLOCK = b"SELECT " + NOW

DERIVED_ROWS = 200
"""Rows of one derived table, which is a UNION ALL with one SELECT per row."""
UNION_BRANCHES = 100
"""Look-ups in one statement; each is a SELECT that opens its own tables."""
LISTED_NUMBERS = 1_000
"""Numbers in one IN list; some servers do not use a range scan for a much longer one."""


class Statement(NamedTuple):
    label: str
    """The template, without values."""
    body: bytes


def quote_text(value: str) -> bytes:
    if "\0" in value:  # refused on every database alike; only some of them store it
        raise StorageRejectedError(f"{value!r} has a NUL in it")
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise StorageRejectedError(f"{value!r} is not valid text") from error
    return b"'%b'" % encoded.replace(b"\\", b"\\\\").replace(b"'", b"''")


def quote_bytes(value: bytes) -> bytes:
    # The introducer keeps the server from reading the bytes as utf8mb4.
    return b"_binary'%b'" % value.replace(b"\\", b"\\\\").replace(b"'", b"''")


def int_or_null(value: int | None) -> bytes:
    return b"NULL" if value is None else b"%d" % value


def text_or_null(value: str | None) -> bytes:
    return b"NULL" if value is None else quote_text(value)


def literal(value: Value) -> bytes:
    if value is None or isinstance(value, int):
        return int_or_null(value)
    if isinstance(value, str):
        return quote_text(value)
    if isinstance(value, bytes):
        return quote_bytes(value)
    return b",".join(map(literal, value)) or b"NULL"  # IN (NULL) matches no row


def bind(template: bytes, *values: Value) -> Statement:
    return Statement(template.decode(), template % tuple(map(literal, values)))


def inserts(head: bytes, rows: Sequence[bytes], limit: int, tail: bytes = b"") -> Iterator[Statement]:
    """As few multi-row INSERTs as the size limit of a message allows."""
    label = (head + tail).decode()
    for group in split_rows(rows, limit - len(label)):
        yield Statement(label, head + b",".join(group) + tail)


def join_values(template: bytes, selects: Sequence[bytes]) -> Iterator[Statement]:
    """Statements that join a derived table `v` with these rows."""
    for i in range(0, len(selects), DERIVED_ROWS):
        derived = b" UNION ALL ".join(selects[i : i + DERIVED_ROWS])
        yield Statement(template.decode(), template % derived)


def unions(template: bytes, branches: Sequence[bytes]) -> Iterator[Statement]:
    """Statements that are each a UNION ALL of filled-in templates."""
    for i in range(0, len(branches), UNION_BRANCHES):
        yield Statement(template.decode(), b" UNION ALL ".join(branches[i : i + UNION_BRANCHES]))


def in_batches(template: bytes, numbers: Iterable[int], *values: Value) -> Iterator[Statement]:
    """Statements whose last value is a list of numbers, sorted."""
    ordered = sorted(numbers)
    for i in range(0, len(ordered), LISTED_NUMBERS):
        yield bind(template, *values, ordered[i : i + LISTED_NUMBERS])


def pack_messages(statements: Iterable[Statement], limit: int) -> Iterator[Statement]:
    """As many statements in each message as fit; the server runs them in order and stops at an error."""
    pending: list[Statement] = []
    size = 0
    for statement in statements:
        if pending and size + len(statement.body) >= limit:
            yield _joined(pending)
            pending, size = [], 0
        pending.append(statement)
        size += len(statement.body) + 2
    if pending:
        yield _joined(pending)


def _joined(statements: Sequence[Statement]) -> Statement:
    return Statement("; ".join(s.label for s in statements), b"; ".join(s.body for s in statements))


def split_rows(rows: Sequence[bytes], limit: int) -> Iterator[Sequence[bytes]]:
    """Groups of rows that stay below the limit when joined with commas."""
    if sum(map(len, rows)) + len(rows) < limit:
        if rows:
            yield rows
        return
    start = size = 0
    for i, row in enumerate(rows):
        check_size(row, limit)
        if size + len(row) >= limit:
            yield rows[start:i]
            start, size = i, 0
        size += len(row) + 1
    yield rows[start:]


def check_size(row: bytes, limit: int) -> None:
    if len(row) >= limit:
        raise StorageRejectedError(
            f"a row of {len(row)} bytes is over this server's max_allowed_packet ({limit} bytes are left for it)"
        )
