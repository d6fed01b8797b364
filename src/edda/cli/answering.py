"""How lists are answered: as JSON, as a table, or with a word that there is nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from edda.cli.terminal import StyledText, show, show_json, table

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
