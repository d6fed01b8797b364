"""The paths of webhooks: whoever knows the secret may send, from anywhere and without a token."""

from __future__ import annotations

import logging
import time

from edda.cloudevents.signatures import SignatureError
from edda.web.answers import HTTPError, Response, http_error, json_response, method_not_allowed
from edda.web.backing import ServiceGate
from edda.web.body import BodyReader
from edda.web.door import check_writable
from edda.web.options import WebOptions
from edda.web.request import Request
from edda.web.tokens import TokenScope
from edda.web.webhooks import Webhook

logger = logging.getLogger("edda.web")

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
