"""Moments and stretches of time, as people write and read them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

from edda.control.words import format_duration

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
