"""The log lines of the engine: a message for people, and the same facts as fields of the record for programs.

`LINES` has each line once: its logger, its level and its text. The fields are attributes of the record, prefixed with
`edda_`, so that a JSON formatter finds `edda_run` beside the message; `edda_line` is the line's name. Arguments and
results are never fields. An error is, as `Class: message`, without the passwords of URLs, credentials, and values of
redacted fields, also those of the run's and the step's arguments that the message repeats without their names. Every
text is cut to one line of bounded length: a run id with a line break or an escape sequence cannot forge another line.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from edda.core.codec import Codec
from edda.core.exceptions import tell
from edda.core.logs import censor, secrets_in
from edda.core.model import MICROSECONDS
from edda.core.redact import redact_credentials
from edda.core.value_path import truncate

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

runs = logging.getLogger("edda.run")
workers = logging.getLogger("edda.worker")
outbox = logging.getLogger("edda.outbox")

MOST_CHARACTERS = 2_000
"""Of one field."""

_FREE_TEXT = frozenset({"error", "reason", "waits_for"})
"""Fields that users, libraries and callers write: the others are names and ids."""


class Line(NamedTuple):
    logger: logging.Logger
    level: int
    text: str
    """With the fields that it needs, as `%(run)s`."""

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(re.findall(r"%\((\w+)\)", self.text)))


_RUN = "run %(run)s of %(workflow)s"

LINES: dict[str, Line] = {
    # Workers
    "worker_started": Line(
        workers, INFO, "worker %(worker)s of %(service)s started on %(database)s, it runs: %(workflows)s"
    ),
    "worker_stopped": Line(
        workers, INFO, "worker %(worker)s of %(service)s stopped, its open runs go to other workers"
    ),
    "worker_lost": Line(
        workers, WARNING, "worker %(worker)s lost its lease; its runs go on elsewhere, a new worker begins"
    ),
    "worker_taken_over": Line(
        workers, WARNING, "worker %(worker)s took over %(runs)d runs of worker %(dead)s, whose lease has lapsed"
    ),
    "worker_dead": Line(
        workers, WARNING, "worker %(worker)s freed the runs of worker %(dead)s: its process %(process)d is gone"
    ),
    "database_away": Line(
        workers,
        WARNING,
        "worker %(worker)s: the database cannot be used by %(step)s of run %(run)s (%(error)s); %(steps)d steps of "
        "this worker wait for it, their attempts are not counted and are run again when it answers",
    ),
    "database_back": Line(workers, INFO, "worker %(worker)s: the database answers again after %(seconds).1f s"),
    "runs_unclaimed": Line(
        workers,
        WARNING,
        "worker %(worker)s: runs of %(workflow)s (%(runs)d or more) have been ready for 30 s or longer and no worker "
        "has claimed them; start a worker that has this workflow, or more workers if all that have it are busy",
    ),
    # Runs
    "run_started": Line(runs, DEBUG, f"{_RUN} started"),
    "run_claimed": Line(runs, DEBUG, f"{_RUN} claimed by worker %(worker)s, with %(entries)d entries to replay"),
    "run_suspended": Line(runs, DEBUG, f"{_RUN} left memory as %(status)s, waiting for %(waits_for)s until %(until)s"),
    "run_handed_back": Line(runs, DEBUG, f"{_RUN} handed back for another worker to claim"),
    "run_recurred": Line(runs, DEBUG, f"{_RUN} continues as generation %(generation)d"),
    "run_completed": Line(runs, DEBUG, f"{_RUN} completed"),
    "run_failed": Line(runs, WARNING, f"{_RUN} failed: %(error)s"),
    "run_cancelled": Line(runs, INFO, f"{_RUN} ended as cancelled: %(reason)s"),
    "run_parked": Line(runs, WARNING, f"{_RUN} is parked, next try at %(next_try)s: %(error)s"),
    "run_parked_too": Line(runs, DEBUG, f"{_RUN} is parked like others, next try at %(next_try)s: %(error)s"),
    "more_runs_parked": Line(
        runs,
        WARNING,
        "run %(run)s is parked, and %(runs)d more runs of %(workflow)s for the same reason in the last minute",
    ),
    "run_ends_unread": Line(
        runs,
        WARNING,
        f"{_RUN} was cancelled while it was parked and ends without its code or compensations: %(error)s",
    ),
    "run_suspect": Line(
        runs,
        WARNING,
        f"{_RUN} lost %(deaths)d processes before its steps in flight ended; worker %(worker)s runs it %(company)s",
    ),
    "run_resumed": Line(runs, INFO, f"{_RUN} was parked and goes on"),
    "cancel_received": Line(runs, INFO, f"{_RUN} received a cancel: %(reason)s"),
    "deadline_passed": Line(runs, INFO, f"{_RUN} passed its deadline and is stopped"),
    "compensation_begun": Line(runs, WARNING, f"{_RUN} failed or was stopped, its compensations begin"),
    "compensation_failed": Line(
        runs,
        ERROR,
        f"{_RUN}: compensation %(step)s failed on attempt %(attempt)d, what it should undo stands: %(error)s",
    ),
    # Steps
    "step_begun": Line(runs, DEBUG, f"{_RUN}: %(step)s begins, attempt %(attempt)d"),
    "step_recorded": Line(runs, DEBUG, f"{_RUN}: %(step)s recorded, attempt %(attempt)d"),
    "step_repeated": Line(
        runs, INFO, f"{_RUN}: the database did not commit %(step)s, attempt %(attempt)d is run again: %(error)s"
    ),
    "step_retry": Line(
        runs,
        INFO,
        f"{_RUN}: %(step)s failed on attempt %(attempt)d, next try in %(delay).1f s at %(next_try)s: %(error)s",
    ),
    "step_failed": Line(runs, WARNING, f"{_RUN}: %(step)s failed on attempt %(attempt)d, not retried: %(error)s"),
    "retries_exhausted": Line(
        runs, WARNING, f"{_RUN}: %(step)s failed on attempt %(attempt)d, which was the last: %(error)s"
    ),
    "misfit_rejected": Line(
        runs,
        WARNING,
        f"{_RUN}: step %(step)s rejects number %(number)d of the log and goes on waiting, %(count)d so far: %(error)s",
    ),
    "steps_unfinished": Line(
        runs,
        WARNING,
        f"{_RUN} returned before %(steps)s had finished, which are cancelled: await the tasks that wait for them",
    ),
    # Outbox
    "event_rejected": Line(
        outbox,
        ERROR,
        "outbox event %(event_id)s of type %(event_type)s is rejected by its receiver, and not sent again: %(error)s",
    ),
}


def write(name: str, secrets: Callable[[], Iterable[str]] = frozenset, /, **fields: Any) -> None:
    """Log the line of this name, if its logger wants it. `secrets` are hidden in what others wrote."""
    logger, level, text = LINES[name]
    if logger.isEnabledFor(level):
        for field in _FREE_TEXT.intersection(fields):
            # Here and not only in the filter of `core.logs`, which sees the message and not the record's own fields.
            fields[field] = censor(truncate(fields[field], 10 * MOST_CHARACTERS), secrets())
        told = {field: one_line(value) if isinstance(value, str) else value for field, value in fields.items()}
        extra = {f"edda_{field}": value for field, value in told.items()}
        logger.log(level, text, told, extra={"edda_line": name, **extra})


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def one_line(text: str) -> str:
    """Without what would break a line or be obeyed by a terminal: that is written as Python writes it."""
    text = truncate(text, MOST_CHARACTERS)
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def tell_error(error: BaseException) -> str:
    return redact_credentials(tell(error))


def tell_moment(microseconds: int) -> str:
    """ISO 8601 in UTC."""
    return datetime.fromtimestamp(microseconds / MICROSECONDS, UTC).isoformat(timespec="milliseconds")


class RunLog:
    """The lines about one run. Those about an entry of its history wait until the entry is committed: a replay
    appends no entries, so it writes none of them again."""

    __slots__ = ("_codec", "_input", "_run", "_waiting", "is_verbose")

    def __init__(self, run_id: str, workflow: str, codec: Codec, input: bytes) -> None:
        self._run = (run_id, workflow)
        self._codec = codec
        self._input = input
        self._waiting: deque[tuple[int, str, bytes, dict[str, Any]]] | None = None
        self.is_verbose = runs.isEnabledFor(DEBUG)
        """Asked once per claim, so that a step of a quiet run costs one look at an attribute."""

    def write(self, name: str, given: bytes = b"", /, **fields: Any) -> None:
        """`given` are the arguments of the step that it is about."""
        run, workflow = self._run
        write(
            name, lambda: self._secrets_in(self._input) | self._secrets_in(given), run=run, workflow=workflow, **fields
        )

    def write_at(self, seq: int, name: str, given: bytes = b"", /, **fields: Any) -> None:
        """When the entry of this number is committed."""
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append((seq, name, given, fields))

    def _secrets_in(self, data: bytes) -> frozenset[str]:
        try:
            return secrets_in(self._codec.decode(data)) if data else frozenset()
        except Exception:  # the user's transform may raise anything; a log line is no reason to fail a run
            return frozenset()

    def flushed(self, length: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= length:
            _, name, given, fields = waiting.popleft()
            self.write(name, given, **fields)
