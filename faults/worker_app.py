"""What `edda worker faults.worker_app:app` runs: the workload, with its ledger where the environment says."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from edda import EddaApp
from edda.core.model import RunId
from edda.engine.engine import Engine

from .effect_log import Holder, WorkerLedger
from .workload import WORKFLOWS, World

app = EddaApp("service", os.environ["EDDA_DB_URL"], workflows=WORKFLOWS)


@cache
def _engine() -> Engine:
    """Remembered: an app that shuts down gives out its engine no more, while bodies under way still finish."""
    return app.engine


def _holder_of(run_id: str) -> Holder:
    worker = _engine().worker
    assert worker is not None
    return Holder(worker.info.id, worker.live[RunId(run_id)].epoch)


World.witness = WorkerLedger(Path(os.environ["EDDA_TORTURE_LEDGERS"], f"{os.getpid()}.ledger"), _holder_of)
