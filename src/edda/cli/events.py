"""`edda events` and `edda channels`: list and send events and messages."""

from __future__ import annotations

from datetime import datetime

import click
from msgspec.structs import replace

from edda.control.views import EventDetail, EventRequest, EventSearch, MessageRequest

from .options import TIME, format_age, format_time, parse_json, parse_pairs
from .output import (
    Line,
    StyledText,
    as_json,
    limit_option,
    line,
    print_rows,
    show,
    show_json,
    single_line,
)
from .render import render_value
from .target import CommandTarget, target_options

_data = click.option("--data", metavar="JSON", help="The data as JSON, or @file, or - for standard input.")
_receiver = click.option("--target", "receiver", metavar="ID", help="The only run that may receive it.")


@click.group()
def events() -> None:
    """List, show and send events."""


@events.command("list")
@target_options
@click.option("--type", "event_type", help="Only events of this type.")
@click.option("--source", help="Only events of this source.")
@click.option("--id", "event_id", help="Only events with this id.")
@click.option("--text", help="Only events with this text in the type, the source or the id.")
@click.option("--since", type=TIME, help="Only events received after: 2026-11-15T14:30, or an age such as 2h or 7d.")
@click.option("--until", type=TIME, help="Only events received before.")
@click.option("--messages", is_flag=True, help="List the messages of channels instead.")
@limit_option
@as_json
def list_command(
    target: CommandTarget,
    event_type: str | None,
    source: str | None,
    event_id: str | None,
    text: str | None,
    since: datetime | None,
    until: datetime | None,
    messages: bool,
    limit: int,
    as_json: bool,
) -> None:
    """List events, newest first."""
    search = EventSearch(event_type, source, event_id, text, since, until, messages)
    print_rows(
        target.read_pages(
            lambda controller, cursor, size: controller.list_events(replace(search, cursor=cursor, limit=size)), limit
        ),
        as_json,
        ("NUMBER", "AGE", "TYPE", "SOURCE", "ID", "TARGET"),
        lambda one: (str(one.number), format_age(one.received_at), one.type, one.source, one.id, one.target or ""),
        "no events",
    )


@events.command("show")
@target_options
@click.argument("number", type=int, metavar="NUMBER")
@as_json
def show_command(target: CommandTarget, number: int, as_json: bool) -> None:
    """Show one event and the runs that received it."""
    detail = target.run(lambda controller: controller.get_event(number))
    if as_json:
        show_json(detail)
    else:
        show(_render_event(detail))


def _render_event(detail: EventDetail) -> list[Line]:
    event = detail.event
    lines = [
        line(
            StyledText(f"{event.number}", "bold"),
            f"  {single_line(event.type)}  {single_line(event.source)}  {single_line(event.id)}",
        ),
        line(StyledText(f"received {format_time(event.received_at)}", "dim")),
        *render_value("attributes", detail.attributes),
        *render_value("data", detail.data),
    ]
    for one in detail.consumers:
        words = (one.run_id, one.workflow, one.step or "started by it")
        lines.append(line(f"→ {'  '.join(map(single_line, words))}"))
    return lines if detail.consumers else [*lines, line(StyledText("no run has received it", "dim"))]


@events.command()
@target_options
@click.argument("event_type", metavar="TYPE")
@_data
@click.option("--source", default="/edda/cli", show_default=True, help="The source of the event.")
@click.option("--id", "event_id", help="The id of the event; a second event with the same id and source is ignored.")
@click.option("--subject", help="The subject of the event.")
@_receiver
@click.option("--extension", "pairs", multiple=True, metavar="NAME=VALUE", help="An extension attribute; repeatable.")
def send(
    target: CommandTarget,
    event_type: str,
    data: str | None,
    source: str,
    event_id: str | None,
    subject: str | None,
    receiver: str | None,
    pairs: tuple[str, ...],
) -> None:
    """Send an event to the runs that wait for it."""
    value = None if data is None else parse_json("--data", data)
    extensions = parse_pairs("--extension", pairs)
    request = EventRequest(event_type, source, value, event_id, subject, receiver, extensions)
    target.act(lambda controller: controller.send_event(request))


@events.command()
@target_options
@click.argument("number", type=int, metavar="NUMBER")
def resend(target: CommandTarget, number: int) -> None:
    """Send an event again, under a new id."""
    target.act(lambda controller: controller.resend_event(number))


@click.group()
def channels() -> None:
    """List channels and publish messages."""


@channels.command("list")
@target_options
@as_json
def list_channels(target: CommandTarget, as_json: bool) -> None:
    """List channels and how many runs wait on each."""
    print_rows(
        target.run(lambda controller: controller.list_channels()),
        as_json,
        ("CHANNEL", "WAITING", "NEWEST"),
        lambda one: (one.name, str(one.waiting), format_age(one.newest)),
        "no channels",
    )


@channels.command()
@target_options
@click.argument("channel", metavar="NAME")
@_data
@click.option("--metadata", "pairs", multiple=True, metavar="NAME=VALUE", help="An entry of the metadata; repeatable.")
@_receiver
def publish(
    target: CommandTarget, channel: str, data: str | None, pairs: tuple[str, ...], receiver: str | None
) -> None:
    """Publish a message on a channel."""
    value = None if data is None else parse_json("--data", data)
    request = MessageRequest(channel, value, parse_pairs("--metadata", pairs), receiver)
    target.act(lambda controller: controller.publish_message(request))
