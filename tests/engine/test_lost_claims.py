"""A claim whose answer is lost, and which comes into force when nobody expects it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from edda import EddaApp, WorkflowContext, workflow
from edda.core.model import Claim, RunId, WorkerId
from edda.engine.settings import Settings
from edda.errors import StorageUnavailableError

from .conftest import MakeApp

QUICK = Settings(poll=0.05)


class LateClaim:
    """The first claim is cut off; the server goes on with it after the worker has looked what it owns."""

    def __init__(self, app: EddaApp) -> None:
        self._storage = app.engine.storage
        self._claim, self._owned = self._storage.claim, self._storage.owned_runs
        self._is_cut = False
        self._landed = asyncio.Event()

    async def claim(self, worker: WorkerId, names: Sequence[str], limit: int, seen: int = 0) -> Claim:
        if not self._is_cut:
            self._is_cut = True
            raise StorageUnavailableError("the answer was lost on purpose")
        if not self._landed.is_set():
            return Claim(await self._storage.now(), (), seen)
        return await self._claim(worker, names, limit, seen)

    async def owned(self, worker: WorkerId) -> dict[RunId, int]:
        known = await self._owned(worker)
        if not self._landed.is_set():
            late = await self._claim(worker, ["greet"], 10)
            assert late.runs
            self._landed.set()
        return known


async def test_a_claim_that_comes_into_force_late_strands_no_run(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def greet(ctx: WorkflowContext) -> str:
        return "hello"

    app, client = await make_app(settings=QUICK), await make_app(worker=False)
    late = LateClaim(app)
    monkeypatch.setattr(app.engine.storage, "claim", late.claim)
    monkeypatch.setattr(app.engine.storage, "owned_runs", late.owned)
    run_id = await client.start(greet)
    assert await client.handle(run_id).result(timeout=20) == "hello"
