"""How times, lengths, numbers and JSON are written for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))
_MOST_COUNTED = 10_000
_MOST_COLOURED = 60_000
_TOKEN = re.compile(
    r'(?P<key>"(?:[^"\\]|\\.)*")(?=\s*:)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<word>\b(?:true|false|null)\b)'
    r"|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
)


def format_duration(seconds: float) -> str:
    """`240 ms`, `3.2 s`, `4 min 10 s`, `2 d 3 h`: two units at most."""
    if seconds < 0.0005:
        return "0 ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for index, (size, unit) in enumerate(_UNITS):
        if seconds >= size:
            smaller, name = _UNITS[index + 1] if index + 1 < len(_UNITS) else (1, "s")
            rest = int(seconds % size // smaller)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{seconds:.0f} s"


def format_interval(since: datetime, until: datetime) -> str:
    return format_duration(max(0.0, (until - since).total_seconds()))


def format_relative(moment: datetime, now: datetime) -> str:
    """`just now`, `3 min ago`, `in 2 h`: one unit, for it goes on changing."""
    seconds = (now - moment).total_seconds()
    size = abs(seconds)
    if size < 5:
        return "just now" if seconds >= 0 else "in a moment"
    amount, unit = int(size), "s"
    for length, name in _UNITS:
        if size >= length:
            amount, unit = int(size // length), name
            break
    return f"{amount} {unit} ago" if seconds >= 0 else f"in {amount} {unit}"


def format_time(moment: datetime) -> str:
    """To the millisecond, in UTC."""
    text = moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{text}.{moment.microsecond // 1000:03} UTC"


def format_count(count: int) -> str:
    """Counting stops at ten thousand."""
    if count >= _MOST_COUNTED:
        return "10 000+"
    return f"{count:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def format_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def tokenize_json(text: str) -> Iterator[tuple[str, str]]:
    """The text in pieces with what each is: key, text, word, number, or nothing of these."""
    if len(text) > _MOST_COLOURED:
        yield "", text
        return
    end = 0
    for found in _TOKEN.finditer(text):
        if found.start() > end:
            yield "", text[end : found.start()]
        yield found.lastgroup or "", found.group()
        end = found.end()
    yield "", text[end:]
