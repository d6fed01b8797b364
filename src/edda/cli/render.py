"""A run as text for a terminal; a status is a symbol, a word and a colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edda.control.views import EntryView, ErrorView, RunDetail, RunView, Timeline
from edda.core.states import RunStatus

from .options import format_age, format_time, format_timedelta
from .output import Line, StyledText, line, single_line, strip_control, table, write_json
from .render_timeline import draw, legend

_GLYPHS = {
    RunStatus.RUNNING: ("▶", "running", "cyan"),
    RunStatus.WAITING_FOR_EVENT: ("◷", "waiting", "yellow"),
    RunStatus.WAITING_FOR_TIMER: ("◷", "waiting", "yellow"),
    RunStatus.WAITING_FOR_MESSAGE: ("◷", "waiting", "yellow"),
    RunStatus.WAITING_FOR_CHILD: ("◷", "waiting", "yellow"),
    RunStatus.COMPENSATING: ("↶", "undoing", "magenta"),
    RunStatus.PARKED: ("‖", "parked", "red"),
    RunStatus.COMPLETED: ("✔", "completed", "green"),
    RunStatus.FAILED: ("✖", "failed", "red"),
    RunStatus.CANCELLED: ("⊘", "cancelled", "dim"),
    RunStatus.RECURRED: ("↻", "recurred", "green"),
}


def status_label(status: str) -> StyledText:
    try:
        shape, word, style = _GLYPHS[RunStatus(status)]
    except ValueError:  # of a newer server
        return StyledText(f"? {status}")
    return StyledText(f"{shape} {word}", style)


RUN_HEADERS = ("ID", "WORKFLOW", "STATE", "AGE", "")


def list_runs(runs: Sequence[RunView]) -> list[Line]:
    rows = [(run.id, run.workflow, status_label(run.status), format_age(run.created_at), _words(run)) for run in runs]
    return table(RUN_HEADERS, rows)


def _words(run: RunView) -> str:
    """Without what the state says already."""
    return run.words.removeprefix(run.status).removeprefix(": ").strip()


def render_run(detail: RunDetail, timeline: Timeline, width: int) -> list[Line]:
    lines = [*_head(detail), ()]
    if bars := draw(timeline, width):
        lines += [*bars, (), legend(timeline), ()]
    return [*lines, *_payloads(detail)]


def render_headline(run: RunView) -> Line:
    head = line(StyledText(single_line(run.id), "bold"), f"  {single_line(run.workflow)}  ", status_label(run.status))
    return (*head, StyledText(f"  {single_line(_words(run))}"))


def _head(detail: RunDetail) -> Iterable[Line]:
    run = detail.run
    yield render_headline(run)
    yield line(StyledText(_tell_times(run), "dim"))
    if run.generation:
        yield line(f"generation {run.generation}, of {len(detail.generations)} that are kept")
    if run.deaths:
        yield line(StyledText(f"process deaths without progress: {run.deaths}", "red"))
    if run.parent:
        yield line(f"child of {single_line(run.parent)}")
    for wait in detail.waits:
        yield line(StyledText("◷ ", "yellow"), single_line(wait.words))
    for child in detail.children:
        yield line("↳ ", *render_headline(child))
    if detail.may:
        yield line(StyledText(f"you may {', '.join(detail.may)} it", "dim"))


def _tell_times(run: RunView) -> str:
    told = f"created {format_time(run.created_at)}"
    if run.ended_at is not None:
        took = format_timedelta(run.ended_at - run.created_at)
        return f"{told}, ended {format_time(run.ended_at)} after {took}"
    if run.deadline is not None:
        told += f", to be done by {format_time(run.deadline)}"
    return f"{told}, on worker {single_line(run.owner)}" if run.owner else told


def _payloads(detail: RunDetail) -> Iterable[Line]:
    yield from render_value("input", detail.input)
    if detail.facts:
        yield from render_value("facts", detail.facts)
    if detail.run.status == "completed":
        yield from render_value("result", detail.result)
    if detail.error is not None:
        yield from render_error(detail.error)


def render_value(name: str, value: Any) -> list[Line]:
    first, *rest = strip_control(write_json(value)).splitlines()
    return [line(StyledText(f"{name}: ", "dim"), first), *map(line, rest)]


def render_error(error: ErrorView) -> Iterable[Line]:
    yield line(StyledText("error: ", "red"), error_summary(error))
    if error.traceback:
        yield from (line(StyledText(text, "dim")) for text in strip_control(error.traceback).splitlines())


def error_summary(error: ErrorView) -> str:
    return single_line(f"{error.type}: {error.message}" if error.message else error.type)


def list_entries(entries: Sequence[EntryView]) -> list[Line]:
    rows = [(str(one.seq), format_time(one.at), one.kind, one.step, one.name, *_outcome(one)) for one in entries]
    return table(("SEQ", "AT", "KIND", "STEP", "NAME", "OK", "VALUE"), rows)


def _outcome(entry: EntryView) -> tuple[StyledText, str]:
    mark = StyledText("✔", "green") if entry.ok else StyledText("✖", "red")
    if entry.error is not None:
        return mark, error_summary(entry.error)
    return mark, "" if entry.value is None else single_line(write_json(entry.value))
