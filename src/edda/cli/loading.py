"""Finding what a command is about: MODULE:APP."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import click

from edda.app import EddaApp
from edda.web import WebApp, WebOptions


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
