from __future__ import annotations

import pytest

from edda.web import Web

from .fakes import FakeService


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def web(service: FakeService) -> Web:
    return Web(service)
