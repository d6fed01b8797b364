"""What the watchdog reads from the stack of a blocked event loop."""

from __future__ import annotations

import sys
from typing import Any

from edda.engine.run.attempt import Attempt
from edda.engine.worker import watchdog


def test_an_attempt_that_is_being_made_on_the_blocked_thread_is_no_culprit() -> None:
    """The other thread may stand in a constructor."""
    half_made = Attempt.__new__(Attempt)
    made: dict[str, Any] = {"sys": sys}
    exec(compile("def run(self): return sys._getframe()", watchdog.__file__, "exec"), made)
    assert watchdog._run_of(made["run"](half_made)) is None
