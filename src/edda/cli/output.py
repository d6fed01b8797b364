"""Prints styled lines, tables and JSON.

Every text from a database passes `strip_control` or `single_line`, so that the terminal executes no escape sequence of
it.
"""

from __future__ import annotations

import json
import shutil
import sys
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from edda.control.views import MAX_PAGE_SIZE, ActionResult, Page

_GAP = "  "
_DEFAULT_WIDTH = 80
"""Columns, if the output is no terminal."""


class StyledText(NamedTuple):
    text: str
    style: str = ""
    """The name of a colour, "bold" or "dim"."""


Line = tuple[StyledText, ...]


def strip_control(text: str) -> str:
    """Escapes control and format characters as in Python source."""
    return "".join(char if _is_printable(char) else char.encode("unicode_escape").decode() for char in text)


def _is_printable(char: str) -> bool:
    return char == "\n" or unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Co"}


def single_line(text: str) -> str:
    return strip_control(" ".join(text.split()))


def line(*parts: str | StyledText) -> Line:
    return tuple(part if isinstance(part, StyledText) else StyledText(part) for part in parts)


def terminal_width() -> int:
    return shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns


def is_terminal() -> bool:
    return sys.stdout.isatty()


def show(lines: Iterable[Line]) -> None:
    for one in lines:
        click.echo("".join(_styled(span) for span in one).rstrip())


def _styled(span: StyledText) -> str:
    match span.style:
        case "":
            return span.text
        case "bold":
            return click.style(span.text, bold=True)
        case "dim":
            return click.style(span.text, dim=True)
        case colour:
            return click.style(span.text, fg=colour)


def show_json(value: Any) -> None:
    click.echo(write_json(value))


def write_json(value: Any, indent: int = 2) -> str:
    """Writes control characters as JSON escapes, which decode to the same value. An indent below 0: on one line."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()
    return "".join(char if _is_printable(char) else json.dumps(char)[1:-1] for char in text)


def table(headers: Sequence[str], rows: Sequence[Sequence[str | StyledText]]) -> list[Line]:
    """Columns are as wide as their longest cell; on a terminal the last column is cut at the end of the line."""
    cells = [[StyledText(single_line(span.text), span.style) for span in line(*row)] for row in rows]
    header_cells = [StyledText(header, "dim") for header in headers]
    widths = [max(display_width(row[number].text) for row in [header_cells, *cells]) for number in range(len(headers))]
    if is_terminal():
        used = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(terminal_width() - used, 10))
    return [_row(row, widths) for row in [header_cells, *cells]]


def _row(cells: Sequence[StyledText], widths: Sequence[int]) -> Line:
    spans: list[StyledText] = []
    for cell, width in zip(cells, widths, strict=True):
        text = truncate(cell.text, width)
        spans += [StyledText(text, cell.style), StyledText(" " * (width - display_width(text)) + _GAP)]
    return tuple(spans)


def truncate(text: str, width: int) -> str:
    if display_width(text) <= width:
        return text
    kept, used = "", 1  # one column for the ellipsis
    for char in text:
        used += display_width(char)
        if used > width:
            break
        kept += char
    return f"{kept}…"


def display_width(text: str) -> int:
    """In columns of a terminal: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    visible = [char for char in text if not unicodedata.combining(char)]
    return len(visible) + sum(unicodedata.east_asian_width(char) in {"W", "F"} for char in visible)


T = TypeVar("T")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
limit_option = click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Maximum number.")


def print_rows(
    found: Sequence[T],
    as_json: bool,
    headers: Sequence[str],
    row: Callable[[T], Sequence[str | StyledText]],
    nothing: str,
) -> None:
    """Prints JSON or a table; `nothing` is printed instead of an empty table."""
    if as_json:
        show_json(found)
    elif found:
        show(table(headers, [row(one) for one in found]))
    else:
        click.echo(nothing)


async def read_all(read: Callable[[str | None, int], Awaitable[Page[T]]], limit: int | None) -> list[T]:
    """Reads page by page, up to `limit` items; None: all."""
    found: list[T] = []
    cursor: str | None = None
    while limit is None or len(found) < limit:
        page = await read(cursor, MAX_PAGE_SIZE if limit is None else min(limit - len(found), MAX_PAGE_SIZE))
        found += page.items
        cursor = page.next
        if cursor is None:
            if page.searched_to is not None:
                time = page.searched_to.isoformat()
                click.echo(f"ids were searched back to {time}; add --until {time} to search older runs", err=True)
            break
    return found


def print_result(result: ActionResult) -> None:
    """Exits with 1 if the action changed nothing."""
    click.echo(single_line(result.words), err=not result.done)
    if not result.done:
        sys.exit(1)
