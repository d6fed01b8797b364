"""The status text of a run."""

from __future__ import annotations

from typing import Any

import pytest

from edda.control.status_text import format_duration, status_text
from edda.core.event_match import describe
from edda.core.model import MICROSECONDS, RunId, RunRecord, WorkerId
from edda.core.redact import Redaction
from edda.core.states import RunStatus

NOW = 1_800_000_000 * MICROSECONDS
MINUTE = 60 * MICROSECONDS


def record(status: RunStatus, **known: Any) -> RunRecord:
    base: dict[str, Any] = {"owner": None, "ready_at": None, "reason": None, "ended_at": None, "value": None}
    return RunRecord(RunId("r"), "order", 0, status, b"{}", NOW - 10 * MINUTE, None, **{**base, **known})


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (record(RunStatus.RUNNING, owner=WorkerId("w1")), "runs on worker w1"),
        (
            record(RunStatus.RUNNING, ready_at=0),
            "is ready, and no worker that has the workflow order has taken it yet",
        ),
        (
            record(RunStatus.RUNNING, ready_at=0, has_cancel=True),
            "is ready, and no worker that has the workflow order has taken it yet to cancel it",
        ),
        (
            record(RunStatus.RUNNING, ready_at=NOW - 10 * MINUTE, has_cancel=True),
            "is ready, and no worker has taken it to cancel it for 10 min: is a worker running that has the workflow "
            "order?",
        ),
        (record(RunStatus.RUNNING, ready_at=NOW + MINUTE), "begins in 1 min"),
        (record(RunStatus.WAITING_FOR_EVENT, reason="paid"), "waits for paid"),
        (
            record(RunStatus.WAITING_FOR_EVENT, reason="paid", ready_at=NOW + 2 * MINUTE),
            "waits for paid, 2 min more at most",
        ),
        (
            record(RunStatus.WAITING_FOR_TIMER, reason="timer 'timer:1'", ready_at=NOW + MINUTE),
            "sleeps until 2027-01-15 08:01:00 UTC, 1 min more",
        ),
        (
            record(RunStatus.WAITING_FOR_TIMER, reason="step 'charge:1'", ready_at=NOW + MINUTE),
            "tries charge:1 again in 1 min: ValueError: no",
        ),
        (record(RunStatus.WAITING_FOR_CHILD, reason="child 'ship:1'"), "waits for its child ship:1"),
        (
            record(RunStatus.WAITING_FOR_CHILD, reason="settled 'settled:1'"),
            "waits for its running steps and children to end",
        ),
        (record(RunStatus.COMPENSATING, owner=WorkerId("w1")), "runs its compensations, on worker w1"),
        (
            record(RunStatus.PARKED, reason="NonDeterminismError: x", ready_at=NOW + MINUTE),
            "is parked (tried again in 1 min): NonDeterminismError: x",
        ),
        (
            record(RunStatus.PARKED, reason="NonDeterminismError: x", has_cancel=True),
            "is parked: NonDeterminismError: x; a cancel is stored and is carried out when the code fits again; cancel "
            "it once more to end it now, without compensation",
        ),
        (record(RunStatus.COMPLETED, ended_at=NOW), "completed in 10 min"),
        (record(RunStatus.FAILED), "failed: ValueError: no"),
        (record(RunStatus.CANCELLED), "was cancelled: ValueError: no"),
    ],
)
def test_each_status_has_a_text(run: RunRecord, words: str) -> None:
    assert status_text(run, NOW, outcome="ValueError: no") == words


@pytest.mark.parametrize(
    ("status", "begin"),
    [(RunStatus.RUNNING, "has stopped: its"), (RunStatus.COMPENSATING, "has stopped compensating: its")],
)
def test_a_run_of_a_lost_worker_has_stopped(status: RunStatus, begin: str) -> None:
    words = status_text(record(status, owner=WorkerId("w1")), NOW, lost="has died")
    assert words == f"{begin} worker w1 has died; another worker takes it over as soon as one is running"


def test_every_state_has_words() -> None:
    assert all(status_text(record(status), NOW) for status in RunStatus)


def test_a_wait_shows_elapsed_and_total_time() -> None:
    reason = Redaction().clean(describe("payment.completed", {"order_id": "A-17"}))
    run = record(RunStatus.WAITING_FOR_EVENT, reason=reason, ready_at=NOW + 2 * MINUTE)
    words = status_text(run, NOW, since=NOW - 3 * MINUTE)
    assert words == "waits for payment.completed where order_id = A-17, 3 min of 5 min"


@pytest.mark.parametrize(
    ("match", "words"),
    [
        ({"card.number": "4111 1111", "id": 5}, "paid where card.number = ••• and id = 5"),
        ({"user.token": "x" * 200, "id": "a b"}, "paid where user.token = ••• and id = a b"),
        ({"password": 'a " b'}, "paid where password = •••"),
        ({"@authorization": "Bearer x"}, "paid where @authorization = •••"),
    ],
)
def test_secrets_in_match_values_are_redacted(match: dict[str, Any], words: str) -> None:
    assert Redaction(["card.number"]).clean(describe("paid", match)) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "40 ms"),
        (3.2, "3.2 s"),
        (9.0, "9 s"),
        (59, "59 s"),
        (60, "1 min"),
        (80, "1 min 20 s"),
        (3600, "1 h"),
        (3605, "1 h"),
        (4800, "1 h 20 min"),
        (100_000, "1 d 3 h"),
        (-5, "0 ms"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, words: str) -> None:
    assert format_duration(int(seconds * MICROSECONDS)) == words


def test_process_deaths_and_unclaimed_runs_are_shown() -> None:
    long_ago = NOW - 10 * MINUTE
    assert status_text(record(RunStatus.RUNNING, owner=WorkerId("w1"), deaths=1), NOW).endswith(
        "after a process death without progress"
    )
    assert status_text(record(RunStatus.RUNNING, deaths=3), NOW).startswith(
        "waits until a worker runs it apart from others, after 3 process deaths"
    )
    assert "is a worker running that has the workflow" in status_text(record(RunStatus.RUNNING, ready_at=long_ago), NOW)
