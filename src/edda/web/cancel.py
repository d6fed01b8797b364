"""POST /cancel/{instance_id}, with {"reason": "..."} if there is one to give."""

from __future__ import annotations

import msgspec

from edda.web.request import Request
from edda.web.security.access import AccessPolicy
from edda.web.security.tokens import TokenScope

from .request import BodyReader
from .responses import Response, error_response, http_error, json_response, method_not_allowed
from .service import ServiceGate

PREFIX = "/cancel/"
_LONGEST_REASON = 1000


class CancelEndpoint:
    def __init__(self, door: AccessPolicy, intake: BodyReader, backing: ServiceGate) -> None:
        self._door = door
        self._intake = intake
        self._backing = backing

    async def answer(self, request: Request) -> Response:
        self._door.check_local_origin(request)
        if request.method != "POST":
            raise method_not_allowed("POST")
        self._door.check_scope(request, TokenScope.CONTROL)
        self._backing.check_started()
        instance_id = request.path[len(PREFIX) :]
        if not instance_id or "\0" in instance_id:  # which no database takes
            raise http_error(404, "no run has such an id")
        if not await self._backing.cancel(instance_id, await self._read_reason(request)):
            return error_response(409, "the run has ended already")
        return json_response(202, {"status": "cancelling", "instance_id": instance_id})

    async def _read_reason(self, request: Request) -> str | None:
        body = await self._intake.read(request)
        self._intake.release(len(body))
        return _reason_in(body) if body else None


class _Order(msgspec.Struct, forbid_unknown_fields=True):
    reason: str


def _reason_in(body: bytes) -> str:
    try:
        reason = msgspec.json.decode(body, type=_Order).reason
    except (msgspec.DecodeError, RecursionError):
        raise http_error(400, 'expected no body, or JSON like {"reason": "..."}') from None
    if len(reason) > _LONGEST_REASON or not reason.isprintable():
        raise http_error(400, f"reason: expected up to {_LONGEST_REASON} printable characters")
    return reason
