"""The short form of the torture: about twenty seconds on each database, and proof that it would have noticed."""

from __future__ import annotations

import secrets

import pytest

from .hammer import Task, hammer
from .places import KINDS

pytestmark = pytest.mark.alone

SECONDS = 14.0
"""Of noise; coming up, calming down and checking take the rest."""
SYMPTOMS = ("rows of older epochs", "epochs go back", "ran again", "refuses its record")
"""Of a worker that goes on writing when its runs have passed on."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("database", KINDS)
def test_no_invariant_breaks_while_workers_are_killed_stopped_robbed_and_cut_off(database: str) -> None:
    report = hammer(Task(database, seconds=SECONDS, seed=secrets.randbelow(1_000_000)))
    assert report.violations == (), f"{report}"
    assert report.counts["takeovers"], f"nothing was taken over: {report}"
    assert report.counts["runs"], f"nothing was run: {report}"


@pytest.mark.timeout(180)
def test_a_worker_that_ignores_its_fence_is_found_out() -> None:
    """The control: without the fence the same noise must show, or the checks above prove nothing."""
    report = hammer(Task("postgres", seconds=6.0, seed=secrets.randbelow(1_000_000), broken=True))
    assert any(symptom in violation for violation in report.violations for symptom in SYMPTOMS), f"{report}"
