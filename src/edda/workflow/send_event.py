"""Sending events: into the app's database, over HTTP, or through the outbox."""

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
from edda.core.redact import show_url, split_credentials
from edda.errors import EventDeliveryError, NotInWorkflowError

from .activity import inline_step
from .client import current_context, get_client_or_default
from .context import ActivityContext, RunContext, WorkflowContext

POST_TIMEOUT = 30.0
_RETRYABLE_STATUS = frozenset({408, 425, 429})

inherited_extensions: ContextVar[Mapping[str, str]] = ContextVar("edda_carried", default={})  # noqa: B039 - not changed
"""Default extensions of all events that are sent in this context, such as `traceparent`."""


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
    """Send a CloudEvent; returns its id when it is stored, or accepted by the receiver at `broker_url`.

    In a workflow this is a recorded step. In an activity every attempt sends it with the same id, so that the receiver
    counts it once.

    Args:
        event_type: Attribute `type`, 1 to 255 characters.
        source: Attribute `source`, a URI reference such as "/orders".
        data: JSON-compatible value, model, text or bytes. Default: no data.
        broker_url: HTTP URL that the event is posted to. Default None: the database of the app, or EDDA_DB_URL.
        datacontenttype: Media type of `data`. Default None: "application/json", or "application/octet-stream" for
            bytes.
        id: Attribute `id`. Default None: generated.
        subject: Attribute `subject`. Default None.
        time: Attribute `time`, an aware datetime or its text. Default None: now.
        dataschema: Attribute `dataschema`, a URI. Default None.
        target_instance_id: Id of the only run that may receive the event. Default None: all waits that match.
        extensions: Extension attributes. Default None.
    """
    attributes = event_attributes(
        event_type, source, data, datacontenttype, subject, time, dataschema, target_instance_id, extensions
    )
    make(id=id or "-", **attributes)  # raises EventError here, before anything is recorded
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
    """Put a CloudEvent into the outbox, in the same commit as the outcome of the step; returns its id.

    The relayer sends it at least once.

    Args:
        ctx: The context of the workflow or activity.
        event_type: Attribute `type`, 1 to 255 characters.
        event_source: Attribute `source`, a URI reference such as "/orders".
        event_data: JSON-compatible value, model, text or bytes. Default: no data.
        content_type: Attribute `datacontenttype`. Default "application/json".
        key: Events with the same key are sent in order. Default None: the id of the run.
        id: Attribute `id`. Default None: generated, and the same for every attempt.
        subject: Attribute `subject`. Default None.
        time: Attribute `time`, an aware datetime or its text. Default None: now.
        dataschema: Attribute `dataschema`, a URI. Default None.
        extensions: Extension attributes. Default None.
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
            ctx.codec.encrypt(json_format.emit_stored(event)),
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
    """All attributes except the id."""
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
    """The event with its id and time; in an activity the generated id is the same for every attempt."""
    context = current_context.get()
    if id is None:
        id = context.next_effect_id() if isinstance(context, ActivityContext) else new_id
    extensions = {**inherited_extensions.get(), **attributes["extensions"]}
    return make(id=id, **{**attributes, "extensions": extensions, "time": attributes["time"] or now.isoformat()})


def as_cloudevent(event: Any) -> CloudEvent:
    """From a `CloudEvent`, its JSON object as a dict, or an object of the CloudEvents SDK."""
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
    import httpx2  # imported on demand: only senders over HTTP need it

    headers, body = http_binding.emit(event, http_binding.ContentMode.STRUCTURED)
    plain, credentials = split_credentials(url)
    shown = show_url(plain)
    try:
        async with httpx2.AsyncClient(timeout=POST_TIMEOUT, follow_redirects=False) as client:
            answer = await client.post(plain, content=body, headers=[*headers, *credentials.items()])
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise EventDeliveryError(f"cannot send event {event.id} to {shown}: {type(error).__name__}: {error}") from error
    if not answer.is_success:
        retryable = answer.status_code in _RETRYABLE_STATUS or answer.status_code >= 500
        raise EventDeliveryError(f"{shown} answered {answer.status_code} to event {event.id}", retryable=retryable)
