"""`edda workers|workflows|waits|audit|stats|graph`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta

import click
import msgspec

from edda.control.code_graph import Node, NodeKind, Structure
from edda.control.status_text import count_of
from edda.control.views import StatsView

from .options import format_age, format_time, format_timedelta
from .output import Line, StyledText, as_json, limit_option, line, print_rows, show, show_json, single_line
from .render import status_label
from .target import CommandTarget, target_options

_HEIGHTS = " ▁▂▃▄▅▆▇█"


@click.command()
@target_options
@as_json
def workers(target: CommandTarget, as_json: bool) -> None:
    """List the workers and how many runs each has claimed."""
    print_rows(
        target.run(lambda controller: controller.list_workers()),
        as_json,
        ("ID", "SERVICE", "HOST", "PID", "STATE", "RUNS", "UP"),
        lambda one: (
            one.id,
            one.service,
            one.host,
            str(one.pid),
            StyledText("● alive", "green") if one.is_alive else StyledText("✖ lost", "red"),
            str(one.runs),
            format_age(one.started_at),
        ),
        "no workers; start one with `edda worker MODULE:APP`",
    )


@click.command()
@target_options
@as_json
def workflows(target: CommandTarget, as_json: bool) -> None:
    """List the workflows that workers have registered."""
    print_rows(
        target.run(lambda controller: controller.list_definitions()),
        as_json,
        ("WORKFLOW", "SERVICE", "SEEN", ""),
        lambda one: (one.workflow, one.service, format_age(one.seen_at), one.documentation),
        "no workflows; a worker registers its workflows when it starts",
    )


@click.command()
@target_options
@click.option("--type", "event_type", help="Only waits for events of this type.")
@limit_option
@as_json
def waits(target: CommandTarget, event_type: str | None, limit: int, as_json: bool) -> None:
    """List the events and messages that runs wait for."""
    print_rows(
        target.read_pages(lambda controller, cursor, size: controller.list_waits(event_type, cursor, size), limit),
        as_json,
        ("RUN", "WORKFLOW", "STEP", "KIND", "UNTIL", ""),
        lambda one: (one.run_id, one.workflow, one.step, one.kind, format_time(one.due), one.words),
        "no run waits for an event or a message",
    )


@click.command()
@target_options
@limit_option
@as_json
def audit(target: CommandTarget, limit: int, as_json: bool) -> None:
    """List the recorded actions, newest first."""
    print_rows(
        target.read_pages(lambda controller, cursor, size: controller.list_audits(cursor, size), limit),
        as_json,
        ("AT", "WHO", "ACTION", "SUBJECT", "FROM", ""),
        lambda one: (format_time(one.at), one.who, one.action, one.subject, one.origin, one.details),
        "no actions",
    )


@click.command()
@target_options
@as_json
def stats(target: CommandTarget, as_json: bool) -> None:
    """Print runs by state, throughput, durations and backlog."""
    found = target.run(lambda controller: controller.get_stats())
    if as_json:
        show_json(found)
    else:
        show(_render_stats(found))


def _render_stats(stats: StatsView) -> Iterator[Line]:
    counts = Counter[StyledText]()
    for status, count in stats.counts.items():
        counts[status_label(status)] += count
    for state, count in counts.most_common():
        yield line(StyledText(f"{state.text:<15}", state.style), _number(count))
    for name, style, values in (
        ("completed", "green", [bucket.completed for bucket in stats.buckets]),
        ("failed", "red", [bucket.failed for bucket in stats.buckets]),
    ):
        yield line(StyledText(f"{name:<15}", "dim"), StyledText(sparkline(values), style), f"  {sum(values)}")
    if stats.median_ms is not None and stats.p95_ms is not None:
        median, p95 = (format_timedelta(timedelta(milliseconds=one)) for one in (stats.median_ms, stats.p95_ms))
        yield line(f"duration: median {median}, 95th percentile {p95}")
    yield line(f"{count_of(stats.workers, 'worker')} alive")
    for count, text, since in (
        (stats.ready, "runs ready for a worker", stats.oldest_ready),
        (stats.parked, "parked runs", None),
        (stats.outbox_pending, "events in the outbox", stats.oldest_outbox),
        (stats.outbox_dead, "dead events in the outbox", None),
        (stats.staged_events, "staged events, not in the event log yet", None),
    ):
        if count:
            oldest = "" if since is None else f", the oldest for {format_age(since, stats.at)}"
            yield line(f"{text}: {_number(count)}{oldest}")
    if stats.oldest_wait is not None:
        yield line(f"the oldest waiting run is {format_age(stats.oldest_wait, stats.at)} old")


def _number(count: int) -> str:
    return f"{count} or more" if count >= 10_000 else str(count)


def sparkline(values: Sequence[int]) -> str:
    largest = max(values, default=0) or 1
    return "".join(_HEIGHTS[-(-value * (len(_HEIGHTS) - 1) // largest)] for value in values)


_MARKS = {
    NodeKind.STEP: ("•", ""),
    NodeKind.TIMER: ("◷", "yellow"),
    NodeKind.EVENT: ("✉", "yellow"),
    NodeKind.MESSAGE: ("✉", "yellow"),
    NodeKind.CHILD: ("↳", "cyan"),
    NodeKind.UNDO: ("↶", "magenta"),
    NodeKind.BRANCH: ("◇", "cyan"),
    NodeKind.LOOP: ("↻", "cyan"),
    NodeKind.PARALLEL: ("∥", "cyan"),
    NodeKind.RACE: ("∥", "cyan"),
    NodeKind.RETURN: ("■", "green"),
    NodeKind.RAISE: ("✖", "red"),
    NodeKind.RECUR: ("↻", "green"),
}
_OWN_LABEL = frozenset({NodeKind.STEP, NodeKind.BRANCH, NodeKind.LOOP, NodeKind.ARM, NodeKind.TRY})
"""Kinds that are drawn without the name of the kind."""


@click.command()
@target_options
@click.argument("workflow", metavar="WORKFLOW")
@as_json
def graph(target: CommandTarget, workflow: str, as_json: bool) -> None:
    """Draw the structure of a workflow's code."""
    definition = target.run(lambda controller: controller.get_definition(workflow))
    if as_json:
        show_json(definition.structure)
    elif definition.structure is None:
        raise click.ClickException(f"{workflow}: the worker that registered it had no source code of it")
    else:
        structure = msgspec.convert(definition.structure, Structure)
        place = f"  {single_line(structure.file)}:{structure.line}"
        show([line(StyledText(single_line(structure.name), "bold"), StyledText(place, "dim"))])
        show(_draw(structure.nodes))


def _draw(nodes: Sequence[Node], indent: str = "") -> Iterator[Line]:
    for node in nodes:
        is_last = node is nodes[-1]
        mark, style = _MARKS.get(node.kind, ("", ""))
        kind = "" if node.kind in _OWN_LABEL else node.kind.value
        text = single_line(" ".join(part for part in (mark, kind, node.name, node.text) if part)) or "then"
        yield line(
            StyledText(f"{indent}{'└─' if is_last else '├─'} ", "dim"),
            StyledText(text, style),
            StyledText(f"  :{node.line}", "dim"),
        )
        yield from _draw(node.children, f"{indent}{'   ' if is_last else '│  '}")
