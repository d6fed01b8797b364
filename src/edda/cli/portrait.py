"""One run as words and a drawing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edda.cli.drawing import draw, legend
from edda.cli.glyphs import tell_status
from edda.cli.moments import tell_age, tell_moment, tell_span
from edda.cli.terminal import Line, StyledText, clean, flat, line, table, write_json
from edda.control.views import EntryView, ErrorView, RunDetail, RunView, Timeline

RUN_HEADERS = ("ID", "WORKFLOW", "STATE", "AGE", "")


def list_runs(runs: Sequence[RunView]) -> list[Line]:
    rows = [(run.id, run.workflow, tell_status(run.status), tell_age(run.created_at), _words(run)) for run in runs]
    return table(RUN_HEADERS, rows)


def _words(run: RunView) -> str:
    """Without what the state says already."""
    return run.words.removeprefix(run.status).removeprefix(": ").strip()


def portray(detail: RunDetail, timeline: Timeline, width: int) -> list[Line]:
    lines = [*_head(detail), ()]
    if bars := draw(timeline, width):
        lines += [*bars, (), legend(timeline), ()]
    return [*lines, *_payloads(detail)]


def tell_head(run: RunView) -> Line:
    head = line(StyledText(flat(run.id), "bold"), f"  {flat(run.workflow)}  ", tell_status(run.status))
    return (*head, StyledText(f"  {flat(_words(run))}"))


def _head(detail: RunDetail) -> Iterable[Line]:
    run = detail.run
    yield tell_head(run)
    yield line(StyledText(_tell_times(run), "dim"))
    if run.generation:
        yield line(f"generation {run.generation}, of {len(detail.generations)} that are kept")
    if run.deaths:
        yield line(StyledText(f"process deaths without progress: {run.deaths}", "red"))
    if run.parent:
        yield line(f"child of {flat(run.parent)}")
    for wait in detail.waits:
        yield line(StyledText("◷ ", "yellow"), flat(wait.words))
    for child in detail.children:
        yield line("↳ ", *tell_head(child))
    if detail.may:
        yield line(StyledText(f"you may {', '.join(detail.may)} it", "dim"))


def _tell_times(run: RunView) -> str:
    told = f"created {tell_moment(run.created_at)}"
    if run.ended_at is not None:
        took = tell_span(run.ended_at - run.created_at)
        return f"{told}, ended {tell_moment(run.ended_at)} after {took}"
    if run.deadline is not None:
        told += f", to be done by {tell_moment(run.deadline)}"
    return f"{told}, on worker {flat(run.owner)}" if run.owner else told


def _payloads(detail: RunDetail) -> Iterable[Line]:
    yield from payload("input", detail.input)
    if detail.facts:
        yield from payload("facts", detail.facts)
    if detail.run.status == "completed":
        yield from payload("result", detail.result)
    if detail.error is not None:
        yield from tell_error(detail.error)


def payload(name: str, value: Any) -> list[Line]:
    first, *rest = clean(write_json(value)).splitlines()
    return [line(StyledText(f"{name}: ", "dim"), first), *map(line, rest)]


def tell_error(error: ErrorView) -> Iterable[Line]:
    yield line(StyledText("error: ", "red"), summarise(error))
    if error.traceback:
        yield from (line(StyledText(text, "dim")) for text in clean(error.traceback).splitlines())


def summarise(error: ErrorView) -> str:
    return flat(f"{error.type}: {error.message}" if error.message else error.type)


def list_entries(entries: Sequence[EntryView]) -> list[Line]:
    rows = [(str(one.seq), tell_moment(one.at), one.kind, one.step, one.name, *_outcome(one)) for one in entries]
    return table(("SEQ", "AT", "KIND", "STEP", "NAME", "OK", "VALUE"), rows)


def _outcome(entry: EntryView) -> tuple[StyledText, str]:
    mark = StyledText("✔", "green") if entry.ok else StyledText("✖", "red")
    if entry.error is not None:
        return mark, summarise(entry.error)
    return mark, "" if entry.value is None else flat(write_json(entry.value))
