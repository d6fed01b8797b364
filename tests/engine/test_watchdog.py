"""What the watchdog reads from the stack of a blocked event loop."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from types import FrameType
from typing import Any

import pytest

from edda.engine.run.attempt import Attempt
from edda.engine.worker import watchdog
from edda.engine.worker.watchdog import Watchdog


def test_an_attempt_that_is_being_made_on_the_blocked_thread_is_no_culprit() -> None:
    """The other thread may stand in a constructor."""
    half_made = Attempt.__new__(Attempt)
    made: dict[str, Any] = {"sys": sys}
    exec(compile("def run(self): return sys._getframe()", watchdog.__file__, "exec"), made)
    assert watchdog._run_of(made["run"](half_made)) is None


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_garbage_is_collected_while_frames_of_another_thread_are_read(
    was_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Python 3.11 a collection there lets the other thread run, and frees the frames that are being read."""
    enabled: list[bool] = []
    frames, known, formatted = sys._current_frames, watchdog._is_known, traceback.format_stack

    def current_frames() -> dict[int, FrameType]:
        enabled.append(gc.isenabled())
        return frames()

    def is_known(frame: FrameType) -> bool:
        enabled.append(gc.isenabled())
        return known(frame)

    def format_stack(frame: FrameType) -> list[str]:
        enabled.append(gc.isenabled())
        return formatted(frame)

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    monkeypatch.setattr(watchdog, "_is_known", is_known)
    monkeypatch.setattr(traceback, "format_stack", format_stack)
    loop, release = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        watching = Watchdog(loop, thread.ident or 0)
        if not was_enabled:
            gc.disable()
        culprit, stack = watching.culprit(), watching.stack()
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
        release.set()
        thread.join()
        loop.close()
    assert culprit.description.startswith("code outside of any run")
    assert "in wait" in stack
    assert len(enabled) > 3
    assert not any(enabled)
