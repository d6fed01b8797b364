"""`edda serve`, `edda dev` and `edda viewer`: an app, or a page on a database, over HTTP.

uvicorn is imported when one of them runs: it takes more time than all that the other commands need.
"""

from __future__ import annotations

import click

from edda.cli.target import database_option, open_database
from edda.web import WebOptions
from edda.web.security.access import is_loopback_name

from .errors import report_errors
from .target import load_options

_HOST = "127.0.0.1"

_host = click.option("--host", default=_HOST, show_default=True, help="Address to listen on.")
_forwarded = click.option(
    "--forwarded-allow-ips",
    "proxies",
    envvar="FORWARDED_ALLOW_IPS",
    help="Addresses of proxies, with commas, whose X-Forwarded-For is believed; * for all. None by default.",
)
_connections = click.option(
    "--connections-per-address",
    "connections",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    envvar="EDDA_CONNECTIONS_PER_ADDRESS",
    help="Open at once from one address; those of --forwarded-allow-ips may have more. 0: no limit.",
)
_port = click.option("--port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="0: any free one.")


@click.command()
@click.argument("target", metavar="MODULE:APP")
@_host
@_port
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes, each with a worker.")
@_forwarded
@_connections
def serve(target: str, host: str, port: int, workers: int, proxies: str | None, connections: int) -> None:
    """Serve an app over HTTP until SIGTERM or Ctrl-C; requests and steps under way may finish."""
    options = load_options(target)
    _refuse_to_be_open(host, options)
    from . import uvicorn_server

    if workers > 1:
        uvicorn_server.serve_workers(target, host, port, workers, options, uvicorn_server.Limits(proxies, connections))
    else:
        uvicorn_server.serve_one(target, host, port, options, uvicorn_server.Limits(proxies, connections))


@click.command()
@click.argument("target", metavar="MODULE:APP")
@_port
@click.option("--open/--no-open", "opened", default=True, help="Open the page in the browser, or do not.")
def dev(target: str, port: int, opened: bool) -> None:
    """Serve an app on this machine, start again whenever its code changes, and open its page in the browser."""
    options = load_options(target)
    from . import uvicorn_server

    uvicorn_server.serve_with_reload(target, _HOST, port, options, opened=opened)


@click.command()
@database_option
@_host
@_port
@_forwarded
@_connections
@click.option("--read-only", is_flag=True, help="For looking only: nothing can be changed.")
@click.option("--open/--no-open", "opened", default=False, help="Open the page in the browser, or do not.")
def viewer(
    url: str, host: str, port: int, proxies: str | None, connections: int, read_only: bool, opened: bool
) -> None:
    """Serve the page alone, on a database whose workers run elsewhere."""
    with report_errors():
        app = open_database(url, web=WebOptions(read_only=read_only))
    _refuse_to_be_open(host, app.web_options)
    from . import uvicorn_server

    uvicorn_server.serve_one(
        app, host, port, app.web_options, uvicorn_server.Limits(proxies, connections), opened=opened
    )


def _refuse_to_be_open(host: str, options: WebOptions) -> None:
    if options.local_only and not is_loopback_name(host):
        raise click.UsageError(
            f"--host {host} can be reached by others, and there are no tokens: give EddaApp(tokens=...) or EDDA_TOKENS "
            '(name:scope+scope:secret,...), or EddaApp(auth="none") to serve everybody on purpose'
        )
