"""`CommandTarget`: the app (MODULE:APP), database or server that a command uses, and how its errors are printed."""

from __future__ import annotations

import asyncio
import functools
import getpass
import importlib
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from edda.app import EddaApp
from edda.control.controller import Controller
from edda.control.remote import RemoteController
from edda.control.views import ActionResult, Page
from edda.errors import EddaError
from edda.web import WebApp, WebOptions

from .output import print_result, read_all, single_line

T = TypeVar("T")

EXTRAS = {
    "asyncpg": "postgres",
    "asyncmy": "mysql",
    "sqlalchemy": "sqlalchemy",
    "nats-py": "nats",
    "rich": "rich",
    "uvloop": "speed",
    "httptools": "speed",
}


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, by the convention of shells."""


@contextmanager
def report_errors() -> Iterator[None]:
    """Prints an error in one line, and the extra to install if a package is missing. Other exceptions are defects: they
    end the command with a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ImportError as error:
        package = (error.name or "").partition(".")[0].replace("nats", "nats-py")
        if package not in EXTRAS:
            raise
        hint = f"{package} is not installed: pip install 'edda-framework[{EXTRAS[package]}]'"
        raise click.ClickException(hint) from error
    except (EddaError, ValueError, OSError) as error:
        raise click.ClickException(error_text(error)) from error


def error_text(error: BaseException) -> str:
    return single_line(str(error)) or type(error).__name__


def load_app(target: str) -> EddaApp:
    app = load(target)
    if not isinstance(app, EddaApp):
        raise click.BadParameter(f"{target!r} is a {type(app).__name__}, expected an EddaApp")
    return app


def load_options(target: str) -> WebOptions:
    match load(target):
        case EddaApp() as app:
            return app.web_options
        case WebApp() as web:
            return web.options
        case other:
            raise click.BadParameter(
                f"{target!r} is a {type(other).__name__}, expected an EddaApp: serve other ASGI apps with uvicorn"
            )


def load(target: str) -> object:
    module, _, attribute = target.partition(":")
    if not module or not attribute or "/" in module:
        raise click.BadParameter(f"{target!r}: expected MODULE:APP, such as shop.workflows:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # the user's module may raise anything; `_import_error` names its file and line
        raise click.BadParameter(f"{target!r} cannot be loaded: {_import_error(module, error)}") from error
    try:
        return getattr(loaded, attribute)
    except AttributeError as error:
        apps = [name for name, value in vars(loaded).items() if isinstance(value, EddaApp)]
        hint = f"; its apps are: {', '.join(apps)}" if apps else "; it has no EddaApp"
        raise click.BadParameter(f"{target!r} cannot be loaded: {error}{hint}") from error


def _import_error(module: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and module.endswith(".py"):
        return f"expected the module without .py: {module.removesuffix('.py')}:app"
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        return f"no module {module!r} in {os.getcwd()} or on the import path"
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f" ({one.filename}:{one.lineno})" for one in reversed(frames) if "importlib" not in one.filename), "")
    message = " ".join(str(error).split())
    return message if isinstance(error, ImportError) and not place else f"{type(error).__name__}: {message}{place}"


database_option = click.option(
    "--db", "url", envvar="EDDA_DB_URL", default="sqlite:///edda.db", show_default=True, help="Database URL."
)
_OPTIONS = (
    database_option,
    click.option(
        "--server", envvar="EDDA_SERVER", help="URL of a served app to use instead, such as https://shop.example."
    ),
    click.option(
        "--token", envvar="EDDA_TOKEN", help="Token of the server; better in EDDA_TOKEN than on the command line."
    ),
    click.option("--app", "app", metavar="MODULE:APP", help="App to use instead: its database and its code."),
)


@dataclass(frozen=True)
class CommandTarget:
    url: str = field(repr=False)  # may contain a password
    server: str | None = None
    token: str | None = field(default=None, repr=False)
    app: str | None = None

    def run(self, work: Callable[[Controller], Awaitable[T]], *, worker: bool = False) -> T:
        """Opens the controller, calls `work` with it, and closes it; `worker` also runs the worker of an app."""

        async def run() -> T:
            async with self.open(worker) as controller:
                return await work(controller)

        with report_errors():
            return asyncio.run(run())

    def read_pages(
        self, read: Callable[[Controller, str | None, int], Awaitable[Page[T]]], limit: int | None
    ) -> list[T]:
        """`read` gets the cursor and the size of a page; without a limit all pages are read."""
        return self.run(lambda controller: read_all(lambda cursor, size: read(controller, cursor, size), limit))

    def act(self, work: Callable[[Controller], Awaitable[ActionResult]]) -> None:
        """Prints the result; exits with 1 if the action changed nothing."""
        print_result(self.run(work))

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
    """An app without a worker and without workflows."""
    if (path := missing_sqlite_file(url)) is not None:
        raise ValueError(f"the file {path} does not exist: correct --db, or create it with `edda migrate`")
    return EddaApp("edda", url, worker=False, workflows=(), auto_migrate=False, pool_size=2, **options)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the container has no entry for the user in /etc/passwd
        return f"user {os.getuid()}"


def missing_sqlite_file(url: str) -> str | None:
    """The path of a SQLite file that does not exist: opening it would create an empty database."""
    parts = urlsplit(url)
    path = parts.path[1:]
    return path if parts.scheme.startswith("sqlite") and path and not os.path.exists(path) else None


def target_options(work: Callable[..., T]) -> Callable[..., T]:
    """Adds --db, --server, --token and --app to a command, and passes a `CommandTarget` to it."""

    @functools.wraps(work)
    @click.pass_context
    def choose(context: click.Context, /, *args: Any, **values: Any) -> T:
        url, server, token, app = (values.pop(name) for name in ("url", "server", "token", "app"))
        typed = [
            name
            for name in ("url", "server", "app")
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        ]
        if len(typed) > 1:
            raise click.UsageError("--db, --server, --app: give one of them")
        if typed in (["url"], ["app"]):  # the command line has precedence over EDDA_SERVER
            server = None
        return work(CommandTarget(url, server, token, app), *args, **values)

    return functools.reduce(lambda command, option: option(command), reversed(_OPTIONS), choose)
