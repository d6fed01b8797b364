"""The `edda` command."""

from edda.cli.main import main

__all__ = ["main"]
