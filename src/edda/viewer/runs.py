"""Pages of runs: the list, one run with its timeline and history, forms for its input and its waits, actions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from edda.control.code_graph import Structure
from edda.control.controller import Controller
from edda.control.views import (
    ActionResult,
    BulkRequest,
    EntryView,
    EventRequest,
    HistorySearch,
    MessageRequest,
    Page,
    RetryRequest,
    RunDetail,
    RunSearch,
    StartRequest,
    Timeline,
    WaitView,
)
from edda.core.channels import ChannelMode
from edda.errors import ArgumentError, EddaError, InstanceConflictError, NotFoundError
from edda.viewer import flowchart, waterfall
from edda.viewer.flowchart import Graph
from edda.viewer.forms.schema import FormResult, read_form, show_form
from edda.viewer.forms.widgets import FormField
from edda.viewer.request import Download, PageRequest, QueryParams, Redirect, Rendered, Reply
from edda.viewer.templating import GROUPS, format_interval


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a long list that a page shows."""

    first: int
    """Index of its first item."""
    count: int
    total: int
    max_count: int

    @property
    def is_part(self) -> bool:
        return self.count < self.total

    @property
    def last(self) -> int:
        return self.first + self.count

    @property
    def links(self) -> tuple[tuple[str, int], ...]:
        """The other parts: word and first index."""
        end = max(0, self.total - self.max_count)
        back = (("first", 0), ("earlier", max(0, self.first - self.max_count))) if self.first else ()
        return back + ((("later", self.last), ("last", end)) if self.last < self.total else ())


_PAGE = 50
_MAX_BARS = 200
_MAX_ENTRIES = 200
_SEARCH = ("status", "workflow", "id", "q", "input", "since", "until", "parent")


@dataclass(frozen=True, slots=True)
class Action:
    """What the confirmation page of an action shows."""

    title: str
    warning: str
    button: str
    is_destructive: bool = False


ACTIONS = {
    "cancel": Action("Cancel", "Its code is cancelled: finally blocks and compensations run.", "Cancel the run"),
    "retry": Action("Retry", "It continues where it ended; steps that succeeded are not run again.", "Retry the run"),
    "resume": Action(
        "Resume",
        "It is replayed now with its current code, and waits again if that code still waits.",
        "Resume the run",
    ),
    "delete": Action(
        "Delete", "The run, its history, its result and its messages are deleted.", "Delete the run", True
    ),
}


# The list


async def show_runs(request: PageRequest, control: Controller) -> Reply:
    search = read_search(request.query)
    page, counts = await asyncio.gather(control.list_runs(search), control.count_runs(search))
    chips = [(group, sum(counts.get(one, 0) for one in group.statuses)) for group in GROUPS]
    filters = request.query.without("cursor", "status")
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


async def bulk_form(request: PageRequest, control: Controller) -> Reply:
    bulk = _bulk_request(request.query, count_only=True)
    counted = await control.act_on_runs(bulk)
    return Rendered(
        "bulk.html", {"bulk": bulk, "count": counted.count, "action": ACTIONS[bulk.action], "fields": request.query}
    )


async def submit_bulk(request: PageRequest, control: Controller) -> Reply:
    done = await control.act_on_runs(_bulk_request(request.form, count_only=False))
    back = QueryParams(tuple(pair for pair in request.form.pairs if pair[0] in _SEARCH))
    return Redirect(request.link("runs", query=back), done.words)


def _bulk_request(fields: QueryParams, *, count_only: bool) -> BulkRequest:
    action = fields.get("action") or ""
    if action not in ACTIONS:
        raise ArgumentError(f"action={action!r}: expected one of {', '.join(ACTIONS)}")
    ids = fields.all("run")
    every = fields.get("every") is not None
    if not ids and not every:
        raise ArgumentError("no run was selected: select some, or all that match the filter")
    return BulkRequest(
        action,
        ids=() if every else ids,
        search=read_search(fields.without("cursor")) if every else None,
        count_only=count_only,
        from_start=fields.get("from_start") is not None,
        reason=fields.get("reason") or "cancelled",
    )


