"""The commands of `edda`."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import click

from edda.cli.channels import channels
from edda.cli.doctor import doctor
from edda.cli.events import events
from edda.cli.graph import graph
from edda.cli.migrate import migrate
from edda.cli.outbox import outbox
from edda.cli.overview import audit, stats, waits, workers, workflows
from edda.cli.runs import runs
from edda.cli.serve import dev, serve, viewer
from edda.cli.worker import worker
from edda.version import __version__


@click.group()
@click.version_option(__version__, prog_name="edda")
def main() -> None:
    """Durable workflows on your own database."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that lacks a character shows another one
            stream.reconfigure(errors="replace")


for _command in (dev, serve, worker, viewer, migrate, doctor):
    main.add_command(_command)
for _command in (runs, events, outbox, workers, workflows, waits, channels, audit, graph, stats):
    main.add_command(_command)
