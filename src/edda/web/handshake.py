"""OPTIONS: the handshake by which a sender of webhooks asks whether it may send here.

A preflight of a browser is a request of another kind; it gets no CORS headers, so the browser sends nothing.
"""

from __future__ import annotations

import logging

from edda.cloudevents import webhook
from edda.web.answers import Response
from edda.web.options import WebOptions
from edda.web.request import Request

logger = logging.getLogger("edda.web")

_ALLOW = (b"allow", b"POST, OPTIONS")


class WebhookHandshake:
    def __init__(self, options: WebOptions) -> None:
        self._policy = webhook.Policy(frozenset(options.allowed_origins), options.allowed_rate)

    def answer(self, request: Request) -> Response:
        handshake = webhook.read(request.headers)
        if handshake is None:
            return Response(204, headers=(_ALLOW,))
        granted = webhook.answer(handshake, self._policy)
        _log(handshake, bool(granted))
        headers = tuple((name.lower().encode(), value.encode()) for name, value in granted)
        return Response(200, headers=headers or (_ALLOW,))


def _log(handshake: webhook.Handshake, granted: bool) -> None:
    verdict = "granted" if granted else "not granted: name it in allowed_origins to grant it"
    # The callback is not fetched: that would lend a stranger our place in the network.
    logger.info("handshake of %.200r, callback %.500r: %s", handshake.origin, handshake.callback, verdict)
