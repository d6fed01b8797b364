"""A claim whose answer is lost, and which comes into force when nobody expects it any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edda import EddaApp, WorkflowContext, workflow
from edda.core.model import Claim, RunId, WorkerId
from edda.engine.settings import Settings
from edda.engine.worker.claims import ClaimLoop
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


async def test_a_run_that_is_dropped_again_and_again_is_freed_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a record that no worker can write would be tried in a tight loop."""
    now, freed = 1000.0, list[RunId]()

    async def owned_runs(worker: WorkerId) -> dict[RunId, int]:
        return {run_id: 1}

    async def release_run(run: RunId) -> None:
        freed.append(run)

    storage: Any = SimpleNamespace(owned_runs=owned_runs, release_run=release_run)
    services: Any = SimpleNamespace(settings=QUICK, storage=storage, registry=SimpleNamespace(names=list))
    worker: Any = SimpleNamespace(services=services, worker_id=WorkerId("w"), live={}, resting=set())
    claims, run_id, pauses = ClaimLoop(worker), RunId("run-1"), list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    async def pause_until_freed() -> float:
        claims.drop(run_id)
        begun = now
        freed.clear()
        while True:
            await claims._release_unknown_claims()
            if freed:
                return now - begun
            advance(0.5)

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    for _ in range(9):
        pauses.append(await pause_until_freed())
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    claims.dropped.pop(run_id)
    assert await pause_until_freed() == 0.0, "a run that ended meanwhile begins anew"
