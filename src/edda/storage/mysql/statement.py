"""Statements as bytes, ready to send: values are written into the text here, and nowhere else.

The text protocol is used because several statements then travel in one message. Every session has a
`sql_mode` without NO_BACKSLASH_ESCAPES, so a quote and a backslash are all there is to escape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from edda.errors import StorageRejectedError

Value = str | bytes | int | None | Sequence[str] | Sequence[bytes] | Sequence[int]


DERIVED_ROWS = 200
"""Rows of one derived table; its parse tree is one SELECT per row."""
LISTED_NUMBERS = 1_000
"""Numbers in one list; a much longer one is no range for every server."""


class Statement(NamedTuple):
    label: str
    """The statement without its data."""
    body: bytes


def quote_text(value: str) -> bytes:
    if "\0" in value:  # the server would take it, but other databases do not: refused everywhere alike
        raise StorageRejectedError(f"{value!r} has a NUL in it")
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise StorageRejectedError(f"{value!r} is not valid text") from error
    return b"'%b'" % encoded.replace(b"\\", b"\\\\").replace(b"'", b"''")


def quote_bytes(value: bytes) -> bytes:
    # The introducer keeps the server from reading the bytes as utf8mb4, which most of them are not.
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
    return b",".join(map(literal, value)) or b"NULL"  # nothing is IN (NULL)


def bind(template: bytes, *values: Value) -> Statement:
    return Statement(template.decode(), template % tuple(map(literal, values)))


def inserts(head: bytes, rows: Sequence[bytes], limit: int, tail: bytes = b"") -> Iterator[Statement]:
    """As few multi-row INSERTs as the size of a message allows."""
    label = (head + tail).decode()
    for group in split_rows(rows, limit - len(label)):
        yield Statement(label, head + b",".join(group) + tail)


def join_values(template: bytes, selects: Sequence[bytes]) -> Iterator[Statement]:
    """Statements over a derived table that is written out row by row."""
    for i in range(0, len(selects), DERIVED_ROWS):
        derived = b" UNION ALL ".join(selects[i : i + DERIVED_ROWS])
        yield Statement(template.decode(), template % derived)


def in_batches(template: bytes, numbers: Iterable[int], *values: Value) -> Iterator[Statement]:
    """Statements that end with a list of numbers, in order."""
    ordered = sorted(numbers)
    for i in range(0, len(ordered), LISTED_NUMBERS):
        yield bind(template, *values, ordered[i : i + LISTED_NUMBERS])


def pack_messages(statements: Iterable[Statement], limit: int) -> Iterator[Statement]:
    """Put as many statements into each message as fit; the server runs them in turn and stops at an error."""
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
    """Split the rows so that each part is below the limit when written out with commas."""
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
