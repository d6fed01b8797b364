"""A pytest fixture: `async def test_x(edda_app): assert await edda_app.run(order, ...) == ...`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .app import VirtualApp


async def open_app() -> AsyncIterator[VirtualApp]:
    """An app in memory, with virtual time."""
    from .app import VirtualApp  # imported on demand: pytest loads this module in every project that installs Edda

    async with VirtualApp() as app:
        yield app


def _fixture() -> Any:
    try:
        import pytest_asyncio
    except ImportError:  # other plugins, such as AnyIO's, run plain async fixtures
        return pytest.fixture(name="edda_app")
    return pytest_asyncio.fixture(name="edda_app")


edda_app = _fixture()(open_app)
