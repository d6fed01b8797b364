"""`edda outbox`: events on their way to others."""

from __future__ import annotations

import asyncio
import os

import click

from edda.cli.target import Target, database_option, target_options
from edda.control.views import OutboxOrder, OutgoingView
from edda.core.model import OutboxState
from edda.outbox_relayer import OutboxRelayer

from .errors import report_errors
from .output import as_json, read_all, show_json, single_line
from .worker import stop_on_signal

_ids = click.argument("ids", metavar="ID...", nargs=-1)
_every = click.option("--all", "every", is_flag=True, help="All that are dead.")


@click.group()
def outbox() -> None:
    """Events on their way to others: look at them, try dead ones again, send them."""


@outbox.command("list")
@target_options
@click.option("--state", type=click.Choice([state.value for state in OutboxState]), help="Only those in this state.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many.")
@as_json
def list_command(target: Target, state: str | None, limit: int, as_json: bool) -> None:
    """List events, the oldest first: state, tries, type, key, id, and why it was not taken."""
    found = target.run(
        lambda controller: read_all(lambda cursor, size: controller.list_outbox(state, cursor, size), limit)
    )
    if as_json:
        show_json(found)
        return
    for event in found:
        click.echo(_describe(event))
    if not found:
        click.echo("no events")


def _describe(event: OutgoingView) -> str:
    parts = [f"{event.state:<7}", f"{event.attempts:>3}", event.type, event.key, event.id]
    return "  ".join(
        single_line(part) if part.strip() == part else part for part in [*parts, event.reason or ""]
    ).rstrip()


@outbox.command()
@target_options
@_ids
@_every
def retry(target: Target, ids: tuple[str, ...], every: bool) -> None:
    """Have dead events sent again, from the first try on."""
    order = _order(ids, every)
    count = target.run(lambda controller: controller.retry_outbox(order)).count
    click.echo(f"{_count(count)} sent again")


@outbox.command()
@target_options
@_ids
@_every
@click.option("--yes", is_flag=True, help="Do not ask.")
def drop(target: Target, ids: tuple[str, ...], every: bool, yes: bool) -> None:
    """Forget dead events: nobody will get them."""
    order = _order(ids, every)
    if not yes and len(ids) != 1:
        click.confirm(f"drop {'all' if every else len(ids)} dead events?", abort=True, err=True)
    count = target.run(lambda controller: controller.drop_outbox(order)).count
    click.echo(f"{_count(count)} dropped")


def _order(ids: tuple[str, ...], every: bool) -> OutboxOrder:
    if bool(ids) == every:
        raise click.UsageError("give the ids of dead events, or --all")
    return OutboxOrder(ids, every)


def _count(count: int) -> str:
    return f"{count} dead {'event is' if count == 1 else 'events are'}"


@outbox.command()
@database_option
@click.option("--broker-url", required=True, help="Where they go: http://..., https://... or nats://host:port/stream.")
@click.option("--secret-env", metavar="NAME", help="Environment variable with the secrets that sign them.")
@click.option("--grace", type=float, default=10.0, show_default=True, help="Seconds for those on their way at SIGTERM.")
def relay(url: str, broker_url: str, secret_env: str | None, grace: float) -> None:
    """Send the events of a database until SIGTERM or Ctrl-C; a second signal ends it at once."""
    try:
        relayer = OutboxRelayer(url, broker_url, secret=_secrets(secret_env))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with report_errors():
        asyncio.run(_relay(relayer, grace))


def _secrets(name: str | None) -> list[str] | None:
    if name is None:
        return None
    secrets = os.environ.get(name, "").split()
    if not secrets:
        raise click.UsageError(f"the environment variable {name} is empty: put whsec_... into it")
    return secrets


async def _relay(relayer: OutboxRelayer, grace: float) -> None:
    stop = stop_on_signal()
    await relayer.start()
    click.echo(f"outbox relayer {os.getpid()} is running", err=True)
    await stop.wait()
    await relayer.stop(grace)
    click.echo(f"{relayer.sent} sent, {relayer.postponed} times postponed, {relayer.refused} refused", err=True)
