"""Apps on every database, as the engine's tests have them."""

from __future__ import annotations

from tests.engine.conftest import app, empty_registry, make_app, make_app_on

__all__ = ["app", "empty_registry", "make_app", "make_app_on"]
