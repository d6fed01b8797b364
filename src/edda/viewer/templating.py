"""Templates and the files beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from edda.version import __version__

from . import formatting
from .status_style import style_of

if TYPE_CHECKING:
    from jinja2 import Environment

TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # heavy, and only a page needs it

    site = Environment(
        loader=PackageLoader("edda.viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    site.filters |= {
        "span": formatting.format_duration,
        "moment": formatting.format_time,
        "count": formatting.format_count,
        "json": formatting.format_json,
        "pieces": formatting.tokenize_json,
        "look": style_of,
    }
    site.globals |= {"version": __version__, "mark_of_files": _mark_of_files(), "say_span": formatting.format_interval}
    return site


def render(template: str, values: Mapping[str, Any]) -> bytes:
    now = datetime.now(UTC)
    given = {"now": now, "distance": lambda moment: formatting.format_relative(moment, now), **values}
    return _environment().get_template(template).render(given).encode("utf-8", "replace")


@cache
def read_file(name: str) -> bytes | None:
    """None for everything that is not one of our few files."""
    return next((path.read_bytes() for path in _files() if path.name == name), None)


def _files() -> list[Any]:
    return sorted((files("edda.viewer") / "static").iterdir(), key=lambda path: path.name)


def _mark_of_files() -> str:
    """Another one with every change of a file: browsers may keep what carries it."""
    content = b"".join(path.read_bytes() for path in _files() if path.is_file())
    return hashlib.sha256(content).hexdigest()[:12]
