"""Errors of commands in one line, with the extra to install where a package is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from edda.errors import EddaError

from .output import strip_control

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


INTERRUPTED = 130
"""What a shell says of a command that Ctrl-C ended."""


@contextmanager
def report_errors() -> Iterator[None]:
    """Errors that people can do something about are no tracebacks."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ImportError as error:
        if (words := missing_extra_hint(error)) is None:
            raise
        raise click.ClickException(words) from error
    except (EddaError, ValueError, OSError) as error:
        raise click.ClickException(error_text(error)) from error


def error_text(error: BaseException) -> str:
    return strip_control(" ".join(str(error).split()) or type(error).__name__)
