"""`edda channels`: who waits on them, and putting a message on one."""

from __future__ import annotations

import click

from edda.cli.target import Target, target_options
from edda.control.views import MessageOrder

from .options import format_age, parse_json, parse_pairs
from .output import as_json, print_rows
from .run_actions import print_result


@click.group()
def channels() -> None:
    """Channels that runs talk over: look at them, publish a message."""


@channels.command("list")
@target_options
@as_json
def list_command(target: Target, as_json: bool) -> None:
    """List channels, with how many runs wait for their next message."""
    found = target.run(lambda controller: controller.list_channels())
    print_rows(
        found,
        as_json,
        ("CHANNEL", "WAITING", "NEWEST"),
        lambda one: (one.name, str(one.waiting), format_age(one.newest)),
        "no channels",
    )


@channels.command()
@target_options
@click.argument("channel", metavar="NAME")
@click.option("--data", metavar="JSON", help="Its data, or @file, or - for stdin.")
@click.option("--metadata", "pairs", multiple=True, metavar="NAME=VALUE", help="Something about it.")
@click.option("--target", "receiver", metavar="ID", help="The run that alone may receive it.")
def publish(target: Target, channel: str, data: str | None, pairs: tuple[str, ...], receiver: str | None) -> None:
    """Put a message on a channel."""
    value = None if data is None else parse_json("--data", data)
    order = MessageOrder(channel, value, parse_pairs("--metadata", pairs), receiver)
    print_result(target.run(lambda controller: controller.publish_message(order)))
