"""HTTP responses: the ASGI types, the headers that every response has, JSON errors, and one response per exception."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from edda import errors

logger = logging.getLogger("edda.web")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_SECURITY_HEADERS: Headers = [
    (b"content-security-policy", _CONTENT_SECURITY_POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_JSON = (b"content-type", b"application/json")
_NO_STORE = (b"cache-control", b"no-store")
_PRIVATE = (b"cache-control", b"private, no-store")


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Replace the default headers of the same name."""
    reason: str = ""
    """The error text, for the error page."""

    async def send(self, send: Send, *, private: bool, head: bool) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.all_headers(private=private)})
        await send({"type": "http.response.body", "body": b"" if head else self.body})

    def all_headers(self, *, private: bool = False) -> Headers:
        own = {name for name, _ in self.headers}
        defaults = security_headers(private=private)
        if self.body:
            defaults.append(_JSON)
        if self.status != HTTPStatus.NO_CONTENT:
            defaults.append((b"content-length", b"%d" % len(self.body)))
        return [*(header for header in defaults if header[0] not in own), *self.headers]


def security_headers(*, private: bool = False) -> Headers:
    return [*_SECURITY_HEADERS, _PRIVATE if private else _NO_STORE]


class HTTPError(Exception):
    """Ends the handling of a request with this response."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


def json_response(status: int, body: Mapping[str, str]) -> Response:
    return Response(status, msgspec.json.encode(body))


def error_response(
    status: int,
    error: str,
    *,
    error_type: str | None = None,
    attribute: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body: dict[str, str | bool] = {
        "error": error,
        "error_type": error_type or _type_of(status),
        "retryable": status in {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS} or status >= 500,
    }
    if attribute is not None:
        body["attribute"] = attribute
    fields = tuple((name.lower().encode(), value.encode()) for name, value in (headers or {}).items())
    return Response(status, msgspec.json.encode(body), fields, error)


def http_error(status: int, error: str, *, headers: Mapping[str, str] | None = None) -> HTTPError:
    return HTTPError(error_response(status, error, headers=headers))


def redirect(path: str, *headers: tuple[bytes, bytes]) -> Response:
    """The caller must have checked that `path` is a path of this server (`own_path`)."""
    return Response(303, headers=((b"location", path.encode("ascii")), *headers))


def retry_later(status: int, error: str, seconds: int, *, error_type: str | None = None) -> Response:
    return error_response(status, error, error_type=error_type, headers={"Retry-After": str(seconds)})


def method_not_allowed(allowed: str) -> HTTPError:
    return http_error(405, f"this path supports only {allowed}", headers={"Allow": allowed})


def _type_of(status: int) -> str:
    """The phrase of the status in CamelCase: 404 gives `NotFound`."""
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return "ContentTooLarge"  # the phrase in HTTPStatus differs between Python 3.11 and 3.13
    return re.sub("[^A-Za-z]", "", HTTPStatus(status).phrase.title())


def response_for_exception(error: Exception, retry_after: int) -> Response:
    kind = type(error).__name__
    match error:
        case errors.EventError():
            return error_response(error.status, str(error), error_type=kind, attribute=error.attribute)
        case errors.InstanceNotFoundError() | errors.NotFoundError() | errors.UnknownWorkflowError():
            return error_response(404, str(error), error_type=kind)
        case errors.ActionRefusedError() | errors.InstanceConflictError():
            return error_response(409, str(error), error_type=kind)
        case errors.ArgumentError() | errors.EventValidationError():
            # An `EventError` becomes an `ArgumentError` where a person sends the event: it knows the attribute.
            return error_response(
                422, str(error), error_type=kind, attribute=getattr(error.__cause__, "attribute", None)
            )
        case errors.PayloadTooLargeError():
            return error_response(413, "the data exceeds the size limit of the storage", error_type=kind)
        case errors.PayloadError() | errors.StorageRejectedError():
            return error_response(400, "the storage cannot hold this data", error_type=kind)
        case (
            errors.StorageUnavailableError()
            | errors.StorageConflictError()
            | errors.AppError()
            | errors.LeaseLostError()
            | TimeoutError()
        ):
            logger.warning("request failed (%s: %s), answering 503 with Retry-After: %d", kind, error, retry_after)
            return retry_later(503, "the database is not available", retry_after, error_type=kind)
        case _:
            logger.error("request failed with an unexpected error, answering 500", exc_info=error)
            return error_response(500, "unexpected error: see the log of the server", error_type=kind)
