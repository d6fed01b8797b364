"""Reading page by page, until there is enough."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

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
            break
    return found
