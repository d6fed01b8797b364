"""A short run of the fuzzer; the long one is a command."""

from __future__ import annotations

from .fuzz import run

INPUTS = 100_000


def test_whatever_comes_in_is_an_event_or_an_event_error_and_quickly() -> None:
    tally = run(INPUTS, seed=20_260_131)
    assert tally.failures == []
    assert tally.events > INPUTS / 20, "the mutations reach nothing any more"
    assert tally.slowest < 0.1, tally.slowest_message
