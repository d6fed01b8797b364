"""Pages of events: the event log, one event, sending; waits, channels, the outbox."""

from __future__ import annotations

from edda.control.controller import Controller
from edda.control.views import EventRequest, EventSearch, MessageRequest, OutboxRequest
from edda.errors import ArgumentError, NotFoundError
from edda.viewer.forms.schema import read_form, show_form
from edda.viewer.request import PageRequest, Redirect, Rendered, Reply

_PAGE = 50


async def show_events(request: PageRequest, control: Controller) -> Reply:
    query = request.query
    search = EventSearch(
        type=query.get("type"),
        source=query.get("source"),
        q=query.get("q"),
        since=query.time("since"),
        until=query.time("until"),
        messages=query.get("messages") is not None,
        cursor=query.get("cursor"),
        limit=_PAGE,
    )
    page = await control.list_events(search)
    is_filtered = bool(query.without("cursor", "messages").pairs)
    return Rendered("events.html", {"page": page, "search": search, "is_filtered": is_filtered})


async def show_event(request: PageRequest, control: Controller) -> Reply:
    return Rendered("event.html", {"detail": await control.get_event(_number(request))})


async def resend_form(request: PageRequest, control: Controller) -> Reply:
    return Rendered("resend.html", {"detail": await control.get_event(_number(request))})


async def resend(request: PageRequest, control: Controller) -> Reply:
    number = _number(request)
    done = await control.resend_event(number)
    return Redirect(request.link("events", str(number)), done.words)


def _number(request: PageRequest) -> int:
    text = request.parts[1]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise NotFoundError(f"no event has the number {text!r}")
    return int(text)


async def send_form(request: PageRequest, control: Controller) -> Reply:
    return Rendered("send.html", {"form": show_form(None, {}), "entered": request.query})


async def send_event(request: PageRequest, control: Controller) -> Reply:
    entered = request.form
    result, type = read_form(None, entered.pairs), entered.get("type")
    if not result.is_valid:
        return Rendered("send.html", {"form": result.field, "entered": entered}, 422)
    if type is None:
        raise ArgumentError("type: is required")
    source = entered.get("source") or EventRequest(type).source
    event = EventRequest(type, source, result.value, entered.get("id"), entered.get("subject"), entered.get("target"))
    done = await control.send_event(event)
    return Redirect(request.link("events"), done.words)


async def show_waits(request: PageRequest, control: Controller) -> Reply:
    query = request.query
    page = await control.list_waits(query.get("type"), query.get("cursor"), _PAGE)
    return Rendered("waits.html", {"page": page, "type": query.get("type")})


async def show_channels(request: PageRequest, control: Controller) -> Reply:
    return Rendered("channels.html", {"channels": await control.list_channels()})


async def publish_form(request: PageRequest, control: Controller) -> Reply:
    return Rendered("publish.html", {"form": show_form(None, {}), "entered": request.query})


async def publish(request: PageRequest, control: Controller) -> Reply:
    entered = request.form
    result = read_form(None, entered.pairs)
    if not result.is_valid:
        return Rendered("publish.html", {"form": result.field, "entered": entered}, 422)
    message = MessageRequest(entered.raw("channel") or "", result.value, target=entered.get("target"))
    done = await control.publish_message(message)
    return Redirect(request.link("channels"), done.words)


async def show_outbox(request: PageRequest, control: Controller) -> Reply:
    state = request.query.get("state")
    page = await control.list_outbox(state, request.query.get("cursor"), _PAGE)
    return Rendered("outbox.html", {"page": page, "state": state})


async def outbox_form(request: PageRequest, control: Controller) -> Reply:
    selection = _outbox_selection(request, from_query=True)
    return Rendered("outgoing.html", {"selection": selection, "name": request.parts[1]})


async def submit_outbox(request: PageRequest, control: Controller) -> Reply:
    selection = _outbox_selection(request, from_query=False)
    done = await (control.drop_outbox if request.parts[1] == "drop" else control.retry_outbox)(selection)
    return Redirect(request.link("outbox"), done.words)


def _outbox_selection(request: PageRequest, *, from_query: bool) -> OutboxRequest:
    fields = request.query if from_query else request.form
    selection = OutboxRequest(fields.all("event"), fields.get("every") is not None)
    if not selection.ids and not selection.every:
        raise ArgumentError("no event was selected: select some, or all dead events")
    return selection
