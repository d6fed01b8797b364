"""Sending events: into the app's own database, or over HTTP."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import UNSET

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import CloudEvent, check, make
from edda.core.model import OutboxEvent, RunId
from edda.core.urls import show_url, split_credentials
from edda.errors import EventDeliveryError, NotInWorkflowError

from .activity import inline_step
from .client import current_context, get_client_or_default
from .context import ActivityContext, RunContext, WorkflowContext

POST_TIMEOUT = 30.0
_WORTH_TRYING_AGAIN = frozenset({408, 425, 429})

inherited_extensions: ContextVar[Mapping[str, str]] = ContextVar("edda_carried", default={})  # noqa: B039 - nobody changes it
"""Extensions that every event sent from here has unless it says otherwise: where it stands in a trace."""


def send_event(
    event_type: str,
    source: str,
    data: Any = UNSET,
    broker_url: str | None = None,
    datacontenttype: str | None = None,
    *,
    id: str | None = None,
    subject: str | None = None,
    time: datetime | str | None = None,
    dataschema: str | None = None,
    target_instance_id: str | None = None,
    extensions: Mapping[str, Any] | None = None,
) -> Coroutine[Any, Any, str]:
    """Send a CloudEvent; returns its id when it is stored, or taken by whoever listens at `broker_url`.

    In a workflow it is a recorded step, and in an activity every attempt sends it under the same id: it counts once.
    """
    attributes = event_attributes(
        event_type, source, data, datacontenttype, subject, time, dataschema, target_instance_id, extensions
    )
    make(id=id or "-", **attributes)  # what is wrong with it is said here, before anything is recorded
    context = current_context.get()
    if isinstance(context, RunContext):
        return inline_step(context, "send_event", _send, (attributes, id, broker_url), None)
    return _send(attributes, id, broker_url)


def send_event_transactional(
    ctx: WorkflowContext,
    event_type: str,
    event_source: str,
    event_data: Any = UNSET,
    content_type: str | None = "application/json",
    *,
    key: str | None = None,
    id: str | None = None,
    subject: str | None = None,
    time: datetime | str | None = None,
    dataschema: str | None = None,
    extensions: Mapping[str, Any] | None = None,
) -> Coroutine[Any, Any, str]:
    """Put an event into the outbox, in the same commit as the step's record; returns its id.

    The relayer delivers it, at least once, and those of one `key` in order; the key is the run's id if none is given.
    """
    attributes = event_attributes(
        event_type, event_source, event_data, content_type, subject, time, dataschema, None, extensions
    )
    make(id=id or "-", **attributes)
    args = (attributes, id, key)
    if isinstance(ctx, RunContext):
        return inline_step(ctx, "send_event_transactional", _to_outbox, args, None)
    if isinstance(ctx, ActivityContext):
        return _to_outbox(*args)
    raise NotInWorkflowError("send_event_transactional() needs the context of a workflow or an activity")


async def _to_outbox(attributes: Mapping[str, Any], id: str | None, key: str | None) -> str:
    ctx = current_context.get()
    assert isinstance(ctx, ActivityContext)
    event = finish_event(attributes, id, "", ctx.now())
    ctx.work.send(
        OutboxEvent(
            event.id,
            key or ctx.instance_id,
            event.type,
            event.source,
            ctx.values.encrypt(json_format.emit_stored(event)),
            ctx.microseconds,
            RunId(ctx.instance_id),
        )
    )
    return event.id


def event_attributes(
    event_type: str,
    source: str,
    data: Any,
    datacontenttype: str | None,
    subject: str | None,
    time: datetime | str | None,
    dataschema: str | None,
    target: str | None,
    extensions: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Its attributes, all but the id."""
    return {
        "type": event_type,
        "source": source,
        **({} if data is UNSET else {"data": data}),
        "datacontenttype": datacontenttype,
        "subject": subject,
        "time": time.isoformat() if isinstance(time, datetime) else time,
        "dataschema": dataschema,
        "extensions": {**(extensions or {}), **({} if target is None else {"eddainstanceid": target})},
    }


async def _send(attributes: Mapping[str, Any], id: str | None, broker_url: str | None) -> str:
    if broker_url is not None:
        event = finish_event(attributes, id, str(uuid4()), datetime.now(UTC))
        await post(broker_url, event)
        return event.id
    async with get_client_or_default() as client:
        event = finish_event(attributes, id, client.new_id(), client.now())
        await client.send(event)
    return event.id


def finish_event(attributes: Mapping[str, Any], id: str | None, new_id: str, now: datetime) -> CloudEvent:
    """With an id and a time; inside an activity the id is the same at every attempt."""
    context = current_context.get()
    if id is None:
        id = context.next_effect_id() if isinstance(context, ActivityContext) else new_id
    extensions = {**inherited_extensions.get(), **attributes["extensions"]}
    return make(id=id, **{**attributes, "extensions": extensions, "time": attributes["time"] or now.isoformat()})


def as_cloudevent(event: Any) -> CloudEvent:
    """Ours, the JSON object as a dict, or an object of the CloudEvents SDK."""
    if isinstance(event, CloudEvent):
        check(event)
        return event
    if hasattr(event, "get_attributes") and hasattr(event, "get_data"):
        event = _from_sdk(event)
    if not isinstance(event, Mapping):
        raise TypeError(f"expected a CloudEvent, or its JSON object as a dict, got {type(event).__name__}")
    return json_format.parse(msgspec.json.encode(event))


def _from_sdk(event: Any) -> dict[str, Any]:
    attributes, data = dict(event.get_attributes()), event.get_data()
    if data is None:
        return attributes
    if isinstance(data, bytes):
        return {**attributes, "data_base64": b64encode(data).decode()}
    return {**attributes, "data": data}


async def post(url: str, event: CloudEvent) -> None:
    import httpx2  # only who sends over HTTP pays for it

    headers, body = http_binding.emit(event, http_binding.ContentMode.STRUCTURED)
    plain, credentials = split_credentials(url)
    shown = show_url(plain)
    try:
        async with httpx2.AsyncClient(timeout=POST_TIMEOUT, follow_redirects=False) as client:
            answer = await client.post(plain, content=body, headers=[*headers, *credentials.items()])
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise EventDeliveryError(f"{shown} did not take event {event.id}: {type(error).__name__}: {error}") from error
    if not answer.is_success:
        again = answer.status_code in _WORTH_TRYING_AGAIN or answer.status_code >= 500
        raise EventDeliveryError(f"{shown} answered {answer.status_code} to event {event.id}", retryable=again)
