"""Responses with the protective headers, JSON by default, and the response to each kind of exception."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from edda.errors import (
    ActionRefusedError,
    AppError,
    ArgumentError,
    EventError,
    EventValidationError,
    InstanceConflictError,
    InstanceNotFoundError,
    LeaseLostError,
    NotFoundError,
    PayloadError,
    PayloadTooLargeError,
    StorageConflictError,
    StorageRejectedError,
    StorageUnavailableError,
    UnknownWorkflowError,
)
from edda.web.asgi import Headers, Send

_CONTENT_SECURITY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_ALWAYS: Headers = [
    (b"content-security-policy", _CONTENT_SECURITY.encode()),
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
    """What is said here of the content's type, or of keeping it, counts instead of what is usual."""
    reason: str = ""
    """Of a refusal, in words."""

    async def send(self, send: Send, *, private: bool, head: bool) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.all_headers(private=private)})
        await send({"type": "http.response.body", "body": b"" if head else self.body})

    def all_headers(self, *, private: bool = False) -> Headers:
        own = {name for name, _ in self.headers}
        usual = security_headers(private=private)
        if self.body:
            usual.append(_JSON)
        if self.status != HTTPStatus.NO_CONTENT:
            usual.append((b"content-length", b"%d" % len(self.body)))
        return [*(header for header in usual if header[0] not in own), *self.headers]


def security_headers(*, private: bool = False) -> Headers:
    return [*_ALWAYS, _PRIVATE if private else _NO_STORE]


class HTTPError(Exception):
    """Carries an answer out of wherever it was found that the request cannot be served."""

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.status)
        self.answer = answer


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
    """To a page of ours: the caller has seen to it that the path is one."""
    return Response(303, headers=((b"location", path.encode("ascii")), *headers))


def retry_later(status: int, error: str, seconds: int, *, error_type: str | None = None) -> Response:
    return error_response(status, error, error_type=error_type, headers={"Retry-After": str(seconds)})


def method_not_allowed(allowed: str) -> HTTPError:
    return http_error(405, f"this address takes {allowed} only", headers={"Allow": allowed})


def _type_of(status: int) -> str:
    """`404` is a NotFound: the words of the status line."""
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return "ContentTooLarge"  # Python 3.13 has other words for it than 3.11
    return re.sub("[^A-Za-z]", "", HTTPStatus(status).phrase.title())


logger = logging.getLogger("edda.web")


def response_for_exception(error: Exception, retry_after: int) -> Response:
    kind = type(error).__name__
    match error:
        case EventError():
            return error_response(error.status, str(error), error_type=kind, attribute=error.attribute)
        case InstanceNotFoundError() | NotFoundError() | UnknownWorkflowError():
            return error_response(404, str(error), error_type=kind)
        case ActionRefusedError() | InstanceConflictError():
            return error_response(409, str(error), error_type=kind)
        case ArgumentError() | EventValidationError():
            return error_response(422, str(error), error_type=kind)
        case PayloadTooLargeError():
            return error_response(413, "the data is larger than may be stored", error_type=kind)
        case PayloadError() | StorageRejectedError():
            return error_response(400, "the data cannot be stored as it is", error_type=kind)
        case StorageUnavailableError() | StorageConflictError() | AppError() | LeaseLostError() | TimeoutError():
            logger.warning("a request is told to come back: %s: %s", kind, error)
            return retry_later(503, "the database does not take it at the moment", retry_after, error_type=kind)
        case _:
            logger.error("a request met an unexpected error", exc_info=error)
            return error_response(500, "an unexpected error; the log of the server has it", error_type=kind)
