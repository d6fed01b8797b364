"""Packages that not everybody needs, and the extra that brings each."""

from __future__ import annotations

EXTRAS = {
    "asyncpg": "postgres",
    "asyncmy": "mysql",
    "sqlalchemy": "sqlalchemy",
    "nats-py": "nats",
    "rich": "rich",
    "uvloop": "speed",
    "httptools": "speed",
}


def missing_extra_hint(error: ImportError) -> str | None:
    """What to install; None if it is no extra of ours."""
    package = (error.name or "").partition(".")[0].replace("nats", "nats-py")
    extra = EXTRAS.get(package)
    return None if extra is None else f"{package} is not installed: pip install 'edda-framework[{extra}]'"
