"""`edda runs`: look at runs, start them, wait for them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
from msgspec import Struct
from msgspec.structs import replace

from edda.cli.target import Target, target_options
from edda.control.controller import Controller
from edda.control.views import EntryView, HistorySearch, RunDetail, RunSearch, StartRequest, Timeline

from .follow import await_end, has_ended, watch_run, watch_runs, write_run, write_runs
from .options import parse_pairs, read_object, search_options
from .output import as_json, limit_option, read_all, show, show_json, single_line, terminal_width, write_json
from .render import error_summary, list_entries, list_runs, render_run
from .run_actions import cancel, delete, resume, retry


class RunReport(Struct, frozen=True, omit_defaults=True):
    """What `edda runs show` shows."""

    detail: RunDetail
    timeline: Timeline
    history: list[EntryView] | None = None


@click.group()
def runs() -> None:
    """Runs of workflows: look at them, start them, wait for them, act on them."""


@runs.command("list")
@target_options
@search_options
@limit_option
@click.option("--all", "every", is_flag=True, help="All of them, however many.")
@as_json
def list_command(target: Target, search: RunSearch, limit: int, every: bool, as_json: bool) -> None:
    """List runs, the newest first."""
    found = target.run(
        lambda controller: read_all(
            lambda cursor, size: controller.list_runs(replace(search, cursor=cursor, limit=size)),
            None if every else limit,
        )
    )
    if as_json:
        show_json(found)
    elif found:
        show(list_runs(found))
    else:
        click.echo("no runs")


@runs.command("show")
@target_options
@click.argument("run_id", metavar="ID")
@click.option("--generation", type=click.IntRange(0), help="An earlier one of a run that recurs.")
@click.option("--history", is_flag=True, help="The lines of the history too.")
@as_json
def show_command(target: Target, run_id: str, generation: int | None, history: bool, as_json: bool) -> None:
    """Show one run: its state in words, its timeline, what it was given and what came of it."""

    async def read(controller: Controller) -> RunReport:
        detail = await controller.get_run(run_id)
        timeline = await controller.get_timeline(run_id, generation)
        return RunReport(detail, timeline, await _read_history(controller, run_id, generation) if history else None)

    picture = target.run(read)
    if as_json:
        show_json(picture)
        return
    show(render_run(picture.detail, picture.timeline, terminal_width()))
    if picture.history is not None:
        show([(), *list_entries(picture.history)])


async def _read_history(controller: Controller, run_id: str, generation: int | None) -> list[EntryView]:
    return await read_all(
        lambda cursor, size: controller.get_history(run_id, HistorySearch(generation, cursor=cursor, limit=size)), None
    )


@runs.command()
@target_options
@click.argument("run_id", metavar="[ID]", required=False)
@search_options
@click.option("--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="Runs in the list.")
@click.option("--json", "as_json", is_flag=True, help="Print each change as JSON on a line.")
def watch(target: Target, run_id: str | None, search: RunSearch, limit: int, as_json: bool) -> None:
    """Follow one run live until it ends (exit 1 if it does not complete), or the list of runs until Ctrl-C."""
    if run_id is None:
        follow_all = write_runs if as_json else watch_runs
        target.run(lambda controller: follow_all(controller, replace(search, limit=limit)))
    else:
        follow = write_run if as_json else watch_run
        _end_as(target.run(lambda controller: follow(controller, run_id)))


@runs.command()
@target_options
@click.argument("workflow", metavar="WORKFLOW")
@click.option("--input", "text", metavar="JSON", help="The arguments as a JSON object, or @file, or - for stdin.")
@click.option("--arg", "pairs", multiple=True, metavar="NAME=VALUE", help="One argument; JSON if it is, else text.")
@click.option("--id", "chosen", help="The run's id; a second start with the same one starts nothing.")
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@click.option("--timeout", type=float, help="Seconds to wait.")
def start(
    target: Target,
    workflow: str,
    text: str | None,
    pairs: tuple[str, ...],
    chosen: str | None,
    wait: bool,
    timeout: float | None,
) -> None:
    """Start a run and print its id. Needs the workflow's code: --app, or a --server that has it.

    With --app and --wait a worker runs in this process meanwhile.
    """
    given = ({} if text is None else read_object("--input", text)) | parse_pairs("--arg", pairs)

    async def begin(controller: Controller) -> RunDetail | None:
        done = await controller.start_run(StartRequest(workflow, given, chosen))
        click.echo(single_line(done.subject or ""), err=wait)
        return await _await_end(controller, done.subject or "", timeout) if wait else None

    if ended := target.run(begin, worker=wait):
        _print_result(ended)


@runs.command()
@target_options
@click.argument("run_id", metavar="ID")
@click.option("--timeout", type=float, help="Seconds to wait; 0: do not.")
def result(target: Target, run_id: str, timeout: float | None) -> None:
    """Wait for a run's end and print its result as JSON; exit 1 if it did not complete."""
    _print_result(target.run(lambda controller: _await_end(controller, run_id, timeout)))


@runs.command()
@target_options
@click.argument("run_id", metavar="ID")
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="A file to write.")
def export(target: Target, run_id: str, output: Path | None) -> None:
    """Write the whole run as JSON: what it is, and the history of every generation."""
    text = write_json(target.run(lambda controller: controller.export_run(run_id)))
    if output is None:
        click.echo(text)
        return
    try:
        output.write_text(f"{text}\n", "utf-8")
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}") from error
    click.echo(f"run {run_id} is in {output}", err=True)


async def _await_end(controller: Controller, run_id: str, timeout: float | None) -> RunDetail:
    """The last look is after the time: 0 looks once."""
    try:
        async with asyncio.timeout(timeout):
            return await await_end(controller, run_id)
    except TimeoutError:
        detail = await controller.get_run(run_id)
        if has_ended(detail.run):
            return detail
        raise TimeoutError(f"run {run_id} has not ended within {timeout:g} s: it {detail.run.words}") from None


def _print_result(detail: RunDetail) -> None:
    if detail.run.status == "completed":
        show_json(detail.result)
    _end_as(detail)


def _end_as(detail: RunDetail) -> None:
    """Whoever waited for a run fails if it did."""
    if detail.run.status == "completed":
        return
    words = detail.run.words if detail.error is None else f"{detail.run.status}: {error_summary(detail.error)}"
    click.echo(single_line(f"run {detail.run.id} {words}"), err=True)
    sys.exit(1)


for _action in (cancel, retry, resume, delete):
    runs.add_command(_action)
