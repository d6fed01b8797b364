"""What the examples of sagas, children, recurring and channels print: it is what they are there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import ROOT
from .test_code_blocks import run_in

SAGA = """\
a trip that is paid
  + flight to Rome
  + hotel in Rome, 3 nights
  have a good time in Rome
a trip that fails
  + flight to Atlantis
  - flight F-Atlantis cancelled
  failed: no room above water
a trip that is cancelled while it waits
  + flight to Oslo
  + hotel in Oslo, 3 nights
  - hotel in Oslo cancelled, 3 nights
  - flight F-Oslo cancelled
  cancelled: the customer has changed his mind
"""

CHILDREN = """\
a shipment, one parcel of which fails
  + lute packed
  weight 2.5
a shipment that is cancelled on its way
  + flute packed
  - flute unpacked
  the run that started it was cancelled
  a letter for Eve is sent all the same
"""

RECURRING = """\
round 0: 17 degrees
round 1: 18 degrees
round 2: 22 degrees
round 3: 31 degrees
too hot in round 3
balance 250.0, entries in the last history: 52
"""

CHANNELS = """\
soup, hot
fish, hot
cake, hot
tea, hot
4 dishes, each cooked once
"""


@pytest.mark.parametrize(
    ("example", "output"),
    [("saga.py", SAGA), ("children.py", CHILDREN), ("recurring.py", RECURRING), ("channels.py", CHANNELS)],
)
def test_an_example_shows_the_same_the_first_and_the_second_time(example: str, output: str, tmp_path: Path) -> None:
    for _ in range(2):  # on the same database: what is left of the first time must not matter
        done = run_in(tmp_path, ROOT / "examples" / example)
        assert (done.returncode, done.stdout) == (0, output)
        # Python prints the warnings of a program that does not set up logging: here those of failed runs.
        assert all(line.startswith("run ") for line in done.stderr.splitlines()), done.stderr
