"""What can be done with runs, one or many: `edda runs cancel|retry|resume|delete`."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

import click
from msgspec.structs import replace

from edda.cli.target import Target, target_options
from edda.control.controller import Controller
from edda.control.views import ActionResult, BulkOrder, RetryOrder, RunSearch

from .options import search_options
from .output import single_line

_ids = click.argument("ids", metavar="[ID]...", nargs=-1)
_yes = click.option("--yes", is_flag=True, help="Do not ask, however many they are.")

One = Callable[[Controller, str], Awaitable[ActionResult]]


@click.command()
@target_options
@_ids
@search_options
@click.option("--reason", default="cancelled", show_default=True, help="What the runs are told.")
@_yes
def cancel(target: Target, ids: tuple[str, ...], search: RunSearch, reason: str, yes: bool) -> None:
    """Ask runs to stop: those with the ids, or all that the options find. They undo what they did."""
    order = BulkOrder("cancel", reason=reason)
    _act(target, order, ids, search, yes, lambda controller, run_id: controller.cancel_run(run_id, reason))


@click.command()
@target_options
@_ids
@search_options
@click.option("--from-start", is_flag=True, help="Run every step again, also those that succeeded.")
@_yes
def retry(target: Target, ids: tuple[str, ...], search: RunSearch, from_start: bool, yes: bool) -> None:
    """Let runs that failed or were cancelled go on where they ended; steps that succeeded are not run again."""
    order = BulkOrder("retry", from_start=from_start)
    again = RetryOrder(from_start)
    _act(target, order, ids, search, yes, lambda controller, run_id: controller.retry_run(run_id, again))


@click.command()
@target_options
@_ids
@search_options
@_yes
def resume(target: Target, ids: tuple[str, ...], search: RunSearch, yes: bool) -> None:
    """Replay runs that wait or are parked with their current code: those with the ids, or all that the options find."""
    _act(target, BulkOrder("resume"), ids, search, yes, lambda controller, run_id: controller.resume_run(run_id))


@click.command()
@target_options
@_ids
@search_options
@_yes
def delete(target: Target, ids: tuple[str, ...], search: RunSearch, yes: bool) -> None:
    """Remove runs that have ended, with everything of theirs."""
    _act(target, BulkOrder("delete"), ids, search, yes, lambda controller, run_id: controller.delete_run(run_id))


def _act(target: Target, order: BulkOrder, ids: tuple[str, ...], search: RunSearch, yes: bool, one: One) -> None:
    if bool(ids) == (search != RunSearch()):
        raise click.UsageError(f"say which runs to {order.action}: ids, or options such as --status and --workflow")
    if len(ids) == 1:
        print_result(target.run(lambda controller: one(controller, ids[0])))
        return
    order = replace(order, ids=ids) if ids else replace(order, search=search)
    if not yes:
        found = target.run(lambda controller: controller.act_on_runs(replace(order, count_only=True)))
        if not found.count:
            print_result(found)
            return
        click.confirm(f"{order.action} {found.count} {'run' if found.count == 1 else 'runs'}?", abort=True, err=True)
    print_result(target.run(lambda controller: controller.act_on_runs(order)))


def print_result(done: ActionResult) -> None:
    """What came of it; exit 1 if nothing did."""
    click.echo(single_line(done.words), err=not done.done)
    if not done.done:
        sys.exit(1)
