"""The log lines of one worker about parked runs: a bad deploy parks a thousand runs for one reason."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from edda.core.model import RunId

from .log import RunLog, write

EVERY = 60.0
"""Seconds in which one workflow and reason are told in full once, and how many more runs there were."""


class _Told:
    def __init__(self, run_id: RunId, until: float) -> None:
        self.run_id = run_id
        self.until = until
        self.others: set[RunId] = set()


class ParkingLog:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._told: dict[tuple[str, str], _Told] = {}

    def write(self, log: RunLog, run_id: RunId, workflow: str, reason: str, next_try: str) -> None:
        self.summarize()
        key = workflow, _kind_of(reason, run_id)
        told = self._told.get(key)
        if told is None:
            self._told[key] = _Told(run_id, self._monotonic() + EVERY)
        elif run_id != told.run_id:
            told.others.add(run_id)
        log.write("run_parked" if told is None else "run_parked_too", error=reason, next_try=next_try)

    def summarize(self, *, all: bool = False) -> None:
        """Of those whose minute is over, or of all, how many more runs were parked."""
        now = self._monotonic()
        for key in [key for key, told in self._told.items() if all or now >= told.until]:
            told = self._told.pop(key)
            if told.others:
                write("more_runs_parked", run=told.run_id, workflow=key[0], runs=len(told.others))


def _kind_of(reason: str, run_id: RunId) -> str:
    """The reason without what differs from run to run."""
    return re.sub(r"\d+", "#", reason.replace(run_id, ""))
