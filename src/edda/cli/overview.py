"""The whole at a glance: `edda workers|workflows|waits|audit|stats`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta

import click

from edda.cli.target import Target, target_options
from edda.control.views import StatsView

from .options import format_age, format_time, format_timedelta
from .output import Line, StyledText, as_json, limit_option, line, print_rows, read_all, show, show_json
from .render import status_label

_HEIGHTS = " ▁▂▃▄▅▆▇█"


@click.command()
@target_options
@as_json
def workers(target: Target, as_json: bool) -> None:
    """List the workers: who is alive, and how many runs each has in memory."""
    found = target.run(lambda controller: controller.list_workers())
    headers = ("ID", "SERVICE", "HOST", "PID", "STATE", "RUNS", "UP")
    print_rows(
        found,
        as_json,
        headers,
        lambda one: (
            one.id,
            one.service,
            one.host,
            str(one.pid),
            StyledText("● alive", "green") if one.is_alive else StyledText("✖ lost", "red"),
            str(one.runs),
            format_age(one.started_at),
        ),
        "no workers: start one with `edda worker MODULE:APP`",
    )


@click.command()
@target_options
@as_json
def workflows(target: Target, as_json: bool) -> None:
    """List the workflows that workers of this database have known."""
    found = target.run(lambda controller: controller.list_definitions())
    print_rows(
        found,
        as_json,
        ("WORKFLOW", "SERVICE", "SEEN", ""),
        lambda one: (one.workflow, one.service, format_age(one.seen_at), one.documentation),
        "no workflows: a worker tells of its own when it starts",
    )


@click.command()
@target_options
@click.option("--type", "event_type", help="Only waits for events of this type.")
@limit_option
@as_json
def waits(target: Target, event_type: str | None, limit: int, as_json: bool) -> None:
    """List what runs wait for."""
    found = target.run(
        lambda controller: read_all(lambda cursor, size: controller.list_waits(event_type, cursor, size), limit)
    )
    print_rows(
        found,
        as_json,
        ("RUN", "WORKFLOW", "STEP", "KIND", "UNTIL", ""),
        lambda one: (one.run_id, one.workflow, one.step, one.kind, format_time(one.due), one.words),
        "nothing is waited for",
    )


@click.command()
@target_options
@limit_option
@as_json
def audit(target: Target, limit: int, as_json: bool) -> None:
    """List what people did: who, when, what, from where; the newest first."""
    found = target.run(lambda controller: read_all(controller.list_audits, limit))
    print_rows(
        found,
        as_json,
        ("AT", "WHO", "ACTION", "SUBJECT", "FROM", ""),
        lambda one: (format_time(one.at), one.who, one.action, one.subject, one.origin, one.details),
        "nobody has done anything",
    )


@click.command()
@target_options
@as_json
def stats(target: Target, as_json: bool) -> None:
    """Tell how it goes: runs by state, throughput, how long they take, what is behind."""
    found = target.run(lambda controller: controller.get_stats())
    if as_json:
        show_json(found)
    else:
        show(_portray(found))


def _portray(stats: StatsView) -> Iterator[Line]:
    counts = Counter[StyledText]()
    for status, count in stats.counts.items():
        counts[status_label(status)] += count
    for state, count in counts.most_common():
        yield line(StyledText(f"{state.text:<12}", state.style), _number(count))
    for name, style, values in (
        ("completed", "green", [bucket.completed for bucket in stats.buckets]),
        ("failed", "red", [bucket.failed for bucket in stats.buckets]),
    ):
        yield line(StyledText(f"{name:<12}", "dim"), StyledText(sparkline(values), style), f"  {sum(values)}")
    if stats.median_ms is not None and stats.p95_ms is not None:
        yield line(f"half of the runs take up to {_span(stats.median_ms)}, 95 % up to {_span(stats.p95_ms)}")
    yield line(f"{stats.workers} {'worker' if stats.workers == 1 else 'workers'} alive")
    yield from _backlog(stats)


def _backlog(stats: StatsView) -> Iterator[Line]:
    """What is behind; what there is none of is not told."""
    for count, words, since in (
        (stats.ready, "ready for a worker", stats.oldest_ready),
        (stats.parked, "parked", None),
        (stats.outbox_pending, "events on their way to others", stats.oldest_outgoing),
        (stats.outbox_dead, "events that nobody took", None),
        (stats.dispatches, "messages not in the log yet", None),
    ):
        if count:
            oldest = "" if since is None else f", the oldest for {format_age(since, stats.at)}"
            yield line(f"{_number(count)} {words}{oldest}")
    if stats.oldest_wait is not None:
        yield line(f"the oldest run that waits is {format_age(stats.oldest_wait, stats.at)} old")


def _number(count: int) -> str:
    return f"{count} or more" if count >= 10_000 else str(count)


def _span(milliseconds: float) -> str:
    return format_timedelta(timedelta(milliseconds=milliseconds))


def sparkline(values: Sequence[int]) -> str:
    most = max(values, default=0) or 1
    return "".join(_HEIGHTS[-(-value * (len(_HEIGHTS) - 1) // most)] for value in values)
