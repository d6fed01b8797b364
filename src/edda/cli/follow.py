"""Follows runs: redraws in place on a terminal with rich, else prints a line or a JSON object for each change."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click

from edda.control.controller import Controller
from edda.control.views import BarState, RunDetail, RunSearch, RunView, Timeline
from edda.core.states import ENDED
from edda.errors import StorageUnavailableError

from .output import Line, is_terminal, line, show, single_line, table, terminal_width, write_json
from .render import RUN_HEADERS, render_headline, render_run, run_row

T = TypeVar("T")

Screen = Callable[[Iterable[Line]], None]


async def await_end(controller: Controller, run_id: str) -> RunDetail:
    async def read() -> RunDetail | None:
        detail = await controller.get_run(run_id)
        return detail if detail.run.status in ENDED else None

    return await _poll(controller, read)


async def watch_run(controller: Controller, run_id: str, as_json: bool) -> RunDetail:
    """Returns when the run has ended."""
    printed = _PrintedState()
    with _screen(as_json) as screen:

        async def read() -> RunDetail | None:
            detail = await controller.get_run(run_id)
            if as_json:
                printed.write_changes([detail.run])
            else:
                timeline = await controller.get_timeline(run_id)
                if screen is None:
                    show(printed.changes(detail.run, timeline))
                else:
                    screen(render_run(detail, timeline, terminal_width()))
            return detail if detail.run.status in ENDED else None

        return await _poll(controller, read)


async def watch_runs(controller: Controller, search: RunSearch, as_json: bool) -> None:
    printed = _PrintedState()
    with _screen(as_json) as screen:

        async def read() -> None:
            runs = (await controller.list_runs(search)).items
            if as_json:
                printed.write_changes(reversed(runs))
            elif screen is None:
                show(render_headline(run) for run in reversed(runs) if printed.differs(run))
            else:
                screen(table(RUN_HEADERS, [run_row(run) for run in runs]))

        await _poll(controller, read)


async def _poll(controller: Controller, read: Callable[[], Awaitable[T | None]]) -> T:
    """Calls `read` after each change, until it returns a value."""
    changes = controller.watch()
    try:
        async for _ in changes:
            if (found := await read()) is not None:
                return found
    finally:
        if isinstance(changes, AsyncGenerator):  # closes its connection now, not when the generator is collected
            await changes.aclose()
    raise StorageUnavailableError("the stream of changes has ended, because the database was closed: try again")


class _PrintedState:
    """The last printed state of each run, and of each bar of a single run."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[str, str]] = {}
        self._bars: dict[str, BarState] = {}

    def differs(self, run: RunView) -> bool:
        """Whether the run has changed since the last call."""
        before, self._runs[run.id] = self._runs.get(run.id), (run.status, run.words)
        return before != self._runs[run.id]

    def write_changes(self, runs: Iterable[RunView]) -> None:
        for run in runs:
            if self.differs(run):
                click.echo(write_json(run, indent=-1))

    def changes(self, run: RunView, timeline: Timeline) -> Iterator[Line]:
        for bar in timeline.bars:
            if self._bars.get(bar.step) is not bar.state:
                self._bars[bar.step] = bar.state
                attempts = f", {len(bar.attempts)} attempts" if len(bar.attempts) > 1 else ""
                yield line(f"  {bar.kind} {single_line(bar.name)}: {bar.state}{attempts}")
        if self.differs(run):
            yield render_headline(run)


@contextmanager
def _screen(as_json: bool) -> Iterator[Screen | None]:
    """None if the output is JSON or no terminal, or rich is not installed."""
    if as_json or not is_terminal():
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
