"""What a terminal shows: lines of styled words, tables of them, and JSON.

Nothing that comes from a database reaches the terminal without `clean`: an escape sequence in an order's name must
not be obeyed.
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

from edda.control.views import Page

_GAP = "  "
_NARROW = 80
"""Columns that are assumed where there is no terminal."""


class StyledText(NamedTuple):
    text: str
    style: str = ""
    """A colour's name, "bold" or "dim"."""


Line = tuple[StyledText, ...]


def strip_control(text: str) -> str:
    """What a terminal would obey instead of showing is written as Python writes it."""
    return "".join(char if _is_harmless(char) else char.encode("unicode_escape").decode() for char in text)


def _is_harmless(char: str) -> bool:
    return char == "\n" or unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Co"}


def single_line(text: str) -> str:
    """On one line."""
    return strip_control(" ".join(text.split()))


def line(*parts: str | StyledText) -> Line:
    return tuple(part if isinstance(part, StyledText) else StyledText(part) for part in parts)


def terminal_width() -> int:
    return shutil.get_terminal_size((_NARROW, 24)).columns


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
    """What a terminal would obey is escaped; for a program it is the same value. An indent below 0: on one line."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()
    return "".join(char if _is_harmless(char) else json.dumps(char)[1:-1] for char in text)


def table(headers: Sequence[str], rows: Sequence[Sequence[str | StyledText]]) -> list[Line]:
    """Columns as wide as they have to be; on a terminal the last one is cut where the line ends."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    heads = [StyledText(header, "dim") for header in headers]
    widths = [max(display_width(row[number].text) for row in [heads, *cells]) for number in range(len(headers))]
    if is_terminal():
        taken = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(terminal_width() - taken, 10))
    return [_row(row, widths) for row in [heads, *cells]]


def _cell(cell: str | StyledText) -> StyledText:
    span = cell if isinstance(cell, StyledText) else StyledText(cell)
    return StyledText(single_line(span.text), span.style)


def _row(cells: Sequence[StyledText], widths: Sequence[int]) -> Line:
    spans: list[StyledText] = []
    for cell, width in zip(cells, widths, strict=True):
        text = truncate(cell.text, width)
        spans += [StyledText(text, cell.style), StyledText(" " * (width - display_width(text)) + _GAP)]
    return tuple(spans)


def truncate(text: str, width: int) -> str:
    if display_width(text) <= width:
        return text
    kept, taken = "", 1
    for char in text:
        taken += display_width(char)
        if taken > width:
            break
        kept += char
    return f"{kept}…"


def display_width(text: str) -> int:
    """In columns of a terminal: some characters take two, some none."""
    return len(text) if text.isascii() else sum(map(_width_of_one, text))


def _width_of_one(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in {"W", "F"} else 1


T = TypeVar("T")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
limit_option = click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many.")


def print_rows(
    found: Sequence[T],
    as_json: bool,
    headers: Sequence[str],
    row: Callable[[T], Sequence[str | StyledText]],
    nothing: str,
) -> None:
    if as_json:
        show_json(found)
    elif found:
        show(table(headers, [row(one) for one in found]))
    else:
        click.echo(nothing)


def or_blank(value: Any) -> str:
    """Nothing for what is not there."""
    return "" if value is None else str(value)


MOST = 200
"""What a page may have."""


async def read_all(read: Callable[[str | None, int], Awaitable[Page[T]]], limit: int | None) -> list[T]:
    """At most so many; None: all there are."""
    found: list[T] = []
    cursor: str | None = None
    while limit is None or len(found) < limit:
        page = await read(cursor, MOST if limit is None else min(limit - len(found), MOST))
        found += page.items
        cursor = page.next
        if cursor is None:
            _say_where_it_ended(page)
            break
    return found


def _say_where_it_ended(page: Page[T]) -> None:
    if page.searched_to is not None:
        moment = page.searched_to.isoformat()
        click.echo(f"ids were searched back to {moment}; --until {moment} searches further back", err=True)
