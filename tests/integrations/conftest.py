from __future__ import annotations

from tests.engine.conftest import empty_registry, make_app, make_app_on

__all__ = ["empty_registry", "make_app", "make_app_on"]
