"""How many lines tell of parked runs."""

from __future__ import annotations

import logging

import pytest

from edda.core.codec import Codec
from edda.core.model import RunId
from edda.engine.log import PARKED_INTERVAL, ParkingLog, RunLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def parking_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> ParkingLog:
    caplog.set_level(logging.WARNING, "edda")
    return ParkingLog(clock)


def park(parking_log: ParkingLog, run_id: str, workflow: str = "order", reason: str = "NonDeterminismError") -> None:
    parking_log.write(RunLog(run_id, workflow, Codec(), b""), RunId(run_id), workflow, reason, "noon")


def test_a_bad_deploy_writes_two_lines_a_minute(
    parking_log: ParkingLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        for number in range(1_500):
            park(parking_log, f"A-{number}", reason=f"NonDeterminismError: A-{number} at entry {number}")
    assert [record.getMessage() for record in caplog.records] == [
        "run A-0 of order is parked, next try at noon: NonDeterminismError: A-0 at entry 0"
    ]
    caplog.clear()
    clock.now += PARKED_INTERVAL
    parking_log.summarize()
    parking_log.summarize()
    assert [record.getMessage() for record in caplog.records] == [
        "run A-0 is parked, and so are more runs (1499) of order for the same reason in the last minute"
    ]


def test_another_minute_workflow_or_reason_is_told_in_full(
    parking_log: ParkingLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    park(parking_log, "A-1")
    park(parking_log, "A-1")
    park(parking_log, "B-1", workflow="invoice")
    park(parking_log, "A-2", reason="DeadlockError")
    clock.now += PARKED_INTERVAL
    park(parking_log, "A-1")
    assert [vars(record)["edda_run"] for record in caplog.records] == ["A-1", "B-1", "A-2", "A-1"]
    assert {vars(record)["edda_line"] for record in caplog.records} == {"run_parked"}
