"""Runs that wait for code which no worker has: the log of a worker says so."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from edda import WorkflowContext, activity, workflow
from edda.engine.settings import Settings
from edda.engine.worker import maintenance

from .conditions import until
from .conftest import MakeApp

OFTEN = Settings(sweep=0.05, orphan_sweep=0.1, takeover_grace=0.0, call_timeout=30.0)


async def test_a_worker_tells_once_of_runs_whose_workflow_no_worker_has(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0
    find = maintenance.find_unclaimed

    async def count(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return await find(*args)

    monkeypatch.setattr(maintenance, "find_unclaimed", count)
    monkeypatch.setattr(maintenance, "UNCLAIMED", 200_000)

    @activity
    async def work(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    @workflow
    async def known(ctx: WorkflowContext) -> None:
        await work(ctx)

    @workflow
    async def unknown(ctx: WorkflowContext) -> None: ...

    def lines() -> list[dict[str, Any]]:
        return [vars(one) for one in caplog.records if vars(one).get("edda_line") == "runs_unclaimed"]

    client = await make_app(workflows=[known, unknown], worker=False)
    for _ in range(3):
        await client.start(unknown)
    await client.start(known)
    with caplog.at_level(logging.WARNING, "edda"):
        await make_app(workflows=[known], settings=OFTEN)
        await until(lambda: bool(lines()), "the worker has told of it")
        seen = looks
        await until(lambda: looks > seen + 2, "it has looked again")
    assert [line["edda_workflow"] for line in lines()] == ["unknown"]
    assert 1 <= lines()[0]["edda_runs"] <= 3, "those that have been ready for long enough"
