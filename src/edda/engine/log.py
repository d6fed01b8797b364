"""The log lines of the engine: a message for people, and the same information as fields of the record for programs.

`LINES` has each line once: its logger, its level and its text. The fields are attributes of the record, prefixed with
`edda_`, so that a JSON formatter finds `edda_run` beside the message; `edda_line` is the line's name. Arguments and
results are never fields. An error is, as `Class: message`, without the passwords of URLs, credentials, and values of
redacted fields, also those of the run's and the step's arguments that the message repeats without their names. Every
text is cut to one line of bounded length: a run id with a line break or an escape sequence cannot forge another line.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from msgspec import Struct, field

from edda.core.codec import Codec
from edda.core.exceptions import format_exception
from edda.core.model import MICROSECONDS, RunId
from edda.core.redact import censor, redact_credentials, secrets_in
from edda.core.value_path import truncate

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

runs = logging.getLogger("edda.run")
workers = logging.getLogger("edda.worker")
outbox = logging.getLogger("edda.outbox")

MAX_CHARACTERS = 2_000
"""Of one field."""

_FREE_TEXT = frozenset({"error", "reason", "waits_for"})
"""Fields with text of users, libraries and callers; the others are names and ids."""


class Line(NamedTuple):
    logger: logging.Logger
    level: int
    text: str
    """With its fields, as `%(run)s`."""

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
        workers, INFO, "worker %(worker)s of %(service)s stopped; other workers take the runs that it has not finished"
    ),
    "worker_lost": Line(
        workers, WARNING, "worker %(worker)s lost its lease; its runs go on elsewhere, a new worker begins"
    ),
    "worker_taken_over": Line(
        workers, WARNING, "worker %(worker)s took over the runs (%(runs)d) of worker %(dead)s, whose lease has expired"
    ),
    "worker_dead": Line(
        workers,
        WARNING,
        "worker %(worker)s made the runs of worker %(dead)s free for others: its process %(process)d is gone",
    ),
    "database_away": Line(
        workers,
        WARNING,
        "worker %(worker)s: the database cannot be used by %(step)s of run %(run)s (%(error)s); the steps of this "
        "worker that wait for it (%(steps)d) are run again when it answers, and their attempts are not counted",
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
        "run %(run)s is parked, and so are more runs (%(runs)d) of %(workflow)s for the same reason in the last minute",
    ),
    "run_ends_unread": Line(
        runs,
        WARNING,
        f"{_RUN} was cancelled while it was parked and ends without its code or compensations: %(error)s",
    ),
    "run_suspect": Line(
        runs,
        WARNING,
        f"{_RUN} lost %(deaths)d processes before its running steps ended; worker %(worker)s runs it %(company)s",
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
    "result_mismatch": Line(
        runs,
        WARNING,
        f"{_RUN}: the result%(path)s of %(step)s does not fit the return annotation, it is passed on as plain data: "
        "%(error)s",
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
    """Log the line of this name, if its level is enabled. `secrets` are removed from the free texts."""
    logger, level, text = LINES[name]
    if logger.isEnabledFor(level):
        for field in _FREE_TEXT.intersection(fields):
            # Here and not only in the filter of `core.redact`, which does not see the record's own fields.
            fields[field] = censor(truncate(fields[field], 10 * MAX_CHARACTERS), secrets())
        values = {field: one_line(value) if isinstance(value, str) else value for field, value in fields.items()}
        extra = {f"edda_{field}": value for field, value in values.items()}
        logger.log(level, text, values, extra={"edda_line": name, **extra})


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def one_line(text: str) -> str:
    """With line breaks and control characters escaped as Python writes them."""
    text = truncate(text, MAX_CHARACTERS)
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def format_error(error: BaseException) -> str:
    return redact_credentials(format_exception(error))


def format_time(microseconds: int) -> str:
    """ISO 8601 in UTC."""
    return datetime.fromtimestamp(microseconds / MICROSECONDS, UTC).isoformat(timespec="milliseconds")


class RunLog(Struct, eq=False):
    """The lines about one run. Those about an entry of its history wait until the entry is committed: a replay
    appends no entries, so it writes none of them again."""

    run_id: str
    workflow: str
    codec: Codec
    input: bytes
    is_verbose: bool = field(default_factory=lambda: runs.isEnabledFor(DEBUG))
    """Read once per claim: a step of a quiet run costs one attribute access."""
    _waiting: deque[tuple[int, str, bytes, dict[str, Any]]] | None = None

    def write(self, name: str, given: bytes = b"", /, **fields: Any) -> None:
        """`given` are the arguments of the step: their secrets are removed, too."""
        write(
            name,
            lambda: self._secrets_in(self.input) | self._secrets_in(given),
            run=self.run_id,
            workflow=self.workflow,
            **fields,
        )

    def write_at(self, seq: int, name: str, given: bytes = b"", /, **fields: Any) -> None:
        """Write it when the entry of this number is committed."""
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append((seq, name, given, fields))

    def _secrets_in(self, data: bytes) -> frozenset[str]:
        try:
            return secrets_in(self.codec.decode(data)) if data else frozenset()
        except Exception:  # the user's transform may raise any error; a log line must not fail a run
            return frozenset()

    def flushed(self, length: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= length:
            _, name, given, fields = waiting.popleft()
            self.write(name, given, **fields)


PARKED_INTERVAL = 60.0
"""Seconds in which one workflow and reason get one full log line, and one with the number of further runs."""


class _ParkedRuns(Struct):
    """Runs of one workflow that were parked for one reason."""

    run_id: RunId
    until: float
    others: set[RunId] = field(default_factory=set)


class ParkingLog:
    """The log lines of one worker about parked runs: a bad deploy parks a thousand runs for one reason."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._parked: dict[tuple[str, str], _ParkedRuns] = {}

    def write(self, log: RunLog, run_id: RunId, workflow: str, reason: str, next_try: str) -> None:
        self.summarize()
        # The reason without what differs from run to run.
        key = workflow, re.sub(r"\d+", "#", reason.replace(run_id, ""))
        first = self._parked.get(key)
        if first is None:
            self._parked[key] = _ParkedRuns(run_id, self._monotonic() + PARKED_INTERVAL)
        elif run_id != first.run_id:
            first.others.add(run_id)
        log.write("run_parked" if first is None else "run_parked_too", error=reason, next_try=next_try)

    def summarize(self, *, all: bool = False) -> None:
        """Log how many further runs were parked, for the reasons whose minute is over, or for all."""
        now = self._monotonic()
        for key in [key for key, first in self._parked.items() if all or now >= first.until]:
            first = self._parked.pop(key)
            if first.others:
                write("more_runs_parked", run=first.run_id, workflow=key[0], runs=len(first.others))
