"""`edda outbox`: events on their way to others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import click

from edda.cli.signals import stop_event
from edda.core.model import OutgoingRecord, OutgoingState
from edda.databases import open_storage
from edda.errors import EddaError
from edda.relaying import OutboxRelayer
from edda.storage.ports import Storage

T = TypeVar("T")

_PAGE = 500

_database = click.option(
    "--db", "url", envvar="EDDA_DB_URL", default="sqlite:///edda.db", show_default=True, help="Database URL."
)


@click.group()
def outbox() -> None:
    """Events on their way to others: look at them, try dead ones again, send them."""


@outbox.command("list")
@_database
@click.option("--state", type=click.Choice([state.value for state in OutgoingState]), help="Only those in this state.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many.")
def list_events(url: str, state: str | None, limit: int) -> None:
    """List events, the oldest first: state, tries, type, key, id, and why it was not taken."""
    wanted = None if state is None else OutgoingState(state)
    found = _run(_with_storage(url, lambda storage: _find(storage, wanted, limit)))
    for record in found:
        click.echo(_describe(record))
    if not found:
        click.echo("no events")


@outbox.command()
@_database
@click.argument("ids", metavar="ID...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that are dead.")
def retry(url: str, ids: tuple[str, ...], every: bool) -> None:
    """Have dead events sent again, from the first try on."""
    if bool(ids) == every:
        raise click.UsageError("give the ids of dead events, or --all")
    count = _run(_with_storage(url, lambda storage: _retry(storage, None if every else ids)))
    click.echo(f"{count} dead {'event is' if count == 1 else 'events are'} sent again")


@outbox.command()
@_database
@click.option("--broker-url", required=True, help="Where they go: http://..., https://... or nats://host:port/stream.")
@click.option("--secret-env", metavar="NAME", help="Environment variable with the secrets that sign them.")
@click.option("--grace", type=float, default=10.0, show_default=True, help="Seconds for those on their way at SIGTERM.")
def relay(url: str, broker_url: str, secret_env: str | None, grace: float) -> None:
    """Send the events of a database until SIGTERM or Ctrl-C; a second signal ends it at once."""
    try:
        relayer = OutboxRelayer(url, broker_url, secret=_secrets(secret_env))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    _run(_relay(relayer, grace))


def _secrets(name: str | None) -> list[str] | None:
    if name is None:
        return None
    secrets = os.environ.get(name, "").split()
    if not secrets:
        raise click.UsageError(f"the environment variable {name} is empty: put whsec_... into it")
    return secrets


async def _relay(relayer: OutboxRelayer, grace: float) -> None:
    stop = stop_event()
    await relayer.start()
    click.echo(f"outbox relayer {os.getpid()} is running", err=True)
    await stop.wait()
    await relayer.stop(grace)
    click.echo(f"{relayer.sent} sent, {relayer.postponed} times postponed, {relayer.refused} refused", err=True)


async def _find(storage: Storage, state: OutgoingState | None, limit: int) -> list[OutgoingRecord]:
    found: list[OutgoingRecord] = []
    while len(found) < limit:
        after = found[-1].seq if found else 0
        page = await storage.find_outgoing(state, after, min(limit - len(found), _PAGE))
        found += page
        if not page:
            break
    return found


async def _retry(storage: Storage, ids: tuple[str, ...] | None) -> int:
    count = await storage.retry_outgoing(ids)
    await storage.announce()
    return count


async def _with_storage(url: str, work: Callable[[Storage], Awaitable[T]]) -> T:
    storage = open_storage(url, pool_size=2)
    await storage.open()
    try:
        if pending := await storage.pending_migrations():
            raise click.ClickException(f"the database lacks {', '.join(pending)}: run `edda migrate`")
        return await work(storage)
    finally:
        await storage.close()


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except (EddaError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _describe(record: OutgoingRecord) -> str:
    event = record.event
    parts = [f"{record.state:<7}", f"{record.attempts:>3}", event.type, event.key, event.id]
    return "  ".join([*parts, record.reason] if record.reason else parts)
