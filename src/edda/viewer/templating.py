"""Jinja templates and static files; states, times, durations, numbers and JSON as the pages show them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from edda.control import status_text
from edda.control.views import BarState
from edda.core.model import MICROSECONDS
from edda.core.states import WAITING, RunStatus

if TYPE_CHECKING:
    from jinja2 import Environment


_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))
_MAX_COUNT = 10_000
_MAX_COLOURED = 60_000
_TOKEN = re.compile(
    r'(?P<key>"(?:[^"\\]|\\.)*")(?=\s*:)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<word>\b(?:true|false|null)\b)'
    r"|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
)


def format_duration(seconds: float) -> str:
    return status_text.format_duration(round(seconds * MICROSECONDS))


def format_interval(since: datetime, until: datetime) -> str:
    return format_duration(max(0.0, (until - since).total_seconds()))


def format_relative(time: datetime, now: datetime) -> str:
    """`just now`, `3 min ago`, `in 2 h`: one unit, as the page keeps updating it."""
    seconds = (now - time).total_seconds()
    size = abs(seconds)
    if size < 5:
        return "just now" if seconds >= 0 else "in a moment"
    amount, unit = int(size), "s"
    for length, name in _UNITS:
        if size >= length:
            amount, unit = int(size // length), name
            break
    return f"{amount} {unit} ago" if seconds >= 0 else f"in {amount} {unit}"


def format_time(time: datetime) -> str:
    """To the millisecond, in UTC."""
    text = time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{text}.{time.microsecond // 1000:03} UTC"


def format_count(count: int) -> str:
    """The queries count up to ten thousand."""
    if count >= _MAX_COUNT:
        return "10 000+"
    return f"{count:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def format_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def tokenize_json(text: str) -> Iterator[tuple[str, str]]:
    """Pairs of kind (key, text, word, number, or empty) and text."""
    if len(text) > _MAX_COLOURED:
        yield "", text
        return
    end = 0
    for found in _TOKEN.finditer(text):
        if found.start() > end:
            yield "", text[end : found.start()]
        yield found.lastgroup or "", found.group()
        end = found.end()
    yield "", text[end:]


@dataclass(frozen=True, slots=True)
class StatusStyle:
    tone: str
    """CSS class of the colour: good, bad, busy, calm, warn, gone."""
    icon: str
    """Name of an icon in `marks.html`."""
    word: str


_RUNS = {
    RunStatus.RUNNING: StatusStyle("busy", "play", "running"),
    RunStatus.WAITING_FOR_EVENT: StatusStyle("calm", "ring", "waits for an event"),
    RunStatus.WAITING_FOR_TIMER: StatusStyle("calm", "clock", "waits for a timer"),
    RunStatus.WAITING_FOR_MESSAGE: StatusStyle("calm", "ring", "waits for a message"),
    RunStatus.WAITING_FOR_CHILD: StatusStyle("calm", "rings", "waits for a child"),
    RunStatus.COMPENSATING: StatusStyle("warn", "back", "undoing"),
    RunStatus.PARKED: StatusStyle("warn", "pause", "parked"),
    RunStatus.COMPLETED: StatusStyle("good", "tick", "completed"),
    RunStatus.FAILED: StatusStyle("bad", "cross", "failed"),
    RunStatus.CANCELLED: StatusStyle("gone", "slash", "cancelled"),
    RunStatus.RECURRED: StatusStyle("gone", "loop", "recurred"),
}
_BARS = {
    BarState.DONE: StatusStyle("good", "tick", "done"),
    BarState.FAILED: StatusStyle("bad", "cross", "failed"),
    BarState.RUNNING: StatusStyle("busy", "play", "running"),
    BarState.WAITING: StatusStyle("calm", "ring", "waiting"),
    BarState.OVER: StatusStyle("gone", "slash", "over"),
}
_OTHERS = {
    "pending": StatusStyle("calm", "ring", "pending"),
    "sending": StatusStyle("busy", "play", "sending"),
    "sent": StatusStyle("good", "tick", "sent"),
    "dead": StatusStyle("bad", "cross", "dead"),
    "alive": StatusStyle("good", "tick", "alive"),
    "lapsed": StatusStyle("bad", "cross", "lapsed"),
}
_STYLES = _OTHERS | {state.value: style for state, style in (*_BARS.items(), *_RUNS.items())}


def style_of(state: str) -> StatusStyle:
    return _STYLES.get(state) or StatusStyle("gone", "ring", state)


@dataclass(frozen=True, slots=True)
class StatusGroup:
    """Statuses that one filter stands for."""

    word: str
    statuses: tuple[str, ...]
    style: StatusStyle


def _group(status: RunStatus, *more: RunStatus, word: str | None = None) -> StatusGroup:
    style = _RUNS[status]
    return StatusGroup(word or style.word, tuple(one.value for one in (status, *more)), style)


GROUPS = (
    _group(RunStatus.FAILED),
    _group(RunStatus.PARKED),
    _group(RunStatus.COMPENSATING),
    _group(RunStatus.RUNNING),
    _group(*(status for status in RunStatus if status in WAITING), word="waiting"),
    _group(RunStatus.COMPLETED),
    _group(RunStatus.CANCELLED),
    _group(RunStatus.RECURRED),
)


TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # not at the top: most processes render no page

    environment = Environment(
        loader=PackageLoader("edda.viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": format_duration,
        "time": format_time,
        "count": format_count,
        "json": format_json,
        "tokens": tokenize_json,
        "style": style_of,
    }
    environment.globals |= {"files_version": _files_version(), "interval": format_interval}
    return environment


def render(template: str, values: Mapping[str, Any]) -> bytes:
    now = datetime.now(UTC)
    context = {"now": now, "relative": lambda time: format_relative(time, now), **values}
    return _environment().get_template(template).render(context).encode("utf-8", "replace")


@cache
def read_file(name: str) -> bytes | None:
    """None if there is no such static file."""
    return next((path.read_bytes() for path in _files() if path.name == name), None)


def _files() -> list[Any]:
    return sorted((files("edda.viewer") / "static").iterdir(), key=lambda path: path.name)


def _files_version() -> str:
    """Part of every link to a static file: it changes with the files, so browsers may cache them forever."""
    content = b"".join(path.read_bytes() for path in _files() if path.is_file())
    return hashlib.sha256(content).hexdigest()[:12]
