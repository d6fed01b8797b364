"""Real servers that real clients send events to, killed again and again; the long forms are commands."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from faults.acknowledged_events import acknowledge
from faults.duplicate_events import repeat
from faults.target_databases import KINDS, fresh

pytestmark = pytest.mark.processes


@pytest.mark.timeout(180)
@pytest.mark.parametrize("database", KINDS)
async def test_an_acknowledged_event_survives_a_kill_and_reaches_the_run_that_waits(
    database: str, tmp_path: Path
) -> None:
    with fresh(database, tmp_path) as place:
        outcome = await acknowledge(place, tmp_path, times=50)
    assert outcome.is_sound, f"{outcome} {outcome.violations}"


async def test_a_server_that_answers_before_the_commit_is_found_out(tmp_path: Path) -> None:
    """The control of the one above."""
    with fresh("sqlite", tmp_path) as place:
        outcome = await acknowledge(place, tmp_path, times=5, control="promise")
    assert outcome.lost, f"nobody noticed: {outcome}"


@pytest.mark.timeout(180)
async def test_an_event_that_is_sent_again_and_again_counts_once(tmp_path: Path) -> None:
    with fresh("postgres", tmp_path) as place:
        outcome = await repeat(place, tmp_path, events=1000, seed=secrets.randbelow(1_000_000))
    assert outcome.is_sound, f"{outcome} {outcome.violations}"
    assert outcome.kills, f"nobody was killed: {outcome}"
