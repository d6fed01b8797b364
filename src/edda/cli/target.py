"""What a command works on: an app (MODULE:APP), a database or a server."""

from __future__ import annotations

import asyncio
import functools
import getpass
import importlib
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from edda.app import EddaApp
from edda.control.controller import Controller
from edda.control.remote import RemoteController
from edda.web import WebApp, WebOptions

from .errors import report_errors


def load_app(target: str) -> EddaApp:
    app = load(target)
    if not isinstance(app, EddaApp):
        raise click.BadParameter(f"{target!r} is of type {type(app).__name__}, expected an EddaApp")
    return app


def load_options(target: str) -> WebOptions:
    """How that app wants to be served."""
    match load(target):
        case EddaApp() as app:
            return app.web_options
        case WebApp() as web:
            return web.options
        case other:
            raise click.BadParameter(
                f"{target!r} is a {type(other).__name__}, not an EddaApp: other ASGI applications need their own server"
            )


def load(target: str) -> object:
    module, _, attribute = target.partition(":")
    if not module or not attribute or "/" in module:
        raise click.BadParameter(f"{target!r}: expected MODULE:APP, such as shop.workflows:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises: the line names its file, a traceback would hide it
        raise click.BadParameter(f"{target!r} cannot be loaded: {_explain(module, error)}") from error
    try:
        return getattr(loaded, attribute)
    except AttributeError as error:
        apps = [name for name, value in vars(loaded).items() if isinstance(value, EddaApp)]
        hint = f"; its apps are: {', '.join(apps)}" if apps else "; it has no EddaApp"
        raise click.BadParameter(f"{target!r} cannot be loaded: {error}{hint}") from error


def _explain(module: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and module.endswith(".py"):
        return f"give the module without .py, {module.removesuffix('.py')}:app"
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        return f"there is no module {module!r} in {os.getcwd()} or on the path of Python"
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f" ({one.filename}:{one.lineno})" for one in reversed(frames) if "importlib" not in one.filename), "")
    words = " ".join(str(error).split())
    return words if isinstance(error, ImportError) and not place else f"{type(error).__name__}: {words}{place}"


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
