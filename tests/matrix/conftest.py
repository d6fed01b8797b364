"""The apps of the engine's tests, on every database."""

from __future__ import annotations

from ..engine.conftest import empty_registry, make_app_on

__all__ = ["empty_registry", "make_app_on"]
