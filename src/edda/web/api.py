"""The control API: JSON below /_edda/api/v1, routed by the table of operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from edda.control.controller import OPERATIONS, PREFIX, Controller, Operation
from edda.web.access import Authenticator, Principal, check_writable
from edda.web.openapi import describe
from edda.web.options import WebOptions
from edda.web.request import BodyReader, Request
from edda.web.tokens import TokenScope

from .parsing import read_body, read_query
from .responses import Response, http_error, method_not_allowed
from .service import ServiceGate
from .sse import EventStream, EventStreams

Control = Callable[[], Controller]

_DESCRIPTION = "openapi.json"
_STREAM = "stream"
_MAX_EVENT_NUMBER = 2**63 - 1


class ControlEndpoint:
    def __init__(
        self,
        options: WebOptions,
        authenticator: Authenticator,
        bodies: BodyReader,
        gate: ServiceGate,
        streams: EventStreams,
        control: Control,
    ) -> None:
        self._options = options
        self._authenticator = authenticator
        self._bodies = bodies
        self._gate = gate
        self._streams = streams
        self._control = control

    async def handle(self, request: Request) -> Response | EventStream:
        caller = self._authenticator.require(request)
        parts = tuple(request.raw_path.removeprefix(PREFIX).split("/")[1:])
        if parts in {(_DESCRIPTION,), (_STREAM,)}:
            return self._handle_special(request, caller, parts[0])
        operation = _route(request.method, parts)
        check_writable(self._options, TokenScope(operation.scope))
        caller.check(TokenScope(operation.scope))
        values = _values(operation, request.parts[-len(parts) :])
        query = None if operation.query is None else read_query(request.query, operation.query)
        self._gate.check_started()
        body = await self._read_body(request, operation)
        return await self._call(operation, caller, operation.arguments(values, query, body))

    def _handle_special(self, request: Request, caller: Principal, name: str) -> Response | EventStream:
        if request.method not in {"GET", "HEAD"}:
            raise method_not_allowed("GET, HEAD")
        caller.check(TokenScope.VIEW)
        if name == _DESCRIPTION:
            return Response(200, msgspec.json.encode(describe()))
        self._gate.check_started()
        return self._streams.open(request, self._control())

    async def _read_body(self, request: Request, operation: Operation[Any]) -> Struct | None:
        if operation.body is None:
            return None
        media = request.header(b"content-type")
        if media is not None and media.partition(b";")[0].strip().lower() != b"application/json":
            raise http_error(415, "expected Content-Type: application/json")
        async with self._bodies.read(request) as body:
            return read_body(body, operation.body)

    async def _call(self, operation: Operation[Any], caller: Principal, arguments: tuple[Any, ...]) -> Response:
        method = getattr(controller_for(self._control(), caller), operation.name)
        async with self._gate.slot(operation.seconds):
            result = await method(*arguments)
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if operation.name == "export_run":
            name = re.sub(r"[^A-Za-z0-9._-]", "_", arguments[0])[:100]
            headers = ((b"content-disposition", f'attachment; filename="run-{name}.json"'.encode()),)
        return Response(200, msgspec.json.encode(result), headers)


def controller_for(control: Controller, caller: Principal) -> Controller:
    """A controller that writes the caller's name into the audit log, if `control` supports it."""
    with_caller = getattr(control, "with_caller", None)
    if with_caller is None:
        return control
    audited: Controller = with_caller(caller.name, caller.origin)
    return audited


def _route(method: str, parts: tuple[str, ...]) -> Operation[Any]:
    """A literal part precedes a parameter: `/runs/count` is not the run with the id `count`."""
    matching = [operation for operation in OPERATIONS if _matches(operation, parts)]
    matching = [operation for operation in matching if operation.parts == parts] or matching
    if not matching:
        raise http_error(404, f"there is nothing at this path; see {PREFIX}/{_DESCRIPTION}")
    by_method: dict[str, Operation[Any]] = {operation.method: operation for operation in matching}
    operation = by_method.get("GET" if method == "HEAD" else method)
    if operation is None:
        raise method_not_allowed(", ".join(sorted({*by_method, *(["HEAD"] if "GET" in by_method else [])})))
    return operation


def _matches(operation: Operation[Any], parts: tuple[str, ...]) -> bool:
    return len(operation.parts) == len(parts) and all(
        part == sent or (part.startswith("{") and sent) for part, sent in zip(operation.parts, parts, strict=True)
    )


def _values(operation: Operation[Any], segments: tuple[str, ...]) -> tuple[str | int, ...]:
    """The parameters in the path."""
    pairs = zip(operation.parts, segments, strict=True)
    return tuple(_value(part, segment) for part, segment in pairs if part.startswith("{"))


def _value(part: str, segment: str) -> str | int:
    if part == "{number}":
        if not (segment.isascii() and segment.isdigit() and len(segment) < 20 and int(segment) <= _MAX_EVENT_NUMBER):
            raise http_error(404, "no event has this number: expected digits")
        return int(segment)
    if "\0" in segment or "\ufffd" in segment:  # PostgreSQL cannot store U+0000; U+FFFD replaces invalid UTF-8
        raise http_error(404, "nothing has this id: expected UTF-8 without the character U+0000")
    return segment
