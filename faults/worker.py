"""One life of a worker process: an EddaApp, and hands that start and cancel runs and send events."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch
from urllib.parse import urlsplit

import uvicorn
from msgspec import Struct

from edda import EddaApp
from edda.core.model import MICROSECONDS, RunId, WorkerId
from edda.databases import open_storage
from edda.engine.outbox import relayer
from edda.engine.outbox.relayer import RelaySettings
from edda.engine.run import effects
from edda.engine.settings import Settings
from edda.errors import EddaError, StorageError

from .competing_workload import CONTESTANTS
from .connection_faults import Saboteur
from .effect_log import Holder, WorkerLedger
from .event_sender import Sender, new_type
from .external_services import Drop, Host
from .protocol_breaks import CONTROLS
from .saga_workload import VENTURES, venture
from .transactional_workload import TRADES, start_trade
from .wait_workload import TYPES, VIGILS, vigil
from .workload import LEASE, WORKFLOWS, World, errand

logger = logging.getLogger(__name__)

PROGRAM = (*WORKFLOWS, *VIGILS, *VENTURES, *CONTESTANTS, *TRADES)
HASTY = Settings(
    max_process_deaths=None,  # the noise kills processes, not their runs
    suspect_window=1.0,
    lease=LEASE,
    heartbeat=LEASE / 5,
    sweep=0.2,
    takeover_grace=0.0,
    linger=0.02,
    poll=0.2,
    orphan_sweep=2.0,
    capacity=24,
    parked_first=0.5,
)

HASTY_RELAY = RelaySettings(lease=2.0, timeout=1.0, poll=0.2, first_pause=0.05, longest_pause=0.5)


class Orders(Struct, frozen=True):
    """What one life is told at its birth."""

    url: str
    folder: str
    """Where its ledger and its log go."""
    name: str
    seed: int = 0
    is_wild: bool = False
    """Starts runs of its own, and sabotages itself."""
    hears: bool = False
    """Takes in events, and starts runs that wait for them, and for others."""
    trades: bool = False
    """Starts runs that trade instead, itself and as a handler, and sends what is in the outbox."""
    control: str = ""
    """What is broken on purpose in this process."""
    port: int | None = None
    """Serves there."""
    lease: float | None = LEASE
    """None: the settings that users get."""
    stall_limit: float = 300.0

    @property
    def settings(self) -> Settings | None:
        if self.lease is None:
            return None
        return replace(HASTY, lease=self.lease, heartbeat=self.lease / 5, stall_limit=self.stall_limit)

    def file(self, kind: str) -> Path:
        return Path(self.folder, f"{self.name}.{kind}")


class Life:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._ledger = WorkerLedger(orders.file("ledger"), self._holder_of)
        self._saboteur = Saboteur(urlsplit(orders.url).port, lambda: self._ledger.note("cut"))
        self._saboteur.quiet = not orders.is_wild
        self._starting = orders.is_wild
        self._started: deque[str] = deque(maxlen=20)
        self._sender = Sender(orders.name, self._ledger, self._started)
        self._app: EddaApp | None = None
        World.witness = self._ledger

    async def run(self) -> None:
        if self._orders.port is None:
            await self._work()
        else:
            await self._serve(self._orders.port)

    async def _serve(self, port: int) -> None:
        self._app = self._make_app()
        config = uvicorn.Config(self._app, port=port, lifespan="on", log_level="warning", access_log=False)
        await uvicorn.Server(config).serve()

    async def _work(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._calm_down)
        self._app = await self._open()
        self._orders.file("ready").touch()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start_runs(self._app))
            if self._orders.hears:
                group.create_task(self._send_events(self._app))
            if self._orders.trades:
                group.create_task(self._host(self._app))
            group.create_task(self._cut_lines())

    def _calm_down(self) -> None:
        self._starting = False
        self._saboteur.quiet = True

    async def _open(self) -> EddaApp:
        while True:
            app = self._make_app()
            try:
                await app.initialize()
            except StorageError as error:
                logger.info("not yet: %s", error)
                app.kill()
                await asyncio.sleep(0.1)
            else:
                return app

    def _make_app(self) -> EddaApp:
        url, settings = self._orders.url, self._orders.settings
        probe = self._saboteur if self._orders.is_wild else None
        storage = open_storage(url, pool_size=2, probe=probe)
        if self._orders.control:
            CONTROLS[self._orders.control].break_it(storage)
        return EddaApp(
            "faults",
            url,
            workflows=PROGRAM,
            settings=settings,
            storage=storage,
            probe=probe,
            auto_migrate=False,
            outbox_enabled=self._orders.trades,
            sink=Drop(Path(self._orders.folder)) if self._orders.trades else None,
        )

    def _holder_of(self, run_id: str) -> Holder:
        """Asked by a body as it begins. A body of a run that this process no longer holds was never to begin."""
        worker = self._app.engine.worker if self._app is not None else None
        run = worker.live.get(RunId(run_id)) if worker is not None else None
        if worker is None or run is None:
            logger.error("a body of run %s began though the run is not in memory", run_id)
            return Holder(WorkerId("nobody"), 0)
        return Holder(worker.info.id, run.epoch)

    async def _start_runs(self, app: EddaApp) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.02, 0.25))
            worker = app.engine.worker
            if not self._starting or worker is None or len(worker.live) > HASTY.capacity // 2:
                continue
            try:
                run_id = await (start_trade(app) if self._orders.trades else start_some(app, self._orders.hears))
                self._ledger.note("acked", run_id)
                self._started.append(run_id)
                if random.random() < 0.06:
                    await self._cancel(app, run_id)
            except EddaError as error:
                self._ledger.note("failed", repr(error))

    async def _send_events(self, app: EddaApp) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.02, 0.25))
            if self._starting:
                await self._sender.send(app)

    async def _host(self, app: EddaApp) -> None:
        host = Host(self._orders.name, self._orders.url, self._ledger)
        while True:
            await asyncio.sleep(random.uniform(0.05, 0.5))
            if self._starting:
                await host.serve(app)

    async def _cancel(self, app: EddaApp, run_id: str) -> None:
        await asyncio.sleep(random.uniform(0, 0.3))
        self._ledger.note("cancel", run_id)
        await app.cancel(run_id)

    async def _cut_lines(self) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.2, 3.0))
            self._saboteur.cut()


def shared_id() -> str:
    """The same in every process for half a second: several of them start one run."""
    return f"shared-{int(time.time() * 2)}"


async def start_some(app: EddaApp, hears: bool, sharing: float = 0.1) -> str:
    """A run of any kind; `hears` allows those that wait for events and for others."""
    timeout = random.uniform(0.2, 3.0) if hears and random.random() < 0.08 else None
    match random.choices(("errand", "vigil", "venture"), weights=(30, 40, 30) if hears else (1, 0, 0))[0]:
        case "vigil":
            return await app.start(vigil.options(timeout=timeout), random.choice((*TYPES, new_type())))
        case "venture":
            return await app.start(venture.options(timeout=timeout), shared_id())
        case _:
            return await app.start(errand.options(id=shared_id()) if random.random() < sharing else errand)


def live(orders: Orders) -> None:
    random.seed(orders.seed)
    if orders.lease is not None:
        patch.object(relayer, "RelaySettings", lambda: HASTY_RELAY).start()
        patch.object(effects, "MESSAGE_LEASE", MICROSECONDS).start()  # of a message that was taken by a step
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(filename=orders.file("log"), level=logging.INFO, format=form)
    try:
        asyncio.run(Life(orders).run())
    except BaseException:  # whatever ended this life has to be found by whoever looks for it
        logger.critical("this worker process broke", exc_info=True)
        raise
