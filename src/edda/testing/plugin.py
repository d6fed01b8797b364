"""A pytest fixture: `async def test_x(edda_app): assert await edda_app.run(order, ...) == ...`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .app import VirtualApp


async def open_app() -> AsyncIterator[VirtualApp]:
    """An app in memory, with virtual time."""
    from .app import VirtualApp  # imported when asked for: pytest loads this file for every project that has Edda

    async with VirtualApp() as app:
        yield app


def _fixture() -> Any:
    try:
        import pytest_asyncio
    except ImportError:  # another plugin, such as AnyIO's, takes plain fixtures
        return pytest.fixture(name="edda_app")
    return pytest_asyncio.fixture(name="edda_app")


edda_app = _fixture()(open_app)
