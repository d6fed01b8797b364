"""Reading page by page, until there is enough."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import click

from edda.control.views import Page

T = TypeVar("T")

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
