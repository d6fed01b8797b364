"""A run's timeline, drawn with block characters and scaled to the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from math import ceil

from edda.control.views import Bar, BarState, Timeline

from .options import format_timedelta
from .output import Line, StyledText, display_width, single_line, truncate

_MARKS = {"step": "•", "timer": "◷", "event": "✉", "message": "✉", "child": "↳", "undo": "↶"}
_BLOCKS = {
    BarState.DONE: ("█", "green"),
    BarState.FAILED: ("▓", "red"),
    BarState.RUNNING: ("▒", "cyan"),
    BarState.WAITING: ("░", "yellow"),
    BarState.OVER: ("░", "dim"),
}
_BETWEEN = StyledText("·", "dim")
_WAITS = frozenset({"timer", "event", "message"})
_SHARE = 3
"""Names take at most this part of a line, as a divisor."""


def draw(timeline: Timeline, width: int) -> list[Line]:
    if not timeline.bars:
        return []
    names = [_name(bar) for bar in timeline.bars]
    words = [_tell(bar, timeline.until) for bar in timeline.bars]
    left = min(max(map(display_width, names)), max(width // _SHARE, 10))
    scale = _Scale(timeline.since, timeline.until, max(width - left - max(map(len, words)) - 4, 8))
    return [
        _line(bar, truncate(name, left), left, scale, told)
        for bar, name, told in zip(timeline.bars, names, words, strict=True)
    ]


def legend(timeline: Timeline) -> Line:
    """Of what is in it."""
    parts: list[StyledText] = []
    for state, (block, style) in _BLOCKS.items():
        if any(bar.state is state for bar in timeline.bars):
            parts += [StyledText(block, style), StyledText(f" {state}  ")]
    if any(len(bar.attempts) > 1 for bar in timeline.bars):
        parts += [_BETWEEN, StyledText(" until the next attempt")]
    return tuple(parts)


def _name(bar: Bar) -> str:
    name = f"{_MARKS.get(bar.kind, '•')} {single_line(bar.name)}"
    return f"{name} → {single_line(bar.child)}" if bar.child else name


def _line(bar: Bar, name: str, left: int, scale: _Scale, words: str) -> Line:
    padding = StyledText(" " * (left - display_width(name)) + "  ")
    style = "red" if bar.state is BarState.FAILED else ""
    return (StyledText(name, style), padding, *_cells(bar, scale), StyledText(f"  {words}"))


def _tell(bar: Bar, now: datetime) -> str:
    span = format_timedelta((bar.until or now) - bar.since)
    words = [span]
    if bar.state in {BarState.FAILED, BarState.RUNNING, BarState.WAITING}:
        words.append(bar.state.value)
    if len(bar.attempts) > 1:
        words.append(f"{len(bar.attempts)} attempts")
    if bar.rejected:
        words.append(f"{bar.rejected} rejected")
    return ", ".join(words)


class _Scale:
    def __init__(self, since: datetime, until: datetime, room: int) -> None:
        self.until = until
        self.room = room
        self._since = since
        self._length = max((until - since).total_seconds(), 1e-6)

    def cells(self, since: datetime, until: datetime | None) -> range:
        """At least one, however short it was."""
        first = min(int(self._place(since)), self.room - 1)
        return range(first, max(ceil(self._place(until or self.until)), first + 1))

    def _place(self, moment: datetime) -> float:
        share = (moment - self._since).total_seconds() / self._length
        return min(max(share, 0.0), 1.0) * self.room


def _cells(bar: Bar, scale: _Scale) -> Iterator[StyledText]:
    """One span for each stretch of equal cells."""
    cells = [StyledText(" ")] * scale.room
    _fill(cells, scale, bar.since, bar.until, _BETWEEN if len(bar.attempts) > 1 else _block(bar, bar.state))
    if len(bar.attempts) > 1:
        for attempt in bar.attempts:
            _fill(cells, scale, attempt.since, attempt.until, _block(bar, _state_of(attempt.ok, bar)))
    start = 0
    for end in range(1, len(cells) + 1):
        if end == len(cells) or cells[end] != cells[start]:
            yield StyledText(cells[start].text * (end - start), cells[start].style)
            start = end


def _state_of(ok: bool | None, bar: Bar) -> BarState:
    return bar.state if ok is None else BarState.DONE if ok else BarState.FAILED


def _block(bar: Bar, state: BarState) -> StyledText:
    """What was waited for is hollow, however it ended: nothing was worked on meanwhile."""
    block, style = _BLOCKS[state]
    if bar.kind == "undo" and state is BarState.DONE:
        style = "magenta"
    return StyledText("░" if bar.kind in _WAITS else block, style)


def _fill(cells: list[StyledText], scale: _Scale, since: datetime, until: datetime | None, span: StyledText) -> None:
    for number in scale.cells(since, until):
        cells[number] = span
