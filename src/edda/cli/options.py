"""Parses options (times, JSON, NAME=VALUE pairs, run filters) and formats times."""

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
from edda.control.views import STATUS_GROUPS, RunSearch
from edda.core.states import RunStatus

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


class TimeParam(click.ParamType[datetime]):
    name = "time"

    def convert(self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        if ago := _AGO.fullmatch(value):
            return datetime.now(UTC) - timedelta(seconds=float(ago[1]) * _UNITS[ago[2]])
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r}: expected a local time such as 2026-11-15T14:30, or an age such as 30m, 2h or 7d")
        return time.astimezone(UTC)


TIME = TimeParam()


def format_timedelta(duration: timedelta) -> str:
    return format_duration(duration // timedelta(microseconds=1))


def format_age(time: datetime | None, now: datetime | None = None) -> str:
    return "" if time is None else format_timedelta((now or datetime.now(UTC)) - time)


def format_time(time: datetime | None) -> str:
    return "" if time is None else time.astimezone().isoformat(" ", "seconds")


def parse_json(option: str, text: str) -> Any:
    """Decodes the text, the content of `@file`, or standard input for `-`."""
    try:
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text("utf-8")
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, OSError, UnicodeError) as error:
        raise click.UsageError(f"{option}: expected JSON, or @file, or - for standard input ({error})") from error


def read_object(option: str, text: str) -> dict[str, Any]:
    value = parse_json(option, text)
    if not isinstance(value, dict):
        raise click.UsageError(f'{option}: expected a JSON object, such as \'{{"order_id": "A-17"}}\'')
    return value


def parse_pairs(option: str, pairs: Iterable[str]) -> dict[str, Any]:
    """Decodes a value as JSON, else takes it as text: `count=3`, `id=A-17`, `id='"17"'`."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise click.UsageError(f"{option} {pair!r}: expected name=value")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found


T = TypeVar("T")

_OPTIONS = (
    click.option(
        "--status",
        multiple=True,
        type=click.Choice([*STATUS_GROUPS, *(status.value for status in RunStatus)]),
        metavar="STATUS",
        help="Only runs with this status, or in the group open, waiting or ended; repeatable.",
    ),
    click.option("--workflow", help="Only runs of this workflow."),
    click.option("--id", "id", metavar="PREFIX", help="Only runs whose id begins with this text."),
    click.option("--text", "q", help="Only runs with this text in the id or in what they wait for."),
    click.option(
        "--input",
        multiple=True,
        metavar="PATH=VALUE",
        help="Only runs whose argument has this value; repeatable.",
    ),
    click.option("--since", type=TIME, help="Only runs created after: 2026-11-15T14:30, or an age such as 2h or 7d."),
    click.option("--until", type=TIME, help="Only runs created before."),
)


def search_options(work: Callable[..., T]) -> Callable[..., T]:
    """Adds the filter options to a command, and passes their values to it as `search`."""

    @functools.wraps(work)
    def search(*args: Any, **values: Any) -> T:
        given = {name: values.pop(name) for name in ("status", "workflow", "id", "q", "input", "since", "until")}
        for pair in given["input"]:
            if "=" not in pair:
                raise click.UsageError(f"--input {pair!r}: expected path=value, such as order.id=A-17")
        return work(*args, search=RunSearch(**given), **values)

    return functools.reduce(lambda command, option: option(command), reversed(_OPTIONS), search)
