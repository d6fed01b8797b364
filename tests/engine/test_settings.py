"""Numbers that cannot work are refused when they are given, with their names and with what is expected."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

import pytest

from edda import EddaApp, WorkflowContext, workflow
from edda.engine.settings import Settings

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("given", "error", "expected"),
    [
        ({"lease": "3"}, TypeError, "Settings(lease='3'): expected a number above 0"),
        ({"lease": True}, TypeError, "Settings(lease=True): expected a number above 0"),
        ({"lease": None}, TypeError, "Settings(lease=None): expected a number above 0"),
        ({"lease": -3}, ValueError, "Settings(lease=-3): expected a number above 0"),
        ({"lease": NAN}, ValueError, "Settings(lease=nan): expected a number above 0"),
        ({"lease": INFINITE}, ValueError, "Settings(lease=inf): expected a number above 0"),
        ({"lease": 1e12}, ValueError, "and at most 1,000,000,000"),
        ({"lease": 1}, ValueError, "Settings(lease=1, heartbeat=3.0): expected a lease of at least 2 heartbeats"),
        ({"heartbeat": 10}, ValueError, "Raise lease or lower heartbeat"),
        ({"heartbeat": 0}, ValueError, "Settings(heartbeat=0): expected a number above 0"),
        ({"poll": 0}, ValueError, "Settings(poll=0): expected a number above 0"),
        ({"sweep": 0}, ValueError, "Settings(sweep=0): expected a number above 0"),
        ({"linger": -0.1}, ValueError, "Settings(linger=-0.1): expected a number of 0 or more"),
        ({"capacity": 0}, ValueError, "Settings(capacity=0): expected a whole number of 1 or more"),
        ({"capacity": 1.5}, TypeError, "Settings(capacity=1.5): expected a whole number of 1 or more"),
        ({"claim_batch": 0}, ValueError, "Settings(claim_batch=0)"),
        ({"threads": "4"}, TypeError, "Settings(threads='4')"),
        ({"message_retention_days": -1}, ValueError, "Settings(message_retention_days=-1)"),
        ({"run_retention_days": "7"}, TypeError, "expected a number of 0 or more, or None to keep runs"),
        ({"max_process_deaths": 0}, ValueError, "a whole number of 1 or more, or None to park no run"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(given: dict[str, Any], error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=re.escape(expected)):
        Settings(**given)


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
@pytest.mark.parametrize("value", ["5", True, -1, NAN, INFINITE, [1]])
def test_every_setting_is_checked(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"Settings\({name}="):
        Settings(**{name: value})


def test_the_defaults_fit_and_so_do_bounds() -> None:
    assert all(field.default is not MISSING for field in fields(Settings))
    Settings(lease=6, heartbeat=3, linger=0, takeover_grace=0, capacity=1, threads=1, message_retention_days=0)
    Settings(run_retention_days=None, max_process_deaths=None)


@pytest.mark.parametrize("value", ["5", 0, -1, True, 2.0, None])
@pytest.mark.parametrize("url", ["sqlite:///unused.db", "postgresql://host/db", "mysql://host/db", "memory://"])
def test_a_pool_size_that_cannot_work_is_refused(url: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"EddaApp\(pool_size=.+\): expected a whole number of 1 or more"):
        EddaApp("shop", url, pool_size=value)


@pytest.mark.parametrize("value", ["7", -1, True])
@pytest.mark.parametrize("name", ["message_retention_days", "run_retention_days"])
def test_a_retention_given_to_the_app_is_checked_too(name: str, value: Any) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises((TypeError, ValueError), match=rf"{name}=.+expected a number of 0 or more"):
        EddaApp("shop", "memory://", **given)


def test_workflows_that_are_no_list_are_refused() -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    given: Any = order
    with pytest.raises(TypeError, match=r"EddaApp\(workflows=order\): expected a list of workflows: \[order\]"):
        EddaApp("shop", "memory://", workflows=given)
    for wrong in ("order", 5):
        given = wrong
        with pytest.raises(TypeError, match=r"expected a list of workflows"):
            EddaApp("shop", "memory://", workflows=given)
