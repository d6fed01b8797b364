"""OPTIONS: the handshake by which a sender of webhooks asks whether it may send here.

A preflight of a browser is a request of another kind; it gets no CORS headers, so the browser sends nothing.
"""

from __future__ import annotations

import logging
import time

from edda.cloudevents import webhook_handshake
from edda.cloudevents.signatures import SignatureError
from edda.web.options import WebOptions
from edda.web.request import Request
from edda.web.security.access import check_writable
from edda.web.security.tokens import TokenScope
from edda.web.security.webhooks import Webhook

from .request import BodyReader
from .responses import HTTPError, Response, http_error, json_response, method_not_allowed
from .service import ServiceGate

logger = logging.getLogger("edda.web")

_ALLOW = (b"allow", b"POST, OPTIONS")


class WebhookHandshake:
    def __init__(self, options: WebOptions) -> None:
        self._policy = webhook_handshake.Policy(frozenset(options.allowed_origins), options.allowed_rate)

    def answer(self, request: Request) -> Response:
        handshake = webhook_handshake.read(request.headers)
        if handshake is None:
            return Response(204, headers=(_ALLOW,))
        granted = webhook_handshake.answer(handshake, self._policy)
        _log(handshake, bool(granted))
        headers = tuple((name.lower().encode(), value.encode()) for name, value in granted)
        return Response(200, headers=headers or (_ALLOW,))


def _log(handshake: webhook_handshake.Handshake, granted: bool) -> None:
    verdict = "granted" if granted else "not granted: name it in allowed_origins to grant it"
    # The callback is not fetched: that would lend a stranger our place in the network.
    logger.info("handshake of %.200r, callback %.500r: %s", handshake.origin, handshake.callback, verdict)


_ACCEPTED = json_response(202, {"status": "accepted"})


class WebhookEndpoint:
    def __init__(self, options: WebOptions, intake: BodyReader, backing: ServiceGate) -> None:
        self._options = options
        self._webhooks = {webhook.path: webhook for webhook in options.webhooks}
        self._intake = intake
        self._backing = backing

    def matches(self, request: Request) -> bool:
        """A handshake is for the endpoint of events, at every path."""
        return request.path in self._webhooks and request.method != "OPTIONS"

    async def answer(self, request: Request) -> Response:
        if request.method != "POST":
            raise method_not_allowed("POST, OPTIONS")
        check_writable(self._options, TokenScope.EVENTS)
        webhook = self._webhooks[request.path]
        try:
            await self._verify_and_store(webhook, request)
        except SignatureError as error:
            raise _unauthorized(webhook, str(error)) from None
        return _ACCEPTED

    async def _verify_and_store(self, webhook: Webhook, request: Request) -> None:
        claim = webhook.read_claim(request.headers, time.time())  # before a stranger's body is read
        self._backing.check_started()
        body = await self._intake.read(request)
        try:
            claim.check(webhook.keys, body)
            events = webhook.read_events(request.headers, body, self._options.max_batch)
            if events:
                await self._backing.receive(events)
        finally:
            self._intake.release(len(body))


def _unauthorized(webhook: Webhook, error: str) -> HTTPError:
    logger.info("refused what came to %s: %s", webhook.path, error)
    challenge = f'Signature headers="{webhook.header.decode()}"'
    return http_error(401, error, headers={"WWW-Authenticate": challenge})
