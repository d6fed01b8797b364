"""Random programs under kills, in short: some forty on each database, and proof that the judge would have noticed."""

from __future__ import annotations

import secrets

import pytest

from faults.random_programs import Task, run_programs
from faults.script_workers import CONTROLS
from faults.target_databases import KINDS

pytestmark = pytest.mark.processes

PROGRAMS = 40
TRIES = 3
"""Kills may hide what is broken, such as a cancel that is delayed until the child has ended."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("database", KINDS)
def test_whatever_a_program_does_holds_though_its_workers_are_killed_all_the_time(database: str) -> None:
    report = run_programs(Task(database, PROGRAMS, secrets.randbelow(1_000_000)))
    assert report.violations == (), f"{report}"
    for what in ("children", "completed", "failed", "cancelled", "late", "undid", "kills"):
        assert report.counts.get(what), f"no {what}: {report}"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("control", CONTROLS)
def test_workers_that_undo_wrongly_or_spare_children_are_found_out(control: str) -> None:
    """Undone in the wrong order, or without what came late; or a child goes on when its parent was stopped."""
    for _ in range(TRIES):
        report = run_programs(Task("sqlite", PROGRAMS, secrets.randbelow(1_000_000), control))
        if report.is_right:
            return
    pytest.fail(f"the broken workers were not noticed: {report}")
