"""The short form of the torture: about twenty seconds on each database, and proof that it would have noticed."""

from __future__ import annotations

import secrets

import pytest

from .hammer import Task, hammer
from .places import KINDS

pytestmark = pytest.mark.pair

SECONDS = 14.0
"""Of noise; coming up, calming down and checking take the rest."""
SYMPTOMS = {
    "fence": ("rows of older epochs", "epochs go back", "ran again", "refuses its record"),
    "locks": ("but never",),
    "ends": ("asleep with nothing to wake it",),
    "recurs": ("letters unread",),
    "letters": ("asleep with nothing to wake it",),
    "undoing": ("and undid", "nobody knows what became of it"),
}
"""What is seen of each thing that can be broken."""
HAPPENINGS = ("takeovers", "received", "timeouts", "freed", "recurred", "told", "undone", "cancelled", "failed")
"""Without them a run of the hammer proves nothing."""

TRIES = 3
"""What is broken shows by chance; once is the rule."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("database", KINDS)
def test_no_invariant_breaks_while_workers_are_killed_stopped_robbed_and_cut_off(database: str) -> None:
    report = hammer(Task(database, seconds=SECONDS, seed=secrets.randbelow(1_000_000), events=True))
    assert report.violations == (), f"{report}"
    for what in HAPPENINGS:
        assert report.counts[what], f"no {what}: {report}"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("control", SYMPTOMS)
def test_a_worker_that_breaks_the_protocol_is_found_out(control: str) -> None:
    """Broken on purpose, the same noise must show it, or the checks above prove nothing."""
    for _ in range(TRIES):
        seed = secrets.randbelow(1_000_000)
        report = hammer(Task("postgres", seconds=6.0, seed=seed, control=control, events=control != "fence"))
        if any(symptom in violation for violation in report.violations for symptom in SYMPTOMS[control]):
            return
    pytest.fail(f"nobody noticed: {report}")
