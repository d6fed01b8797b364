"""A short run of the fuzzer; the long one is a command."""

from __future__ import annotations

from tests import tiers

from .fuzz import run

INPUTS_PER_EXAMPLE = 5_000


def test_every_input_gives_an_event_or_an_event_error_quickly() -> None:
    inputs = INPUTS_PER_EXAMPLE * tiers.current().examples
    tally = run(inputs, seed=20_260_131)
    assert tally.failures == []
    assert tally.events > inputs / 20, "the mutations reach nothing any more"
    assert tally.slowest < 0.1, tally.slowest_message
