"""The control API: JSON below /_edda/api/v1, as the table of operations says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from edda.control.controller import Controller
from edda.control.operations import EXPORT_RUN, OPERATIONS, PREFIX, Operation
from edda.web.openapi import describe
from edda.web.options import WebOptions
from edda.web.request import Request
from edda.web.security.access import check_writable
from edda.web.security.callers import Authenticator, Principal
from edda.web.security.tokens import TokenScope

from .parsing import read_body, read_query
from .request import BodyReader
from .responses import HTTPError, Response, error_response, http_error, method_not_allowed
from .service import ServiceGate
from .sse import EventStream, EventStreams

Control = Callable[[], Controller]

_DESCRIPTION = "openapi.json"
_STREAM = "stream"
_LARGEST = 2**63 - 1
"""The number of an event, at most."""


class ControlEndpoint:
    def __init__(
        self,
        options: WebOptions,
        callers: Authenticator,
        intake: BodyReader,
        backing: ServiceGate,
        streams: EventStreams,
        control: Control,
    ) -> None:
        self._options = options
        self._callers = callers
        self._intake = intake
        self._backing = backing
        self._streams = streams
        self._control = control

    async def answer(self, request: Request) -> Response | EventStream:
        caller = self._callers.require(request)
        parts = tuple(request.raw_path.removeprefix(PREFIX).split("/")[1:])
        if parts in {(_DESCRIPTION,), (_STREAM,)}:
            return self._answer_special(request, caller, parts[0])
        operation = _route(request.method, parts)
        check_writable(self._options, TokenScope(operation.scope))
        caller.check(TokenScope(operation.scope))
        values = _values(operation, request.parts[-len(parts) :])
        query = None if operation.query is None else read_query(request.query, operation.query)
        self._backing.check_started()
        body = await self._read_order(request, operation)
        return await self._call(operation, caller, operation.arguments(values, query, body))

    def _answer_special(self, request: Request, caller: Principal, name: str) -> Response | EventStream:
        if request.method not in {"GET", "HEAD"}:
            raise method_not_allowed("GET, HEAD")
        caller.check(TokenScope.VIEW)
        if name == _DESCRIPTION:
            return Response(200, msgspec.json.encode(describe()))
        self._backing.check_started()
        return self._streams.open(request, self._control())

    async def _read_order(self, request: Request, operation: Operation[Any]) -> Struct | None:
        if operation.body is None:
            return None
        _check_media(request)
        body = await self._intake.read(request)
        try:
            return read_body(body, operation.body)
        finally:
            self._intake.release(len(body))

    async def _call(self, operation: Operation[Any], caller: Principal, arguments: tuple[Any, ...]) -> Response:
        method = getattr(controller_for(self._control(), caller), operation.name)
        async with self._backing.slot(operation.seconds):
            found = await method(*arguments)
        headers = (_as_file(arguments[0]),) if operation is EXPORT_RUN else ()
        return Response(200, msgspec.json.encode(found), headers)


def controller_for(control: Controller, caller: Principal) -> Controller:
    """One that notes what is done under the caller's name, if it can."""
    with_caller = getattr(control, "with_caller", None)
    if with_caller is None:
        return control
    named: Controller = with_caller(caller.name, caller.origin)
    return named


def _route(method: str, parts: tuple[str, ...]) -> Operation[Any]:
    """What is written out goes before what stands in braces: `/runs/count` is no run."""
    fitting = [operation for operation in OPERATIONS if _fits(operation, parts)]
    exact = [operation for operation in fitting if operation.parts == parts] or fitting
    if not exact:
        raise http_error(404, f"there is nothing at this address; {PREFIX}/{_DESCRIPTION} says what there is")
    wanted = "GET" if method == "HEAD" else method
    found = next((operation for operation in exact if operation.method == wanted), None)
    if found is None:
        methods = {operation.method for operation in exact}
        raise method_not_allowed(", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set()))))
    return found


def _fits(operation: Operation[Any], parts: tuple[str, ...]) -> bool:
    return len(operation.parts) == len(parts) and all(
        part == given or (part.startswith("{") and given) for part, given in zip(operation.parts, parts, strict=True)
    )


def _values(operation: Operation[Any], segments: tuple[str, ...]) -> tuple[str | int, ...]:
    pairs = zip(operation.parts, segments, strict=True)
    return tuple(_value(part, segment) for part, segment in pairs if part.startswith("{"))


def _value(part: str, segment: str) -> str | int:
    if part == "{number}":
        if not (segment.isascii() and segment.isdigit() and len(segment) < 20 and int(segment) <= _LARGEST):
            raise http_error(404, "no event has such a number: expected digits, as a list of events gives them")
        return int(segment)
    if "\0" in segment or "\ufffd" in segment:  # the first no database takes, the second is what was no UTF-8
        raise http_error(404, "nothing has such an id: expected UTF-8 without the character 0")
    return segment


def _check_media(request: Request) -> None:
    media = request.header(b"content-type")
    if media is not None and media.partition(b";")[0].strip().lower() != b"application/json":
        raise HTTPError(error_response(415, "expected Content-Type: application/json"))


def _as_file(run_id: str) -> tuple[bytes, bytes]:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run_id)[:100]
    return b"content-disposition", f'attachment; filename="run-{name}.json"'.encode()