# One run


async def show_run(request: PageRequest, control: Controller) -> Reply:
    run_id, view = request.parts[1], request.query.get("view") or "timeline"
    generation = request.query.number("generation")
    values: dict[str, Any] = {"view": view, "generation": generation}
    if view == "history":
        search = HistorySearch(generation, cursor=request.query.get("cursor"), limit=_MAX_ENTRIES)
        detail = await control.get_run(run_id)
        values |= _history_values(detail, generation, await control.get_history(run_id, search))
    elif view == "json":
        detail = await control.get_run(run_id)
        values["record"] = msgspec.to_builtins(detail)
    else:
        detail, timeline = await control.get_run_and_timeline(run_id, generation)
        values |= _timeline_values(request, timeline)
        if view == "graph":
            values["chart"] = await _flow_chart(control, detail, timeline)
        values |= await _selected_step(request, control, timeline)
    return Rendered("run.html", values | {"detail": detail, "wait_forms": wait_forms(detail)})


def _timeline_values(request: PageRequest, timeline: Timeline) -> dict[str, Any]:
    begin = request.query.number("from")
    first = max(0, len(timeline.bars) - _MAX_BARS) if begin is None else begin
    shown = _part_of(timeline, first)
    even = request.query.get("scale") == "even"
    window = Window(first, len(shown.bars), len(timeline.bars), _MAX_BARS)
    after = format_interval(timeline.since, shown.since)
    return {"drawing": waterfall.draw(shown, even=even), "window": window, "after": after, "even": even}


def _part_of(timeline: Timeline, first: int) -> Timeline:
    """With the time range of the shown bars: on that of the whole run they could be too thin to see."""
    bars = timeline.bars[first : first + _MAX_BARS]
    if not bars or len(bars) == len(timeline.bars):
        return msgspec.structs.replace(timeline, bars=bars)
    until = max(bar.until or timeline.until for bar in bars)
    return msgspec.structs.replace(timeline, bars=bars, since=bars[0].since, until=until)


def _history_values(detail: RunDetail, generation: int | None, page: Page[EntryView]) -> dict[str, Any]:
    shown = detail.run.generation if generation is None else generation
    total = next((one.entries for one in detail.generations if one.number == shown), 0)
    first = page.items[0].seq - 1 if page.items else 0
    window = Window(first, len(page.items), max(total, first + len(page.items)), _MAX_ENTRIES)
    return {"history": page.items, "window": window}


async def _selected_step(request: PageRequest, control: Controller, timeline: Timeline) -> dict[str, Any]:
    step = request.query.raw("step")
    bar = next((bar for bar in timeline.bars if bar.step == step), None) if step else None
    if bar is None:
        return {"bar": None}
    before = str(bar.entries[0] - 1) if bar.entries else None  # a wait may have rejected thousands of events before
    search = HistorySearch(timeline.generation, step, cursor=before, limit=_MAX_ENTRIES)
    page = await control.get_history(request.parts[1], search)
    return {"bar": bar, "entries": [entry for entry in page.items if entry.seq in bar.entries]}


async def _flow_chart(control: Controller, detail: RunDetail, timeline: Timeline) -> Graph | None:
    """None if no process has stored the structure of the code, or in a format that this release cannot read."""
    try:
        definition = await control.get_definition(detail.run.workflow)
        structure = msgspec.convert(definition.structure, Structure)
    except (NotFoundError, msgspec.ValidationError):
        return None
    return flowchart.draw(structure, timeline.bars, is_over=detail.run.status == "completed")


async def export_run(request: PageRequest, control: Controller) -> Reply:
    run_id = request.parts[1]
    exported = await control.export_run(run_id)
    return Download(f"{run_id}.json", msgspec.json.format(msgspec.json.encode(exported), indent=2))


