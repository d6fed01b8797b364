"""Pages of events: the log, one event, sending; what is waited for, channels, the outbox."""

from __future__ import annotations

from edda.control.controller import Controller
from edda.control.views import EventOrder, EventSearch, MessageOrder, OutboxOrder
from edda.errors import ArgumentError, NotFoundError
from edda.viewer.forms.schema import read_form, show_form
from edda.viewer.request import PageRequest, Redirect, Rendered, Reply

_PAGE = 50


async def show_events(visit: PageRequest, control: Controller) -> Reply:
    query = visit.query
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


async def show_event(visit: PageRequest, control: Controller) -> Reply:
    return Rendered("event.html", {"detail": await control.get_event(_number(visit))})


async def resend_form(visit: PageRequest, control: Controller) -> Reply:
    return Rendered("resend.html", {"detail": await control.get_event(_number(visit))})


async def resend(visit: PageRequest, control: Controller) -> Reply:
    number = _number(visit)
    done = await control.resend_event(number)
    return Redirect(visit.link("events", str(number)), done.words)


def _number(visit: PageRequest) -> int:
    text = visit.parts[1]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise NotFoundError(f"no event has the number {text!r}")
    return int(text)


async def send_form(visit: PageRequest, control: Controller) -> Reply:
    return Rendered("send.html", {"asked": show_form(None, {}), "given": visit.query})


async def send_event(visit: PageRequest, control: Controller) -> Reply:
    form = visit.form
    filled, type = read_form(None, form.pairs), form.get("type")
    if not filled.is_good:
        return Rendered("send.html", {"asked": filled.field, "given": form}, 422)
    if type is None:
        raise ArgumentError("an event needs a type")
    source = form.get("source") or EventOrder(type).source
    order = EventOrder(type, source, filled.value, form.get("id"), form.get("subject"), form.get("target"))
    done = await control.send_event(order)
    return Redirect(visit.link("events"), done.words)


async def show_waits(visit: PageRequest, control: Controller) -> Reply:
    query = visit.query
    page = await control.list_waits(query.get("type"), query.get("cursor"), _PAGE)
    return Rendered("waits.html", {"page": page, "type": query.get("type")})


async def show_channels(visit: PageRequest, control: Controller) -> Reply:
    return Rendered("channels.html", {"channels": await control.list_channels()})


async def publish_form(visit: PageRequest, control: Controller) -> Reply:
    return Rendered("publish.html", {"asked": show_form(None, {}), "given": visit.query})


async def publish(visit: PageRequest, control: Controller) -> Reply:
    form = visit.form
    filled = read_form(None, form.pairs)
    if not filled.is_good:
        return Rendered("publish.html", {"asked": filled.field, "given": form}, 422)
    order = MessageOrder(form.raw("channel") or "", filled.value, target=form.get("target"))
    done = await control.publish_message(order)
    return Redirect(visit.link("channels"), done.words)


async def show_outbox(visit: PageRequest, control: Controller) -> Reply:
    state = visit.query.get("state")
    page = await control.list_outbox(state, visit.query.get("cursor"), _PAGE)
    return Rendered("outbox.html", {"page": page, "state": state})


async def outbox_form(visit: PageRequest, control: Controller) -> Reply:
    order = _outbox_order(visit, from_query=True)
    return Rendered("outgoing.html", {"order": order, "name": visit.parts[1]})


async def submit_outbox(visit: PageRequest, control: Controller) -> Reply:
    order = _outbox_order(visit, from_query=False)
    done = await (control.drop_outbox if visit.parts[1] == "drop" else control.retry_outbox)(order)
    return Redirect(visit.link("outbox"), done.words)


def _outbox_order(visit: PageRequest, *, from_query: bool) -> OutboxOrder:
    fields = visit.query if from_query else visit.form
    order = OutboxOrder(fields.all("event"), fields.get("every") is not None)
    if not order.ids and not order.every:
        raise ArgumentError("no event was chosen: tick some, or take all that are dead")
    return order
