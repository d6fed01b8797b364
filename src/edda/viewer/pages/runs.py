"""Pages of runs: the list, one run, its history in windows, single and bulk actions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from edda.control.controller import Controller
from edda.control.views import (
    ActionResult,
    BulkOrder,
    DefinitionView,
    EntryView,
    HistorySearch,
    Page,
    RetryOrder,
    RunDetail,
    RunSearch,
    Timeline,
)
from edda.errors import ArgumentError, NotFoundError
from edda.viewer.drawing import waterfall
from edda.viewer.drawing.flowchart import draw_chart
from edda.viewer.formatting import format_interval
from edda.viewer.request import Download, PageRequest, QueryParams, Redirect, Rendered, Reply
from edda.viewer.status_style import GROUPS

from .forms import wait_forms


@dataclass(frozen=True, slots=True)
class Window:
    """What is shown of something long."""

    first: int
    """So many come before it."""
    count: int
    total: int
    most: int

    @property
    def is_part(self) -> bool:
        return self.count < self.total

    @property
    def last(self) -> int:
        return self.first + self.count

    @property
    def links(self) -> tuple[tuple[str, int], ...]:
        """Where else one can look, by name: how many come before."""
        end = max(0, self.total - self.most)
        back = (("first", 0), ("earlier", max(0, self.first - self.most))) if self.first else ()
        return back + ((("later", self.last), ("last", end)) if self.last < self.total else ())


_PAGE = 50
_MOST_BARS = 200
_MOST_LINES = 200
"""Of the history, on one page."""
_SEARCH = ("status", "workflow", "id", "q", "input", "since", "until", "parent")


@dataclass(frozen=True, slots=True)
class Action:
    """What a page asks before it does it."""

    title: str
    warning: str
    button: str
    is_destructive: bool = False


ACTIONS = {
    "cancel": Action("Cancel", "The code is told, finally blocks run, and what was done is undone.", "Cancel it"),
    "retry": Action("Retry", "It goes on where it ended; steps that succeeded are not run again.", "Retry it"),
    "resume": Action(
        "Resume",
        "It is replayed now with its current code. If it still has to wait, it waits for what that code asks for.",
        "Resume it",
    ),
    "delete": Action("Delete", "The run goes with its history, its result and its messages.", "Delete it", True),
}


# The list


async def show_runs(visit: PageRequest, control: Controller) -> Reply:
    search = read_search(visit.query)
    page, counts = await asyncio.gather(control.list_runs(search), control.count_runs(search))
    chips = [(group, sum(counts.get(one, 0) for one in group.statuses)) for group in GROUPS]
    filters = visit.query.without("cursor", "status")
    return Rendered(
        "runs.html",
        {"page": page, "search": search, "chips": chips, "is_filtered": bool(filters.pairs), "actions": ACTIONS},
    )


def read_search(query: QueryParams) -> RunSearch:
    return RunSearch(
        status=query.all("status"),
        workflow=query.get("workflow"),
        id=query.get("id"),
        q=query.get("q"),
        input=query.all("input"),
        since=query.time("since"),
        until=query.time("until"),
        parent=query.get("parent"),
        cursor=query.get("cursor"),
        limit=_PAGE,
    )


# Several at once


async def bulk_form(visit: PageRequest, control: Controller) -> Reply:
    order = _bulk_order(visit.query, count_only=True)
    counted = await control.act_on_runs(order)
    return Rendered(
        "bulk.html", {"order": order, "count": counted.count, "action": ACTIONS[order.action], "fields": visit.query}
    )


async def submit_bulk(visit: PageRequest, control: Controller) -> Reply:
    done = await control.act_on_runs(_bulk_order(visit.form, count_only=False))
    back = QueryParams(tuple(pair for pair in visit.form.pairs if pair[0] in _SEARCH))
    return Redirect(visit.link("runs", query=back), done.words)


def _bulk_order(fields: QueryParams, *, count_only: bool) -> BulkOrder:
    action = fields.get("action") or ""
    if action not in ACTIONS:
        raise ArgumentError(f"action={action!r}: expected one of {', '.join(ACTIONS)}")
    ids = fields.all("run")
    every = fields.get("every") is not None
    if not ids and not every:
        raise ArgumentError("no run was chosen: tick some, or take all that the filter finds")
    return BulkOrder(
        action,
        ids=() if every else ids,
        search=read_search(fields.without("cursor")) if every else None,
        count_only=count_only,
        from_start=fields.get("from_start") is not None,
        reason=fields.get("reason") or "cancelled",
    )


# One run


async def show_run(visit: PageRequest, control: Controller) -> Reply:
    run_id = visit.parts[1]
    detail = await control.get_run(run_id)
    view = visit.query.get("view") or "timeline"
    generation = visit.query.number("generation")
    values: dict[str, Any] = {"detail": detail, "view": view, "generation": generation}
    match view:
        case "history":
            search = HistorySearch(generation, cursor=visit.query.get("cursor"), limit=_MOST_LINES)
            values |= _history_values(detail, generation, await control.get_history(run_id, search))
        case "json":
            values |= {"whole": msgspec.to_builtins(detail)}
        case _:
            timeline = await control.get_timeline(run_id, generation)
            values |= _timeline_values(visit, timeline)
            if view == "graph":
                values["chart"] = draw_chart(
                    await _definition(control, detail.run.workflow), timeline, is_over=detail.run.status == "completed"
                )
            values |= await _selected_step(visit, control, timeline)
    return Rendered("run.html", values | {"asked": wait_forms(detail)})


def _timeline_values(visit: PageRequest, timeline: Timeline) -> dict[str, Any]:
    begin = visit.query.number("from")
    first = max(0, len(timeline.bars) - _MOST_BARS) if begin is None else begin
    shown = _part_of(timeline, first)
    even = visit.query.get("scale") == "even"
    stretch = Window(first, len(shown.bars), len(timeline.bars), _MOST_BARS)
    after = format_interval(timeline.since, shown.since)
    return {"drawing": waterfall.draw(shown, even=even), "stretch": stretch, "after": after, "even": even}


def _part_of(timeline: Timeline, first: int) -> Timeline:
    """In its own time: on that of the whole, a few steps of a long run would be one thin line."""
    bars = timeline.bars[first : first + _MOST_BARS]
    if not bars or len(bars) == len(timeline.bars):
        return msgspec.structs.replace(timeline, bars=bars)
    until = max(bar.until or timeline.until for bar in bars)
    return msgspec.structs.replace(timeline, bars=bars, since=bars[0].since, until=until)


def _history_values(detail: RunDetail, generation: int | None, page: Page[EntryView]) -> dict[str, Any]:
    shown = detail.run.generation if generation is None else generation
    total = next((one.entries for one in detail.generations if one.number == shown), 0)
    first = page.items[0].seq - 1 if page.items else 0
    stretch = Window(first, len(page.items), max(total, first + len(page.items)), _MOST_LINES)
    return {"history": page.items, "stretch": stretch}


async def _selected_step(visit: PageRequest, control: Controller, timeline: Timeline) -> dict[str, Any]:
    step = visit.query.raw("step")
    bar = next((bar for bar in timeline.bars if bar.step == step), None) if step else None
    if bar is None:
        return {"bar": None}
    behind = str(bar.entries[0] - 1) if bar.entries else None  # a wait may have rejected thousands before
    search = HistorySearch(timeline.generation, step, cursor=behind, limit=_MOST_LINES)
    lines = await control.get_history(visit.parts[1], search)
    return {"bar": bar, "entries": [entry for entry in lines.items if entry.seq in bar.entries]}


async def _definition(control: Controller, workflow: str) -> DefinitionView | None:
    try:
        return await control.get_definition(workflow)
    except NotFoundError:
        return None


async def export_run(visit: PageRequest, control: Controller) -> Reply:
    run_id = visit.parts[1]
    whole = await control.export_run(run_id)
    return Download(f"{run_id}.json", msgspec.json.format(msgspec.json.encode(whole), indent=2))


async def action_form(visit: PageRequest, control: Controller) -> Reply:
    name = visit.parts[2]
    detail = await control.get_run(visit.parts[1])
    return Rendered("action.html", {"detail": detail, "name": name, "action": ACTIONS[name]})


async def submit_action(visit: PageRequest, control: Controller) -> Reply:
    run_id, name = visit.parts[1:]
    done = await _act(visit.form, control, run_id, name)
    if name == "delete":
        return Redirect(visit.link("runs"), done.words)
    return Redirect(visit.link("runs", run_id), done.words)


async def _act(form: QueryParams, control: Controller, run_id: str, name: str) -> ActionResult:
    match name:
        case "cancel":
            return await control.cancel_run(run_id, form.get("reason") or "cancelled")
        case "retry":
            return await control.retry_run(run_id, RetryOrder(from_start=form.get("from_start") is not None))
        case "resume":
            return await control.resume_run(run_id)
        case _:
            return await control.delete_run(run_id)
