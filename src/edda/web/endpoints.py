"""The endpoints outside `/_edda`: CloudEvents at any path, signed webhooks at theirs, and `/cancel/{instance_id}`."""

from __future__ import annotations

import logging
import time

import msgspec

from edda.cloudevents import http_binding
from edda.cloudevents.signatures import SignatureError
from edda.web.access import AccessPolicy, check_writable
from edda.web.options import WebOptions
from edda.web.request import BodyReader, Request
from edda.web.responses import HTTPError, Response, error_response, http_error, json_response, method_not_allowed
from edda.web.service import ServiceGate
from edda.web.tokens import TokenScope
from edda.web.webhooks import Webhook

logger = logging.getLogger("edda.web")

_ACCEPTED = json_response(202, {"status": "accepted"})
_METHODS = "POST, OPTIONS"
_ALLOW = (b"allow", _METHODS.encode())
_CANCEL = "/cancel/"
_MAX_REASON_LENGTH = 1000


class Endpoints:
    def __init__(self, options: WebOptions, access: AccessPolicy, bodies: BodyReader, gate: ServiceGate) -> None:
        self._options = options
        self._webhooks = {webhook.path: webhook for webhook in options.webhooks}
        self._access = access
        self._bodies = bodies
        self._gate = gate

    async def handle(self, request: Request) -> Response:
        if request.path == "/cancel" or request.path.startswith(_CANCEL):
            return await self._cancel(request)
        if request.path in self._webhooks and request.method != "OPTIONS":
            return await self._receive_webhook(request, self._webhooks[request.path])
        self._access.check_local_origin(request)
        if request.method == "OPTIONS":
            return answer_handshake(request, self._options)
        return await self._receive_events(request)

    async def _receive_events(self, request: Request) -> Response:
        """Responds with 202 after the events are committed."""
        if request.method != "POST":
            raise method_not_allowed(_METHODS)
        self._access.check_scope(request, TokenScope.EVENTS)
        self._gate.check_started()
        async with self._bodies.read(request) as body:
            events = http_binding.parse(request.headers, body, max_batch=self._options.max_batch).events
            if events:
                await self._gate.receive(events)
        return _ACCEPTED

    async def _receive_webhook(self, request: Request, webhook: Webhook) -> Response:
        """The signature is checked in place of a token."""
        if request.method != "POST":
            raise method_not_allowed(_METHODS)
        check_writable(self._options, TokenScope.EVENTS)
        try:
            claim = webhook.read_claim(request.headers, time.time())  # rejects most strangers before their body is read
            self._gate.check_started()
            async with self._bodies.read(request) as body:
                claim.check(webhook.keys, body)
                events = webhook.read_events(request.headers, body, self._options.max_batch)
                if events:
                    await self._gate.receive(events)
        except SignatureError as error:
            raise _unauthorized(webhook, str(error)) from None
        return _ACCEPTED

    async def _cancel(self, request: Request) -> Response:
        self._access.check_local_origin(request)
        if request.method != "POST":
            raise method_not_allowed("POST")
        self._access.check_scope(request, TokenScope.CONTROL)
        self._gate.check_started()
        instance_id = request.path[len(_CANCEL) :]
        if not instance_id or "\0" in instance_id:  # PostgreSQL cannot store U+0000
            raise http_error(404, "no run has this id")
        async with self._bodies.read(request) as body:
            reason = _parse_reason(body) if body else None
        if not await self._gate.cancel(instance_id, reason):
            return error_response(409, "the run has ended already")
        return json_response(202, {"status": "cancelling", "instance_id": instance_id})


def answer_handshake(request: Request, options: WebOptions) -> Response:
    """OPTIONS by which a sender asks for permission to send, in the webhook specification of CloudEvents.

    A CORS preflight of a browser gets no CORS headers in response, so the browser sends nothing.
    """
    asked = {name.lower(): value.strip(b" \t").decode("latin-1") for name, value in request.headers}
    origin = asked.get(b"webhook-request-origin")
    if not origin:
        return Response(204, headers=(_ALLOW,))
    # Names are compared without case, like DNS. The answer has the text of our settings, not that of the client.
    matching = (allowed for allowed in options.allowed_origins if allowed.lower() == origin.lower())
    granted = "*" if "*" in options.allowed_origins else next(matching, None)
    outcome = "granted" if granted else "not granted: add the origin to allowed_origins to grant it"
    # The callback URL is only logged: fetching it would let a stranger send requests from inside our network.
    callback = asked.get(b"webhook-request-callback")
    logger.info("handshake of %.200r, callback %.500r: %s", origin, callback, outcome)
    if granted is None:
        return Response(200, headers=(_ALLOW,))
    headers = [(b"allow", b"POST"), (b"webhook-allowed-origin", granted.encode())]
    if b"webhook-request-rate" in asked or options.allowed_rate is not None:
        rate = "*" if options.allowed_rate is None else str(options.allowed_rate)
        headers.append((b"webhook-allowed-rate", rate.encode()))
    return Response(200, headers=tuple(headers))


def _unauthorized(webhook: Webhook, error: str) -> HTTPError:
    logger.info("webhook %s: request rejected with 401: %s", webhook.path, error)
    challenge = f'Signature headers="{webhook.header.decode()}"'
    return http_error(401, error, headers={"WWW-Authenticate": challenge})


class _CancelBody(msgspec.Struct, forbid_unknown_fields=True):
    reason: str


def _parse_reason(body: bytes) -> str:
    try:
        reason = msgspec.json.decode(body, type=_CancelBody).reason
    except (msgspec.DecodeError, RecursionError):
        raise http_error(400, 'expected no body, or JSON like {"reason": "..."}') from None
    if len(reason) > _MAX_REASON_LENGTH or not reason.isprintable():
        raise http_error(400, f"reason: expected up to {_MAX_REASON_LENGTH} printable characters")
    return reason
