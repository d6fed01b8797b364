"""Following runs live: redrawn in place on a terminal with rich, told line by line otherwise."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click

from edda.control.controller import Controller
from edda.control.views import Bar, BarState, RunDetail, RunSearch, RunView, Timeline
from edda.core.states import ENDED
from edda.errors import StorageUnavailableError

from .output import Line, is_terminal, line, show, single_line, terminal_width, write_json
from .render import list_runs, render_headline, render_run

T = TypeVar("T")

Screen = Callable[[Iterable[Line]], None]


def has_ended(run: RunView) -> bool:
    return run.status in ENDED


async def await_end(controller: Controller, run_id: str) -> RunDetail:
    async def look() -> RunDetail | None:
        detail = await controller.get_run(run_id)
        return detail if has_ended(detail.run) else None

    return await _on_change(controller, look)


async def watch_run(controller: Controller, run_id: str) -> RunDetail:
    """Until it ends."""
    told = _PrintedState()
    with _screen() as screen:

        async def look() -> RunDetail | None:
            detail, timeline = await controller.get_run(run_id), await controller.get_timeline(run_id)
            if screen is None:
                show(told.news(detail, timeline))
            else:
                screen(render_run(detail, timeline, terminal_width()))
            return detail if has_ended(detail.run) else None

        return await _on_change(controller, look)


async def watch_runs(controller: Controller, search: RunSearch) -> None:
    """Until Ctrl-C."""
    known: dict[str, RunView] = {}
    with _screen() as screen:

        async def look() -> None:
            runs = (await controller.list_runs(search)).items
            if screen is None:
                show(render_headline(run) for run in reversed(runs) if _differs(run, known.get(run.id)))
            else:
                screen(list_runs(runs))
            known.update((run.id, run) for run in runs)

        await _on_change(controller, look)


async def write_run(controller: Controller, run_id: str) -> RunDetail:
    """As `watch_run`, for programs: one JSON value on a line for each change."""
    known: RunView | None = None

    async def look() -> RunDetail | None:
        nonlocal known
        detail = await controller.get_run(run_id)
        if _differs(detail.run, known):
            _write(detail.run)
        known = detail.run
        return detail if has_ended(detail.run) else None

    return await _on_change(controller, look)


async def write_runs(controller: Controller, search: RunSearch) -> None:
    known: dict[str, RunView] = {}

    async def look() -> None:
        for run in reversed((await controller.list_runs(search)).items):
            if _differs(run, known.get(run.id)):
                _write(run)
            known[run.id] = run

    await _on_change(controller, look)


def _write(run: RunView) -> None:
    click.echo(write_json(run, indent=-1))


async def _on_change(controller: Controller, look: Callable[[], Awaitable[T | None]]) -> T:
    """Look whenever something has changed, until there is an answer."""
    marks = controller.watch()
    try:
        async for _ in marks:
            if (found := await look()) is not None:
                return found
    finally:
        if isinstance(marks, AsyncGenerator):  # what it has open is closed now, not when it is collected
            await marks.aclose()
    raise StorageUnavailableError("nobody tells of changes any more, the server has stopped: ask again")


def _differs(run: RunView, known: RunView | None) -> bool:
    return known is None or (known.status, known.words) != (run.status, run.words)


class _PrintedState:
    """What of a run was said already."""

    def __init__(self) -> None:
        self._run: RunView | None = None
        self._states: dict[str, BarState] = {}

    def news(self, detail: RunDetail, timeline: Timeline) -> Iterator[Line]:
        for bar in timeline.bars:
            if self._states.get(bar.step) is not bar.state:
                self._states[bar.step] = bar.state
                yield _tell_bar(bar)
        if _differs(detail.run, self._run):
            self._run = detail.run
            yield render_headline(detail.run)


def _tell_bar(bar: Bar) -> Line:
    attempts = f", {len(bar.attempts)} attempts" if len(bar.attempts) > 1 else ""
    return line(f"  {bar.kind} {single_line(bar.name)}: {bar.state}{attempts}")


@contextmanager
def _screen() -> Iterator[Screen | None]:
    """None: there is nothing to draw on, or nothing to draw with."""
    if not is_terminal():
        yield None
        return
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        yield None
        return
    with Live(refresh_per_second=4, vertical_overflow="ellipsis") as live:
        yield lambda lines: live.update(
            Text("\n").join(Text.assemble(*((span.text, span.style) for span in one)) for one in lines), refresh=True
        )
