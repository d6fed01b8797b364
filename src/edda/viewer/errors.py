"""What could not be shown or done, as a page: what it was, and what to do."""

from __future__ import annotations

from edda.errors import (
    ActionRefusedError,
    ArgumentError,
    EddaError,
    EventError,
    EventValidationError,
    InstanceConflictError,
    InstanceNotFoundError,
    NotFoundError,
    PayloadError,
    UnknownWorkflowError,
)

from .request import Rendered

_STATUSES: tuple[tuple[tuple[type[EddaError], ...], int], ...] = (
    ((InstanceNotFoundError, NotFoundError, UnknownWorkflowError), 404),
    ((ActionRefusedError, InstanceConflictError), 409),
    ((ArgumentError, EventError, EventValidationError, PayloadError), 422),
)
_WORDS = {
    400: ("Not understood", "Go back, load the page again, and try once more."),
    401: ("Not logged in", "Log in with a token that this server knows."),
    403: ("Not allowed", "Log in with a token that may do this, or ask whoever runs this server."),
    404: ("Not found", "The address may be mistyped, or what was there has been deleted."),
    405: ("Not possible here", "Go back and use the buttons of the page."),
    408: ("Too slow", "Go back and send it again."),
    409: ("Not possible now", "Its state has changed: look at it again."),
    413: ("Too large", "Send less, or have max_body raised where this server is configured."),
    422: ("That cannot be done", "Go back, mend it, and send it again."),
    429: ("Too many at once", "Wait a minute, then try again."),
    431: ("Too many headers", "Delete the cookies of this site, then try again."),
    503: ("Not available", "Try again in a moment. If it stays so, run `edda doctor` where this server runs."),
}
_OTHERWISE = ("Something went wrong", "Try again. If it stays so, tell whoever runs this server.")


def error_page_for(error: EddaError) -> Rendered:
    """What is not to be told to people is raised again."""
    for kinds, status in _STATUSES:
        if isinstance(error, kinds):
            return error_page(status, str(error))
    raise error


def error_page(status: int, reason: str) -> Rendered:
    title, advice = _WORDS.get(status, _OTHERWISE)
    return Rendered("error.html", {"title": title, "reason": reason, "advice": advice}, status)
