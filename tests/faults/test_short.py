"""The short form of the fault runs: about twenty seconds on each database, and proof that it would have noticed.

What runs say and write is tried on one database at a time, whichever it is this time.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest

from faults.competing_consumers import compete
from faults.hammer import Task, hammer
from faults.ledger_hammer import LedgerHammer
from faults.protocol_breaks import OF_EVENTS
from faults.target_databases import KINDS, fresh

pytestmark = pytest.mark.processes

SECONDS = 14.0
"""Of noise; coming up, calming down and checking take the rest."""
HAPPENINGS = ("takeovers", "received", "timeouts", "freed", "recurred", "told", "undone", "cancelled", "failed")
"""Without them a run of the hammer proves nothing."""

TRIES = 4
"""What is broken shows by chance; once is the rule."""


@pytest.mark.timed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("database", KINDS)
def test_no_invariant_breaks_while_workers_are_killed_stopped_robbed_and_cut_off(database: str) -> None:
    report = hammer(Task(database, seconds=SECONDS, seed=secrets.randbelow(1_000_000), events=True))
    assert report.violations == (), f"{report}"
    for what in HAPPENINGS:
        assert report.counts[what], f"no {what}: {report}"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("control", OF_EVENTS)
def test_a_worker_that_breaks_the_protocol_is_found_out(control: str) -> None:
    """Broken on purpose, the same noise must show it, or the checks above prove nothing."""
    for _ in range(TRIES):
        seed = secrets.randbelow(1_000_000)
        report = hammer(Task("postgres", seconds=6.0, seed=seed, control=control, events=control != "fence"))
        if report.is_right:
            return
    pytest.fail(f"nobody noticed: {report}")


BOOK_HAPPENINGS = ("takeovers", "rows", "heard", "taken", "sent", "hosted", "shunned", "retries", "undone")


@pytest.mark.timed
@pytest.mark.timeout(180)
def test_each_message_counts_once_though_those_who_compete_for_it_are_killed(tmp_path: Path) -> None:
    with fresh(secrets.choice(KINDS), tmp_path) as place:
        contest = asyncio.run(compete(place, tmp_path, 250, 4, secrets.randbelow(1_000_000), seconds=8.0))
    assert contest.violations == (), f"{contest}"
    assert contest.kills, f"nobody was killed: {contest}"


@pytest.mark.timed
@pytest.mark.timeout(180)
def test_what_steps_wrote_said_and_sent_is_what_their_histories_say() -> None:
    task = Task(secrets.choice(KINDS), seconds=9.0, seed=secrets.randbelow(1_000_000), trades=True)
    report = hammer(task, kind=LedgerHammer)
    assert report.violations == (), f"{report}"
    for what in BOOK_HAPPENINGS:
        assert report.counts[what], f"no {what}: {report}"


@pytest.mark.timed
@pytest.mark.timeout(180)
@pytest.mark.parametrize("control", ["records", "owners"])
def test_a_step_that_is_recorded_apart_from_its_rows_or_by_a_stranger_is_found_out(control: str) -> None:
    for _ in range(TRIES):
        task = Task("postgres", seconds=7.0, seed=secrets.randbelow(1_000_000), control=control, trades=True)
        report = hammer(task, kind=LedgerHammer)
        if report.is_right:
            return
    pytest.fail(f"nobody noticed: {report}")
