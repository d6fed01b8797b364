"""A pytest fixture: `async def test_x(edda_app): assert await edda_app.run(order, ...) == ...`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # another plugin, such as AnyIO's, takes plain fixtures
    async_fixture = pytest.fixture

if TYPE_CHECKING:
    from .app import VirtualApp


@async_fixture
async def edda_app() -> AsyncIterator[VirtualApp]:
    """An app in memory, with virtual time."""
    from .app import VirtualApp  # imported when asked for: pytest loads this file for every project that has Edda

    async with VirtualApp() as app:
        yield app
