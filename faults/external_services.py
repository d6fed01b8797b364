"""Around the runs that trade: handlers who start runs in transactions of their own, and a receiver of what is sent."""

from __future__ import annotations

import asyncio
import random
from itertools import count
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from edda import EddaApp
from edda.cloudevents.event import CloudEvent

from .effect_log import Ledger
from .ledger_table import put_by_session
from .transactional_workload import NEWS, trade

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "mysql": "mysql+asyncmy"}


def guest_place(run_id: str) -> str:
    """What a handler writes, and says."""
    return f"guest/{run_id}"


class Host:
    """As a web handler: a row, a run and a message in one transaction, which it often thinks better of."""

    def __init__(self, name: str, url: str, ledger: Ledger) -> None:
        scheme, _, rest = url.partition("://")
        self._engine = create_async_engine(f"{_DRIVERS[scheme]}://{rest}", poolclass=NullPool)
        self._name = name
        self._ledger = ledger
        self._numbers = count(1)

    async def serve(self, app: EddaApp) -> None:
        run_id = f"guest-{self._name}-{next(self._numbers)}"
        try:
            async with AsyncSession(self._engine) as session:
                await self._invite(app, session, run_id)
        except Exception:  # the driver's, or ours: the line was cut, and the row says what became of it
            return

    async def _invite(self, app: EddaApp, session: AsyncSession, run_id: str) -> None:
        await put_by_session(session, guest_place(run_id), "")
        await app.start(trade.options(id=run_id, session=session))
        await app.publish(NEWS, guest_place(run_id), session=session)
        await asyncio.sleep(random.uniform(0, 0.02))
        if random.random() < 0.5:
            await session.rollback()
            self._ledger.note("shunned", run_id)
        else:
            await session.commit()
            self._ledger.note("hosted", run_id)


class Drop:
    """A sink: one file for all processes, so its lines are in the order in which events arrived."""

    def __init__(self, folder: Path) -> None:
        self._ledger = Ledger(folder / "arrivals")

    async def send(self, event: CloudEvent) -> None:
        chance = random.random()
        if chance < 0.05:
            raise ConnectionError("lost on the way")
        await asyncio.sleep(random.uniform(0, 0.02))
        self._ledger.note(event.id)
        if chance > 0.97:
            raise ConnectionError("the answer was lost")

    async def close(self) -> None:
        return


def read_arrivals(folder: Path) -> list[str]:
    file = folder / "arrivals"
    return file.read_text().splitlines() if file.exists() else []
