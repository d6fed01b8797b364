"""Ends of runs that the database refuses: a run is reported as it is in the database, and goes on to be driven."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest

from edda import EddaApp, RunStatus, WorkflowContext, activity, workflow
from edda.core.model import BatchResult, End, Fence, RunId, RunWrite
from edda.errors import StorageRejectedError

from .conditions import PATIENCE, until
from .conftest import MakeApp

Refuses = Callable[[End], bool]


class Refusing:
    """A database that refuses some ends, as one does whose column does not take the value."""

    def __init__(self, app: EddaApp, monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
        self.refused: list[End] = []
        self.refuses = refuses
        self._write = app.engine.storage.write
        monkeypatch.setattr(app.engine.storage, "write", self.write)

    async def write(self, fence: Fence, batch: Sequence[RunWrite], *token: int) -> BatchResult | None:
        ends = [
            bundle.transition
            for bundle in batch
            if isinstance(bundle.transition, End) and self.refuses(bundle.transition)
        ]
        if ends:
            self.refused += ends
            raise StorageRejectedError("refused on purpose")
        return await self._write(fence, batch, *token)


@activity
async def work(ctx: WorkflowContext) -> str:
    return "done"


@pytest.mark.parametrize("status", [RunStatus.COMPLETED, RunStatus.CANCELLED])
async def test_a_run_whose_end_is_refused_ends_as_failed_in_the_database_too(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, status: RunStatus
) -> None:
    begun = asyncio.Event()

    @workflow
    async def job(ctx: WorkflowContext) -> str:
        begun.set()
        if status is RunStatus.CANCELLED:
            await asyncio.sleep(3600)
        return await work(ctx)

    app = await make_app()
    refusing = Refusing(app, monkeypatch, lambda end: end.status is status)
    run_id = await app.start(job)
    await asyncio.wait_for(begun.wait(), PATIENCE)
    if status is RunStatus.CANCELLED:
        await app.cancel(run_id)
    with pytest.raises(StorageRejectedError, match="on purpose"):
        await app.handle(run_id).result(timeout=PATIENCE)
    record = await app.client.read_run(run_id)
    assert record.status is RunStatus.FAILED
    assert record.owner is None
    assert len(refusing.refused) == 1


async def test_a_parent_is_told_of_a_child_whose_end_is_refused(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def small(ctx: WorkflowContext) -> str:
        return "too long"

    @workflow
    async def large(ctx: WorkflowContext) -> str:
        try:
            return await small.run()
        except StorageRejectedError as error:
            return f"its child: {error}"

    app = await make_app()
    Refusing(app, monkeypatch, lambda end: b"too long" in end.value)
    assert await app.run(large) == "its child: refused on purpose"


async def test_a_run_that_may_not_end_at_all_stays_open_and_ends_later(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a constraint or a trigger that somebody has put on the table."""

    @workflow
    async def job(ctx: WorkflowContext) -> str:
        return await work(ctx)

    app = await make_app()
    refusing = Refusing(app, monkeypatch, lambda end: True)
    with caplog.at_level(logging.WARNING, "edda"):
        run_id = await app.start(job)
        await until(lambda: len(refusing.refused) >= 4, "it was tried again")
        record = await app.engine.storage.get(RunId(run_id))
        assert record is not None
        assert record.status is RunStatus.RUNNING, "nothing is told that is not so"
        refusing.refuses = lambda end: False
        assert await app.handle(run_id).result(timeout=PATIENCE) == "done"
    assert len([one for one in caplog.records if run_id in one.getMessage()]) <= 3 * len(refusing.refused)
