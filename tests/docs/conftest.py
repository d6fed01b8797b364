from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest

PORT = 8001
"""The one that the documentation names: commands are run as they are printed."""


@pytest.fixture
def port() -> Iterator[int]:
    """Belongs to one test of this machine at a time, whichever process it is in."""
    with (Path(gettempdir()) / f"edda-port-{PORT}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield PORT
