"""Events: stored, then accepted."""

from __future__ import annotations

from edda.cloudevents import http_binding
from edda.web.options import WebOptions
from edda.web.request import Request
from edda.web.security.access import AccessPolicy
from edda.web.security.tokens import TokenScope

from .request import BodyReader
from .responses import Response, json_response, method_not_allowed
from .service import ServiceGate
from .webhook_endpoint import WebhookHandshake

_ACCEPTED = json_response(202, {"status": "accepted"})


class EventEndpoint:
    def __init__(self, options: WebOptions, door: AccessPolicy, intake: BodyReader, backing: ServiceGate) -> None:
        self._max_batch = options.max_batch
        self._door = door
        self._intake = intake
        self._backing = backing
        self._handshake = WebhookHandshake(options)

    async def answer(self, request: Request) -> Response:
        self._door.check_local_origin(request)
        if request.method == "OPTIONS":
            return self._handshake.answer(request)
        if request.method != "POST":
            raise method_not_allowed("POST, OPTIONS")
        self._door.check_scope(request, TokenScope.EVENTS)
        self._backing.check_started()
        body = await self._intake.read(request)
        try:
            await self._store(request, body)
        finally:
            self._intake.release(len(body))
        return _ACCEPTED

    async def _store(self, request: Request, body: bytes) -> None:
        events = http_binding.parse(request.headers, body, max_batch=self._max_batch).events
        if events:
            await self._backing.receive(events)
