"""`edda migrate`: applies migrations to a database, or prints them."""

from __future__ import annotations

import asyncio
import sys

import click

from edda.databases import open_storage
from edda.storage.shared.migrations import migrations

from .target import database_option, report_errors


@click.command()
@database_option
@click.option("--check", is_flag=True, help="Apply nothing; exit with 1 if a migration is missing.")
@click.option("--sql", is_flag=True, help="Apply nothing; print the SQL statements.")
def migrate(url: str, check: bool, sql: bool) -> None:
    """Update the schema of a database."""
    if check and sql:
        raise click.UsageError("--check, --sql: give one of them")
    with report_errors():
        names = asyncio.run(_migrate(url, dry_run=check or sql))
    if sql:
        # The folder with the migrations has the name of the database.
        kind = url.partition(":")[0].partition("+")[0]
        for migration in migrations({"postgresql": "postgres", "mariadb": "mysql"}.get(kind, kind)):
            if migration.name in names:
                click.echo(f"-- {migration.name}\n{migration.sql.strip()}\n")
        if not names:
            click.echo("-- the schema is up to date")
        return
    for name in names:
        click.echo(f"{'missing' if check else 'applied'} {name}")
    if not names:
        click.echo("the schema is up to date")
    sys.exit(1 if check and names else 0)


async def _migrate(url: str, dry_run: bool) -> tuple[str, ...]:
    storage = open_storage(url)
    await storage.open()
    try:
        return await (storage.pending_migrations() if dry_run else storage.migrate())
    finally:
        await storage.close()
