"""`edda outbox`: lists, retries, deletes and sends the events of the outbox."""

from __future__ import annotations

import asyncio
import os

import click

from edda.control.views import OutboxRequest
from edda.core.model import OutboxState
from edda.outbox import OutboxRelayer

from .output import as_json, show_json, single_line
from .serve import stop_on_signal
from .target import CommandTarget, database_option, report_errors, target_options

_ids = click.argument("ids", metavar="ID...", nargs=-1)
_every = click.option("--all", "every", is_flag=True, help="All dead events.")


@click.group()
def outbox() -> None:
    """List, retry, delete and send events to other systems."""


@outbox.command("list")
@target_options
@click.option("--state", type=click.Choice([state.value for state in OutboxState]), help="Only events in this state.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum number.")
@as_json
def list_command(target: CommandTarget, state: str | None, limit: int, as_json: bool) -> None:
    """List events, oldest first.

    Columns: state, attempts, type, key, id, and the reason of the last failure.
    """
    found = target.read_pages(lambda controller, cursor, size: controller.list_outbox(state, cursor, size), limit)
    if as_json:
        show_json(found)
        return
    for event in found:
        texts = map(single_line, (event.type, event.key, event.id, event.reason or ""))
        click.echo("  ".join([f"{event.state:<7}", f"{event.attempts:>3}", *texts]).rstrip())
    if not found:
        click.echo("no events")


@outbox.command()
@target_options
@_ids
@_every
def retry(target: CommandTarget, ids: tuple[str, ...], every: bool) -> None:
    """Send dead events again.

    Their attempts are counted from 0.
    """
    request = _outbox_request(ids, every)
    click.echo(single_line(target.run(lambda controller: controller.retry_outbox(request)).words))


@outbox.command()
@target_options
@_ids
@_every
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def drop(target: CommandTarget, ids: tuple[str, ...], every: bool, yes: bool) -> None:
    """Delete dead events: they will not be sent."""
    request = _outbox_request(ids, every)
    if not yes and len(ids) != 1:
        click.confirm(f"delete {'all' if every else len(ids)} dead events?", abort=True, err=True)
    click.echo(single_line(target.run(lambda controller: controller.drop_outbox(request)).words))


def _outbox_request(ids: tuple[str, ...], every: bool) -> OutboxRequest:
    if bool(ids) == every:
        raise click.UsageError("which events: give the ids of dead events, or --all")
    return OutboxRequest(ids, every)


@outbox.command()
@database_option
@click.option("--broker-url", required=True, help="The receiver: http://..., https://... or nats://host:port/stream.")
@click.option("--secret-env", metavar="NAME", help="Environment variable with the secrets that sign the events.")
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    help="Seconds that events in progress get at SIGTERM.",
)
def relay(url: str, broker_url: str, secret_env: str | None, grace: float) -> None:
    """Send the events of a database until SIGTERM or Ctrl-C.

    A second signal ends the process immediately.
    """
    secrets = None if secret_env is None else os.environ.get(secret_env, "").split()
    if secrets == []:
        raise click.UsageError(f"--secret-env {secret_env}: the environment variable is empty, expected whsec_...")
    try:
        relayer = OutboxRelayer(url, broker_url, secret=secrets)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with report_errors():
        asyncio.run(_relay(relayer, grace))


async def _relay(relayer: OutboxRelayer, grace: float) -> None:
    stop = stop_on_signal()
    await relayer.start()
    click.echo(f"outbox relayer {os.getpid()} is running", err=True)
    await stop.wait()
    await relayer.stop(grace)
    click.echo(f"{relayer.sent} sent, {relayer.postponed} postponed, {relayer.refused} rejected", err=True)
