"""What goes wrong, told in one line and by the exit code: 1 refused or failed, 2 wrong usage, 130 Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from edda.cli.extras import missing_extra_hint
from edda.cli.terminal import strip_control
from edda.errors import EddaError

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
