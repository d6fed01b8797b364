"""What is done in the transaction of somebody who is no step, such as a web handler: it exists if that commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edda.core.model import StagedEvent, Start
from edda.storage.shared import step_commit as joints
from edda.storage.shared.step_commit import ExistingRun


class CallerTransactions:
    def __init__(self, on_start: Callable[[], None], on_dispatch: Callable[[], None]) -> None:
        self._on_start = on_start
        self._on_dispatch = on_dispatch

    async def start(self, session: Any, run: Start) -> ExistingRun | None:
        """None if it is started; else the run that has its id already."""
        from edda.storage.sqlalchemy_sessions import caller_transaction, on_commit

        joint = caller_transaction(session)
        is_new = await joints.start(joint, run)
        on_commit(session, self._on_start)
        return None if is_new else await joints.find_run(joint, run.run_id)

    async def dispatch(self, session: Any, dispatch: StagedEvent) -> None:
        from edda.storage.sqlalchemy_sessions import caller_transaction, on_commit

        await joints.dispatch(caller_transaction(session), (dispatch,))
        on_commit(session, self._on_dispatch)
