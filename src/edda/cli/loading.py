"""Finding what a command is about: MODULE:APP."""

from __future__ import annotations

import importlib
import os
import sys

import click

from edda.app import EddaApp
from edda.web import Web, WebOptions


def load_app(target: str) -> EddaApp:
    app = load(target)
    if not isinstance(app, EddaApp):
        raise click.BadParameter(f"{target!r} is a {type(app).__name__}, not an EddaApp")
    return app


def load_options(target: str) -> WebOptions:
    """How that app wants to be served."""
    match load(target):
        case EddaApp() as app:
            return app.web_options
        case Web() as web:
            return web.options
        case other:
            raise click.BadParameter(
                f"{target!r} is a {type(other).__name__}, not an EddaApp: other ASGI applications need their own server"
            )


def load(target: str) -> object:
    module, separator, attribute = target.partition(":")
    if not separator:
        raise click.BadParameter(f"{target!r}: expected MODULE:APP, such as shop.workflows:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise click.BadParameter(f"{target!r} cannot be loaded: {error}") from error
