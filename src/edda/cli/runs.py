"""`edda runs`: lists, shows, follows and starts runs, and acts on one or many."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
from msgspec import Struct
from msgspec.structs import replace

from edda.control.controller import Controller
from edda.control.status_text import count_of
from edda.control.views import (
    ActionResult,
    BulkRequest,
    EntryView,
    HistorySearch,
    Page,
    RetryRequest,
    RunDetail,
    RunSearch,
    StartRequest,
    Timeline,
)
from edda.core.states import ENDED

from .follow import await_end, watch_run, watch_runs
from .options import parse_pairs, read_object, search_options
from .output import (
    as_json,
    limit_option,
    print_result,
    print_rows,
    read_all,
    show,
    show_json,
    single_line,
    terminal_width,
    write_json,
)
from .render import RUN_HEADERS, error_summary, list_entries, render_run, run_row
from .target import CommandTarget, target_options


class RunReport(Struct, frozen=True, omit_defaults=True):
    """The JSON of `edda runs show`."""

    detail: RunDetail
    timeline: Timeline
    history: list[EntryView] | None = None


@click.group()
def runs() -> None:
    """List, show, follow and start runs, and act on them."""


@runs.command("list")
@target_options
@search_options
@limit_option
@click.option("--all", "every", is_flag=True, help="All of them, without a limit.")
@as_json
def list_command(target: CommandTarget, search: RunSearch, limit: int, every: bool, as_json: bool) -> None:
    """List runs, newest first."""
    found = target.read_pages(
        lambda controller, cursor, size: controller.list_runs(replace(search, cursor=cursor, limit=size)),
        None if every else limit,
    )
    print_rows(found, as_json, RUN_HEADERS, run_row, "no runs")


@runs.command("show")
@target_options
@click.argument("run_id", metavar="ID")
@click.option("--generation", type=click.IntRange(0), help="An earlier generation of a run; the first is 0.")
@click.option("--history", is_flag=True, help="Also print the history entries.")
@as_json
def show_command(target: CommandTarget, run_id: str, generation: int | None, history: bool, as_json: bool) -> None:
    """Show one run.

    Prints its state, its timeline, its input, and its result or error.
    """

    async def read(controller: Controller) -> RunReport:
        detail = await controller.get_run(run_id)
        timeline = await controller.get_timeline(run_id, generation)
        if not history:
            return RunReport(detail, timeline)

        async def read_page(cursor: str | None, size: int) -> Page[EntryView]:
            return await controller.get_history(run_id, HistorySearch(generation, cursor=cursor, limit=size))

        return RunReport(detail, timeline, await read_all(read_page, None))

    report = target.run(read)
    if as_json:
        show_json(report)
        return
    show(render_run(report.detail, report.timeline, terminal_width()))
    if report.history is not None:
        show([(), *list_entries(report.history)])


@runs.command()
@target_options
@click.argument("run_id", metavar="[ID]", required=False)
@search_options
@click.option(
    "--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="Maximum number of runs in the list."
)
@click.option("--json", "as_json", is_flag=True, help="Print each change as JSON on a line.")
def watch(target: CommandTarget, run_id: str | None, search: RunSearch, limit: int, as_json: bool) -> None:
    """Follow one run, or the list of runs.

    Ends with the run, with exit code 1 if it does not complete; the list ends with Ctrl-C.
    """
    if run_id is None:
        target.run(lambda controller: watch_runs(controller, replace(search, limit=limit), as_json))
    else:
        _exit_unless_completed(target.run(lambda controller: watch_run(controller, run_id, as_json)))


@runs.command()
@target_options
@click.argument("workflow", metavar="WORKFLOW")
@click.option(
    "--input", "text", metavar="JSON", help="The arguments as a JSON object, or @file, or - for standard input."
)
@click.option("--arg", "pairs", multiple=True, metavar="NAME=VALUE", help="One argument: JSON, else text; repeatable.")
@click.option("--id", "chosen", help="The id of the run; a second start with the same id has no effect.")
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait.")
def start(
    target: CommandTarget,
    workflow: str,
    text: str | None,
    pairs: tuple[str, ...],
    chosen: str | None,
    wait: bool,
    timeout: float | None,
) -> None:
    """Start a run and print its id.

    Needs the code of the workflow: --app, or a --server that has it. With --app and --wait, a worker runs in this
    process until the run ends.
    """
    if target.app is None and target.server is None:
        raise click.UsageError(
            f"starting {workflow} needs its code, which a database does not have: pass --app MODULE:APP, such as --app "
            "shop.workflows:app, or --server with the URL of an app that has it"
        )
    given = ({} if text is None else read_object("--input", text)) | parse_pairs("--arg", pairs)

    async def begin(controller: Controller) -> RunDetail | None:
        started = await controller.start_run(StartRequest(workflow, given, chosen))
        click.echo(single_line(started.subject or ""), err=wait)
        return await _await_end(controller, started.subject or "", timeout) if wait else None

    if ended := target.run(begin, worker=wait):
        _print_result(ended)


@runs.command()
@target_options
@click.argument("run_id", metavar="ID")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait; 0: do not wait.")
def result(target: CommandTarget, run_id: str, timeout: float | None) -> None:
    """Wait until a run ends, and print its result as JSON.

    Exits with 1 if the run did not complete.
    """
    _print_result(target.run(lambda controller: _await_end(controller, run_id, timeout)))


@runs.command()
@target_options
@click.argument("run_id", metavar="ID")
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="File to write; default: standard output."
)
def export(target: CommandTarget, run_id: str, output: Path | None) -> None:
    """Write a run as JSON, with the history of every generation."""
    text = write_json(target.run(lambda controller: controller.export_run(run_id)))
    if output is None:
        click.echo(text)
        return
    try:
        output.write_text(f"{text}\n", "utf-8")
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}") from error
    click.echo(f"wrote run {run_id} to {output}", err=True)


async def _await_end(controller: Controller, run_id: str, timeout: float | None) -> RunDetail:
    """Reads the run once more after the time-out: 0 reads it once."""
    try:
        async with asyncio.timeout(timeout):
            return await await_end(controller, run_id)
    except TimeoutError:
        detail = await controller.get_run(run_id)
        if detail.run.status in ENDED:
            return detail
        raise TimeoutError(f"run {run_id} has not ended within {timeout:g} s: it {detail.run.words}") from None


def _print_result(detail: RunDetail) -> None:
    if detail.run.status == "completed":
        show_json(detail.result)
    _exit_unless_completed(detail)


def _exit_unless_completed(detail: RunDetail) -> None:
    if detail.run.status == "completed":
        return
    text = detail.run.words if detail.error is None else f"{detail.run.status}: {error_summary(detail.error)}"
    click.echo(single_line(f"run {detail.run.id} {text}"), err=True)
    sys.exit(1)


# Actions


def _action(work: Callable[..., None]) -> click.Command:
    """A command on the runs with the ids, or on all that the filter options find."""
    work = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")(work)
    work = click.argument("ids", metavar="[ID]...", nargs=-1)(search_options(work))
    return runs.command()(target_options(work))


@_action
@click.option("--reason", default="cancelled", show_default=True, help="The reason that is recorded.")
def cancel(target: CommandTarget, ids: tuple[str, ...], search: RunSearch, reason: str, yes: bool) -> None:
    """Cancel runs.

    Cancels the runs with the ids, or all that the options find. Their compensations run.
    """
    request = BulkRequest("cancel", reason=reason)
    _act(target, request, ids, search, yes, lambda controller, run_id: controller.cancel_run(run_id, reason))


@_action
@click.option("--from-start", is_flag=True, help="Run every step again, including those that succeeded.")
def retry(target: CommandTarget, ids: tuple[str, ...], search: RunSearch, from_start: bool, yes: bool) -> None:
    """Continue runs that failed or were cancelled.

    Continues the runs with the ids, or all that the options find. Steps that succeeded do not run again.
    """
    request, again = BulkRequest("retry", from_start=from_start), RetryRequest(from_start)
    _act(target, request, ids, search, yes, lambda controller, run_id: controller.retry_run(run_id, again))


@_action
def resume(target: CommandTarget, ids: tuple[str, ...], search: RunSearch, yes: bool) -> None:
    """Replay waiting or parked runs with their current code.

    Replays the runs with the ids, or all that the options find.
    """
    _act(target, BulkRequest("resume"), ids, search, yes, lambda controller, run_id: controller.resume_run(run_id))


@_action
def delete(target: CommandTarget, ids: tuple[str, ...], search: RunSearch, yes: bool) -> None:
    """Delete ended runs with all their data.

    Deletes the runs with the ids, or all that the options find.
    """
    _act(target, BulkRequest("delete"), ids, search, yes, lambda controller, run_id: controller.delete_run(run_id))


def _act(
    target: CommandTarget,
    request: BulkRequest,
    ids: tuple[str, ...],
    search: RunSearch,
    yes: bool,
    act: Callable[[Controller, str], Awaitable[ActionResult]],
) -> None:
    if bool(ids) == (search != RunSearch()):
        raise click.UsageError(
            f"which runs to {request.action}: give either ids, or options such as --status and --workflow"
        )
    if len(ids) == 1:
        target.act(lambda controller: act(controller, ids[0]))
        return
    request = replace(request, ids=ids) if ids else replace(request, search=search)
    if not yes:
        found = target.run(lambda controller: controller.act_on_runs(replace(request, count_only=True)))
        if not found.count:
            print_result(found)
            return
        click.confirm(f"{request.action} {count_of(found.count, 'run')}?", abort=True, err=True)
    target.act(lambda controller: controller.act_on_runs(request))
