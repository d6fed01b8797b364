"""`edda events`: what came in, and sending more of it."""

from __future__ import annotations

from datetime import datetime

import click
from msgspec.structs import replace

from edda.cli.target import Target, target_options
from edda.control.views import EventDetail, EventOrder, EventSearch, EventView

from .options import MOMENT, format_age, format_time, parse_json, parse_pairs
from .output import (
    Line,
    StyledText,
    as_json,
    limit_option,
    line,
    or_blank,
    print_rows,
    read_all,
    show,
    show_json,
    single_line,
)
from .render import render_value
from .run_actions import print_result


@click.group()
def events() -> None:
    """Events that came in: look at them, send one, send one again."""


@events.command("list")
@target_options
@click.option("--type", "event_type", help="Only events of this type.")
@click.option("--source", help="Only events from there.")
@click.option("--id", "event_id", help="Only those with this id.")
@click.option("--text", help="Somewhere in the type, the source or the id.")
@click.option("--since", type=MOMENT, help="Received after: 2026-11-15T14:30, or an age such as 2h or 7d.")
@click.option("--until", type=MOMENT, help="Received before.")
@click.option("--messages", is_flag=True, help="Messages of channels instead.")
@limit_option
@as_json
def list_command(
    target: Target,
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
    """List events, the newest first."""
    search = EventSearch(event_type, source, event_id, text, since, until, messages)
    found = target.run(
        lambda controller: read_all(
            lambda cursor, size: controller.list_events(replace(search, cursor=cursor, limit=size)), limit
        )
    )
    print_rows(found, as_json, ("NUMBER", "AGE", "TYPE", "SOURCE", "ID", "TARGET"), _row, "no events")


def _row(event: EventView) -> tuple[str, ...]:
    return (
        str(event.number),
        format_age(event.received_at),
        event.type,
        event.source,
        event.id,
        or_blank(event.target),
    )


@events.command("show")
@target_options
@click.argument("number", type=int, metavar="NUMBER")
@as_json
def show_command(target: Target, number: int, as_json: bool) -> None:
    """Show one event: its attributes, its data, and who got it."""
    detail = target.run(lambda controller: controller.get_event(number))
    if as_json:
        show_json(detail)
    else:
        show(_portray(detail))


def _portray(detail: EventDetail) -> list[Line]:
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
    if not detail.consumers:
        return [*lines, line(StyledText("nobody has got it", "dim"))]
    return [
        *lines,
        *(
            line(
                f"→ {single_line(one.run_id)}  {single_line(one.workflow)}  {single_line(one.step) or 'started by it'}"
            )
            for one in detail.consumers
        ),
    ]


@events.command()
@target_options
@click.argument("event_type", metavar="TYPE")
@click.option("--data", metavar="JSON", help="Its data, or @file, or - for stdin.")
@click.option("--source", default="/edda/cli", show_default=True, help="Whom it comes from.")
@click.option("--id", "event_id", help="Its id; a second event with the same one and source is ignored.")
@click.option("--subject", help="What it is about.")
@click.option("--target", "receiver", metavar="ID", help="The run that alone may receive it.")
@click.option("--extension", "pairs", multiple=True, metavar="NAME=VALUE", help="One more attribute.")
def send(
    target: Target,
    event_type: str,
    data: str | None,
    source: str,
    event_id: str | None,
    subject: str | None,
    receiver: str | None,
    pairs: tuple[str, ...],
) -> None:
    """Send an event to whoever waits for it."""
    value = None if data is None else parse_json("--data", data)
    extensions = parse_pairs("--extension", pairs)
    order = EventOrder(event_type, source, value, event_id, subject, receiver, extensions)
    print_result(target.run(lambda controller: controller.send_event(order)))


@events.command()
@target_options
@click.argument("number", type=int, metavar="NUMBER")
def resend(target: Target, number: int) -> None:
    """Send an event once more, under a new id."""
    print_result(target.run(lambda controller: controller.resend_event(number)))
