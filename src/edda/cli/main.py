"""The group of all commands."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import click

from edda.version import __version__

from .doctor import doctor
from .events import channels, events
from .migrate import migrate
from .outbox import outbox
from .overview import audit, graph, stats, waits, workers, workflows
from .runs import runs
from .serve import dev, serve, viewer, worker


@click.group()
@click.version_option(__version__, prog_name="edda")
def main() -> None:
    """Durable workflows on your own database."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a character that the encoding lacks is written as ?
            stream.reconfigure(errors="replace")


for _command in (dev, serve, worker, viewer, migrate, doctor):
    main.add_command(_command)
for _command in (runs, events, outbox, workers, workflows, waits, channels, audit, graph, stats):
    main.add_command(_command)
