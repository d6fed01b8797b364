"""`edda migrate`: the schema of a database."""

from __future__ import annotations

import asyncio
import sys

import click

from edda.cli.target import database_option
from edda.databases import open_storage
from edda.storage.shared.migrations import migrations

from .errors import report_errors


@click.command()
@database_option
@click.option("--check", is_flag=True, help="Apply nothing; exit 1 if something is missing.")
@click.option("--sql", is_flag=True, help="Apply nothing; print the SQL that would run.")
def migrate(url: str, check: bool, sql: bool) -> None:
    """Bring the database's schema up to date."""
    if check and sql:
        raise click.UsageError("--check and --sql are two ways of applying nothing: give one of them")
    with report_errors():
        names = asyncio.run(_migrate(url, only_look=check or sql))
    if sql:
        _print_sql(url, names)
        return
    for name in names:
        click.echo(f"{'missing' if check else 'applied'} {name}")
    if not names:
        click.echo("the schema is up to date")
    sys.exit(1 if check and names else 0)


async def _migrate(url: str, only_look: bool) -> tuple[str, ...]:
    storage = open_storage(url)
    await storage.open()
    try:
        return await (storage.pending_migrations() if only_look else storage.migrate())
    finally:
        await storage.close()


def _print_sql(url: str, names: tuple[str, ...]) -> None:
    if not names:
        click.echo("-- the schema is up to date")
    for migration in migrations(_dialect_of(url)):
        if migration.name in names:
            click.echo(f"-- {migration.name}\n{migration.sql.strip()}\n")


def _dialect_of(url: str) -> str:
    """The folder of its migrations."""
    kind = url.partition(":")[0].partition("+")[0]
    return {"postgresql": "postgres", "mariadb": "mysql"}.get(kind, kind)
