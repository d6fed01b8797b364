"""The options that say which runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import click

from edda.cli.moments import MOMENT
from edda.control.views import RunSearch
from edda.core.states import RunStatus

T = TypeVar("T")

_NAMES = ("status", "workflow", "id_prefix", "text", "input_values", "since", "until")
_OPTIONS = (
    click.option(
        "--status",
        multiple=True,
        type=click.Choice([*(status.value for status in RunStatus), "waiting"]),
        metavar="STATUS",
        help="One or several.",
    ),
    click.option("--workflow", help="Only runs of this workflow."),
    click.option("--id", "id_prefix", metavar="PREFIX", help="Only ids that begin so."),
    click.option("--text", help="Somewhere in the id or in what the run waits for."),
    click.option("--input", "input_values", multiple=True, metavar="PATH=VALUE", help="An argument has this value."),
    click.option("--since", type=MOMENT, help="Created after: 2026-11-15T14:30, or an age such as 2h or 7d."),
    click.option("--until", type=MOMENT, help="Created before."),
)


def search_options(work: Callable[..., T]) -> Callable[..., T]:
    """A command that takes a `RunSearch`, and the options it is made of."""

    @functools.wraps(work)
    def search(*args: Any, **values: Any) -> T:
        return work(*args, search=_search(**{name: values.pop(name) for name in _NAMES}), **values)

    return functools.reduce(lambda command, option: option(command), reversed(_OPTIONS), search)


def _search(
    status: tuple[str, ...],
    workflow: str | None,
    id_prefix: str | None,
    text: str | None,
    input_values: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
) -> RunSearch:
    for pair in input_values:
        if not pair.partition("=")[1]:
            raise click.UsageError(f"--input {pair!r}: expected path=value, such as order.id=A-17")
    return RunSearch(
        status=_expand(status), workflow=workflow, id=id_prefix, q=text, input=input_values, since=since, until=until
    )


def _expand(statuses: tuple[str, ...]) -> tuple[str, ...]:
    """`waiting` is whatever a run can wait for."""
    waiting = tuple(status.value for status in RunStatus if status.startswith("waiting"))
    found = [each for one in statuses for each in (waiting if one == "waiting" else (one,))]
    return tuple(dict.fromkeys(found))