async def action_form(request: PageRequest, control: Controller) -> Reply:
    name = request.parts[2]
    detail = await control.get_run(request.parts[1])
    return Rendered("action.html", {"detail": detail, "name": name, "action": ACTIONS[name]})


async def submit_action(request: PageRequest, control: Controller) -> Reply:
    run_id, name = request.parts[1:]
    done = await _act(request.form, control, run_id, name)
    if name == "delete":
        return Redirect(request.link("runs"), done.words)
    return Redirect(request.link("runs", run_id), done.words)


async def _act(form: QueryParams, control: Controller, run_id: str, name: str) -> ActionResult:
    match name:
        case "cancel":
            return await control.cancel_run(run_id, form.get("reason") or "cancelled")
        case "retry":
            return await control.retry_run(run_id, RetryRequest(from_start=form.get("from_start") is not None))
        case "resume":
            return await control.resume_run(run_id)
        case _:
            return await control.delete_run(run_id)


# Waits


def wait_forms(detail: RunDetail) -> tuple[tuple[WaitView, FormField], ...]:
    """A form for each event or message that the run waits for."""
    return tuple((wait, show_form(wait.schema, _expand_paths(wait.match))) for wait in detail.waits)


async def submit_wait_form(request: PageRequest, control: Controller) -> Reply:
    run_id, step = request.parts[1], request.form.raw("_step")
    detail = await control.get_run(run_id)
    wait = next((wait for wait in detail.waits if wait.step == step), None)
    if wait is None:
        return Redirect(request.link("runs", run_id), "The run does not wait for this any more: nothing was sent.")
    result = read_form(wait.schema, request.form.pairs)
    if not result.is_valid:
        return _form_with_errors("answer.html", result, detail=detail, wait=wait)
    try:
        done = await _send(control, wait, result.value)
    except ArgumentError as error:
        return _form_with_errors("answer.html", _with_error(result, error), detail=detail, wait=wait)
    return Redirect(request.link("runs", run_id), done.words)


async def _send(control: Controller, wait: WaitView, data: Any) -> ActionResult:
    if wait.kind == "event":
        return await control.send_event(EventRequest(wait.type, data=data, target=wait.run_id))
    target = wait.run_id if wait.mode == ChannelMode.DIRECT else None
    return await control.publish_message(MessageRequest(wait.type, data, target=target))


def _expand_paths(match: Mapping[str, Any]) -> dict[str, Any]:
    """`{"order.id": 7}` becomes `{"order": {"id": 7}}`: the form is filled with the values that the wait matches."""
    data: dict[str, Any] = {}
    for path, value in match.items():
        *outer, last = path.split(".")
        target = data
        for name in outer:
            target = target.setdefault(name, {})
        target[last] = value
    return data


def _form_with_errors(template: str, result: FormResult, **values: Any) -> Rendered:
    return Rendered(template, {"form": result.field, **values}, 200 if result.is_adding else 422)


def _with_error(result: FormResult, error: EddaError) -> FormResult:
    """For errors that the schema does not describe, such as those of a pydantic validator."""
    return replace(result, field=replace(result.field, error=str(error)))


# New runs


async def start_form(request: PageRequest, control: Controller) -> Reply:
    definition = await control.get_definition(request.parts[1])
    return Rendered("start.html", {"definition": definition, "form": show_form(definition.schema, {})})


async def submit_start_form(request: PageRequest, control: Controller) -> Reply:
    definition = await control.get_definition(request.parts[1])
    result = read_form(definition.schema, request.form.pairs)
    if not result.is_valid:
        return _form_with_errors("start.html", result, definition=definition)
    try:
        done = await control.start_run(StartRequest(definition.workflow, result.value or {}, request.form.get("_id")))
    except (ArgumentError, InstanceConflictError) as error:
        return _form_with_errors("start.html", _with_error(result, error), definition=definition)
    return Redirect(request.link("runs", done.subject) if done.subject else request.link("runs"), done.words)
