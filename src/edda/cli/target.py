"""Whom a command asks: a database, a server, or an app whose code is here."""

from __future__ import annotations

import asyncio
import functools
import getpass
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from edda.app import EddaApp
from edda.cli.complaints import report_errors
from edda.cli.loading import load_app
from edda.control.controller import Controller
from edda.control.remote import RemoteController

T = TypeVar("T")

DEFAULT_URL = "sqlite:///edda.db"

database_option = click.option(
    "--db", "url", envvar="EDDA_DB_URL", default=DEFAULT_URL, show_default=True, help="Database URL."
)
_OPTIONS = (
    database_option,
    click.option("--server", envvar="EDDA_SERVER", help="URL of a server instead, such as https://shop.example."),
    click.option("--token", envvar="EDDA_TOKEN", help="Its token; better in EDDA_TOKEN than on the command line."),
    click.option("--app", "app", metavar="MODULE:APP", help="An app instead: its database, with its code."),
)


@dataclass(frozen=True)
class Target:
    url: str = field(repr=False)  # it may have a password in it
    server: str | None = None
    token: str | None = field(default=None, repr=False)
    app: str | None = None

    def run(self, work: Callable[[Controller], Awaitable[T]], *, worker: bool = False) -> T:
        """Do it there; with a worker beside it, if this is an app."""

        async def run() -> T:
            async with self.open(worker) as controller:
                return await work(controller)

        with report_errors():
            return asyncio.run(run())

    @asynccontextmanager
    async def open(self, worker: bool = False) -> AsyncIterator[Controller]:
        if self.server is not None:
            async with RemoteController(self.server, self.token) as remote:
                yield remote
            return
        app = load_app(self.app) if self.app is not None else open_database(self.url)
        await app.initialize(worker=worker and self.app is not None)
        try:
            yield app.control.with_caller(_user(), "command line")
        finally:
            await app.shutdown()


def open_database(url: str, **options: Any) -> EddaApp:
    """Without a worker and without code: to look at it, and to steer what others run."""
    if (path := missing_sqlite_file(url)) is not None:
        raise ValueError(f"there is no file {path}: give the right one with --db, or make it with `edda migrate`")
    return EddaApp("edda", url, worker=False, workflows=(), auto_migrate=False, pool_size=2, **options)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container whose users have no names
        return f"user {os.getuid()}"


def missing_sqlite_file(url: str) -> str | None:
    """Where a database in a file should be, and is not: opening it would make an empty one."""
    parts = urlsplit(url)
    path = parts.path[1:]
    return path if parts.scheme.startswith("sqlite") and path and not os.path.exists(path) else None


def target_options(work: Callable[..., T]) -> Callable[..., T]:
    """A command that takes a `Target`, and the options that say which."""

    @functools.wraps(work)
    @click.pass_context
    def choose(context: click.Context, /, *args: Any, **values: Any) -> T:
        given = {name: values.pop(name) for name in ("url", "server", "token", "app")}
        return work(_choose(context, **given), *args, **values)

    return functools.reduce(lambda command, option: option(command), reversed(_OPTIONS), choose)


def _choose(context: click.Context, url: str, server: str | None, token: str | None, app: str | None) -> Target:
    """What stands on the command line wins over the environment."""
    written = [name for name in ("url", "server", "app") if _is_written(context, name)]
    if len(written) > 1:
        raise click.UsageError("--db, --server and --app are three ways to say what is meant: give one of them")
    if "url" in written:
        server = app = None
    elif "app" in written:
        server = None
    return Target(url, server, token, app)


def _is_written(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE
