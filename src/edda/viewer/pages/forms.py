"""Forms that ask: for what a run waits for, and for what a workflow is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edda.control.controller import Controller
from edda.control.views import ActionResult, EventOrder, MessageOrder, RunDetail, StartRequest, WaitView
from edda.core.channels import ChannelMode
from edda.errors import ArgumentError, EddaError, InstanceConflictError
from edda.viewer.forms.schema import Field, FormResult, read_form, show_form
from edda.viewer.request import PageRequest, Redirect, Rendered, Reply

# What it waits for


def wait_forms(detail: RunDetail) -> tuple[tuple[WaitView, Field], ...]:
    """A form for each event or message that the run waits for."""
    return tuple((wait, show_form(wait.schema, _expand_paths(wait.match))) for wait in detail.waits)


async def submit_wait_form(visit: PageRequest, control: Controller) -> Reply:
    run_id, step = visit.parts[1], visit.form.raw("_step")
    detail = await control.get_run(run_id)
    wait = next((wait for wait in detail.waits if wait.step == step), None)
    if wait is None:
        return Redirect(visit.link("runs", run_id), "It does not wait for that any more: nothing was sent.")
    filled = read_form(wait.schema, visit.form.pairs)
    if not filled.is_good:
        return _form_with_errors("answer.html", filled, detail=detail, wait=wait)
    try:
        done = await _send(control, wait, filled.value)
    except ArgumentError as error:
        return _form_with_errors("answer.html", _with_error(filled, error), detail=detail, wait=wait)
    return Redirect(visit.link("runs", run_id), done.words)


async def _send(control: Controller, wait: WaitView, data: Any) -> ActionResult:
    if wait.kind == "event":
        return await control.send_event(EventOrder(wait.type, data=data, target=wait.run_id))
    target = wait.run_id if wait.mode == ChannelMode.DIRECT else None
    return await control.publish_message(MessageOrder(wait.type, data, target=target))


def _expand_paths(known: Mapping[str, Any]) -> dict[str, Any]:
    """`{"order.id": 7}` is `{"order": {"id": 7}}`: what a wait asks for is entered already."""
    whole: dict[str, Any] = {}
    for path, value in known.items():
        *outer, last = path.split(".")
        place = whole
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    return whole


def _form_with_errors(template: str, filled: FormResult, **values: Any) -> Rendered:
    """With what was entered, and what is wrong with it beside it."""
    return Rendered(template, {"asked": filled.field, **values}, 200 if filled.is_adding else 422)


def _with_error(filled: FormResult, error: EddaError) -> FormResult:
    """What only the code itself could find wrong, such as what a validator says."""
    return replace(filled, field=replace(filled.field, error=str(error)))


# Starting one


async def start_form(visit: PageRequest, control: Controller) -> Reply:
    definition = await control.get_definition(visit.parts[1])
    return Rendered("start.html", {"definition": definition, "asked": show_form(definition.schema, {})})


async def submit_start_form(visit: PageRequest, control: Controller) -> Reply:
    definition = await control.get_definition(visit.parts[1])
    filled = read_form(definition.schema, visit.form.pairs)
    if not filled.is_good:
        return _form_with_errors("start.html", filled, definition=definition)
    try:
        done = await control.start_run(StartRequest(definition.workflow, filled.value or {}, visit.form.get("_id")))
    except (ArgumentError, InstanceConflictError) as error:
        return _form_with_errors("start.html", _with_error(filled, error), definition=definition)
    return Redirect(visit.link("runs", done.subject) if done.subject else visit.link("runs"), done.words)
