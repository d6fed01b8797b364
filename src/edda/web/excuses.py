"""What a client is told about an error: enough to act on it, nothing of what is inside."""

from __future__ import annotations

import logging

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
from edda.web.answers import Response, error_response, retry_later

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
