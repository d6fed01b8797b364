"""Parsing options: times and durations, JSON values, key=value pairs, search filters."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from edda.control.status_text import format_duration
from edda.control.views import RunSearch
from edda.core.states import RunStatus

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


class TimeParam(click.ParamType[datetime]):
    name = "moment"

    def convert(self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        if ago := _AGO.fullmatch(value):
            return datetime.now(UTC) - timedelta(seconds=float(ago[1]) * _UNITS[ago[2]])
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r}: expected a time such as 2026-11-15T14:30 (this machine's), or an age: 30m, 2h, 7d")
        return moment.astimezone(UTC)


MOMENT = TimeParam()


def format_timedelta(length: timedelta) -> str:
    return format_duration(length // timedelta(microseconds=1))


def format_age(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago it was; nothing if it never was."""
    return "" if moment is None else format_timedelta((now or datetime.now(UTC)) - moment)


def format_time(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone().isoformat(" ", "seconds")


def parse_json(option: str, text: str) -> Any:
    """`@file` and `-` (standard input) mean what is in there."""
    try:
        return msgspec.json.decode(_read_source(text))
    except (msgspec.DecodeError, OSError, UnicodeError) as error:
        raise click.UsageError(f"{option}: expected JSON, or @file, or - for standard input: {error}") from error


def _read_source(text: str) -> str:
    if text == "-":
        return sys.stdin.read()
    return Path(text[1:]).read_text("utf-8") if text.startswith("@") else text


def read_object(option: str, text: str) -> dict[str, Any]:
    value = parse_json(option, text)
    if not isinstance(value, dict):
        raise click.UsageError(f'{option}: expected a JSON object, such as \'{{"order_id": "A-17"}}\'')
    return value


def parse_pairs(option: str, pairs: Iterable[str]) -> dict[str, Any]:
    """A value that is JSON is taken as such, and everything else as text: `count=3`, `id=A-17`, `id='"17"'`."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise click.UsageError(f"{option} {pair!r}: expected name=value")
        found[name] = _as_value(value)
    return found


def _as_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


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
