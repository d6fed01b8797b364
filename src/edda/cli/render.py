"""Formats a run and its timeline for the terminal; a status is a symbol, a word and a colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from math import ceil
from typing import Any

from edda.control.status_text import count_of
from edda.control.views import Bar, BarState, EntryView, ErrorView, RunDetail, RunView, Timeline
from edda.core.states import RunStatus

from .options import format_age, format_time, format_timedelta
from .output import Line, StyledText, display_width, line, single_line, strip_control, table, truncate, write_json

_LABELS = {
    RunStatus.RUNNING: ("▶", "running", "cyan"),
    RunStatus.WAITING_FOR_EVENT: ("◷", "waiting", "yellow"),
    RunStatus.WAITING_FOR_TIMER: ("◷", "waiting", "yellow"),
    RunStatus.WAITING_FOR_MESSAGE: ("◷", "waiting", "yellow"),
    RunStatus.WAITING_FOR_CHILD: ("◷", "waiting", "yellow"),
    RunStatus.COMPENSATING: ("↶", "compensating", "magenta"),
    RunStatus.PARKED: ("‖", "parked", "red"),
    RunStatus.COMPLETED: ("✔", "completed", "green"),
    RunStatus.FAILED: ("✖", "failed", "red"),
    RunStatus.CANCELLED: ("⊘", "cancelled", "dim"),
    RunStatus.RECURRED: ("↻", "recurred", "green"),
}


def status_label(status: str) -> StyledText:
    try:
        symbol, word, style = _LABELS[RunStatus(status)]
    except ValueError:  # a status of a newer server
        return StyledText(f"? {status}")
    return StyledText(f"{symbol} {word}", style)


RUN_HEADERS = ("ID", "WORKFLOW", "STATE", "AGE", "")


def run_row(run: RunView) -> tuple[str | StyledText, ...]:
    return run.id, run.workflow, status_label(run.status), format_age(run.created_at), _status_detail(run)


def _status_detail(run: RunView) -> str:
    """The status text without the word that the label has."""
    return run.words.removeprefix(run.status).removeprefix(": ").strip()


def render_run(detail: RunDetail, timeline: Timeline, width: int) -> list[Line]:
    lines = [*_head(detail), ()]
    if bars := draw_timeline(timeline, width):
        lines += [*bars, (), _legend(timeline), ()]
    return [*lines, *_payloads(detail)]


def render_headline(run: RunView) -> Line:
    head = line(StyledText(single_line(run.id), "bold"), f"  {single_line(run.workflow)}  ", status_label(run.status))
    return (*head, StyledText(f"  {single_line(_status_detail(run))}"))


def _head(detail: RunDetail) -> Iterable[Line]:
    run = detail.run
    yield render_headline(run)
    yield line(StyledText(_render_times(run), "dim"))
    if run.generation:
        stored = count_of(len(detail.generations), "generation")
        yield line(f"generation {run.generation}, {stored} {'is' if len(detail.generations) == 1 else 'are'} stored")
    if run.deaths:
        yield line(StyledText(f"process deaths without progress: {run.deaths}", "red"))
    if run.parent:
        yield line(f"child of {single_line(run.parent)}")
    for wait in detail.waits:
        yield line(StyledText("◷ ", "yellow"), single_line(wait.words))
    for child in detail.children:
        yield line("↳ ", *render_headline(child))
    if detail.may:
        actions = ("retry --from-start" if one == "retry" and detail.from_start_only else one for one in detail.may)
        yield line(StyledText(f"possible actions: {', '.join(actions)}", "dim"))


def _render_times(run: RunView) -> str:
    text = f"created {format_time(run.created_at)}"
    if run.ended_at is not None:
        duration = format_timedelta(run.ended_at - run.created_at)
        return f"{text}, ended {format_time(run.ended_at)} after {duration}"
    if run.deadline is not None:
        text += f", deadline {format_time(run.deadline)}"
    return f"{text}, on worker {single_line(run.owner)}" if run.owner else text


def _payloads(detail: RunDetail) -> Iterable[Line]:
    yield from render_value("input", detail.input)
    if detail.values:
        yield from render_value("values", detail.values)
    if detail.run.status == "completed":
        yield from render_value("result", detail.result)
    if detail.error is not None:
        yield line(StyledText("error: ", "red"), error_summary(detail.error))
        for text in strip_control(detail.error.traceback or "").splitlines():
            yield line(StyledText(text, "dim"))


def render_value(name: str, value: Any) -> list[Line]:
    first, *rest = strip_control(write_json(value)).splitlines()
    return [line(StyledText(f"{name}: ", "dim"), first), *map(line, rest)]


def error_summary(error: ErrorView) -> str:
    return single_line(f"{error.type}: {error.message}" if error.message else error.type)


def list_entries(entries: Sequence[EntryView]) -> list[Line]:
    rows: list[tuple[str | StyledText, ...]] = []
    for one in entries:
        mark = StyledText("✔", "green") if one.ok else StyledText("✖", "red")
        value = "" if one.value is None else write_json(one.value)
        outcome = value if one.error is None else error_summary(one.error)
        rows.append((str(one.seq), format_time(one.at), one.kind, one.step, one.name, mark, outcome))
    return table(("SEQ", "AT", "KIND", "STEP", "NAME", "OK", "VALUE"), rows)


_MARKS = {"step": "•", "timer": "◷", "event": "✉", "message": "✉", "child": "↳", "undo": "↶"}
_BLOCKS = {
    BarState.DONE: ("█", "green"),
    BarState.FAILED: ("▓", "red"),
    BarState.RUNNING: ("▒", "cyan"),
    BarState.WAITING: ("░", "yellow"),
    BarState.OVER: ("░", "dim"),
}
_BETWEEN_ATTEMPTS = StyledText("·", "dim")
_WAITS = frozenset({"timer", "event", "message"})
_NAME_SHARE = 3
"""Names take at most one third of a line."""


def draw_timeline(timeline: Timeline, width: int) -> list[Line]:
    if not timeline.bars:
        return []
    names = [_name(bar) for bar in timeline.bars]
    details = [_detail_text(bar, timeline.until) for bar in timeline.bars]
    left = min(max(map(display_width, names)), max(width // _NAME_SHARE, 10))
    scale = _Scale(timeline.since, timeline.until, max(width - left - max(map(len, details)) - 4, 8))
    lines: list[Line] = []
    for bar, full_name, detail in zip(timeline.bars, names, details, strict=True):
        name = truncate(full_name, left)
        padding = StyledText(" " * (left - display_width(name)) + "  ")
        style = "red" if bar.state is BarState.FAILED else ""
        lines.append((StyledText(name, style), padding, *_cells(bar, scale), StyledText(f"  {detail}")))
    return lines


def _legend(timeline: Timeline) -> Line:
    """Explains the blocks that occur in the timeline."""
    parts: list[StyledText] = []
    for state, (block, style) in _BLOCKS.items():
        if any(bar.state is state for bar in timeline.bars):
            parts += [StyledText(block, style), StyledText(f" {state}  ")]
    if any(len(bar.attempts) > 1 for bar in timeline.bars):
        parts += [_BETWEEN_ATTEMPTS, StyledText(" until the next attempt")]
    return tuple(parts)


def _name(bar: Bar) -> str:
    name = f"{_MARKS.get(bar.kind, '•')} {single_line(bar.name)}"
    return f"{name} → {single_line(bar.child)}" if bar.child else name


def _detail_text(bar: Bar, now: datetime) -> str:
    parts = [format_timedelta((bar.until or now) - bar.since)]
    if bar.state in {BarState.FAILED, BarState.RUNNING, BarState.WAITING}:
        parts.append(bar.state.value)
    if len(bar.attempts) > 1:
        parts.append(f"{len(bar.attempts)} attempts")
    if bar.rejected:
        parts.append(f"{bar.rejected} rejected")
    return ", ".join(parts)


class _Scale:
    def __init__(self, since: datetime, until: datetime, width: int) -> None:
        self.until = until
        self.width = width
        self._since = since
        self._length = max((until - since).total_seconds(), 1e-6)

    def cells(self, since: datetime, until: datetime | None) -> range:
        """At least one cell, for any duration."""
        first = min(int(self._position(since)), self.width - 1)
        return range(first, max(ceil(self._position(until or self.until)), first + 1))

    def _position(self, time: datetime) -> float:
        share = (time - self._since).total_seconds() / self._length
        return min(max(share, 0.0), 1.0) * self.width


def _cells(bar: Bar, scale: _Scale) -> Iterator[StyledText]:
    """One span for each run of equal cells."""
    spans = [(bar.since, bar.until, _block(bar, bar.state))]
    if len(bar.attempts) > 1:
        spans = [(bar.since, bar.until, _BETWEEN_ATTEMPTS)]
        for attempt in bar.attempts:
            outcome = BarState.DONE if attempt.ok else BarState.FAILED
            block = _block(bar, bar.state if attempt.ok is None else outcome)
            spans.append((attempt.since, attempt.until, block))
    cells = [StyledText(" ")] * scale.width
    for since, until, span in spans:
        for number in scale.cells(since, until):
            cells[number] = span
    start = 0
    for end in range(1, len(cells) + 1):
        if end == len(cells) or cells[end] != cells[start]:
            yield StyledText(cells[start].text * (end - start), cells[start].style)
            start = end


def _block(bar: Bar, state: BarState) -> StyledText:
    """A wait has light blocks in every state."""
    block, style = _BLOCKS[state]
    if bar.kind == "undo" and state is BarState.DONE:
        style = "magenta"
    return StyledText("░" if bar.kind in _WAITS else block, style)
