"""The engine of one app: starts and stops its parts, and replaces a worker that was taken over or failed."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress

from edda.cloudevents.event import CloudEvent
from edda.core.model import Start, WorkerInfo
from edda.engine.events import EventIngest, StagedEventMover
from edda.engine.outbox.relayer import Relayer
from edda.engine.outbox.sinks import Sink
from edda.engine.worker.host import host_name
from edda.engine.worker.worker import Worker

from .client import CallLimit, EngineClient
from .definitions import DefinitionPublisher, Describe
from .hooks import EventReceived
from .log import write as log_line
from .services import EngineServices
from .tasks import RETRYABLE_ERRORS, TRANSIENT_ERRORS, cancel_and_wait, retry_transient
from .worker import supervision

logger = logging.getLogger(__name__)


class Engine:
    def __init__(self, services: EngineServices, *, sink: Sink | None = None, describe: Describe | None = None) -> None:
        self.services = services
        self.storage = services.storage
        self.clock = services.clock
        self.codec = services.codec
        self.calls = CallLimit(services.settings.call_timeout)
        self.ingest = EventIngest(services, self.notify_all, self._run_started_by_event)
        self.staging = StagedEventMover(services, self.ingest)
        self.definitions = DefinitionPublisher(services, describe)
        self.relayer: Relayer | None = None
        self.worker: Worker | None = None
        self.is_stopped = False
        self.client = EngineClient(self)
        self._sink = sink
        self._staging_task: asyncio.Task[None] | None = None
        self._notify_task: asyncio.Task[None] | None = None
        self._must_notify = False
        self._replacement_task: asyncio.Task[None] | None = None
        self._failures = supervision.Failures(f"worker of {services.service}")
        self._stopping = False

    async def start(self, with_worker: bool) -> None:
        self.client.loop = asyncio.get_running_loop()
        if self.services.hooks is not None:
            self.services.hooks.start()
        if with_worker:
            if not self.services.registry.names():
                logger.warning(
                    "worker of %s: no workflow is registered in this app, so it runs none; import the modules that "
                    "define workflows before initialize()",
                    self.services.service,
                )
            self.worker = self._new_worker()
            await self.worker.start()
            self._log_started(self.worker)
            self.events_staged()
            self.definitions.start()
        if self._sink is not None:
            self.relayer = Relayer(
                self.storage, self._sink, clock=self.clock, codec=self.codec, listens=self.worker is None
            )
            self.relayer.start()

    async def stop(self, grace: float) -> None:
        self._stopping = True
        await cancel_and_wait(self._replacement_task)
        await self.definitions.stop()
        await self.ingest.close()
        if self.worker is not None:
            await self.worker.drain(grace)
            await self.worker.retire()
            log_line("worker_stopped", worker=self.worker.info.id, service=self.services.service)
            self.worker = None
        await cancel_and_wait(self._staging_task)
        self._staging_task = None
        if self._notify_task is not None:
            await asyncio.wait([self._notify_task], timeout=self.services.settings.call_timeout)
            await cancel_and_wait(self._notify_task)
        if self.relayer is not None and self._sink is not None:  # last: the steps that were finishing may have sent
            await self.relayer.stop(grace)
            await self._sink.close()
        await self.services.sessions.close()
        if self.services.hooks is not None:
            await self.services.hooks.close()
        self.services.threads.close()
        self.is_stopped = True

    def kill(self) -> None:
        """Stop as a dying process does: nothing more is written, and no other process is notified."""
        self._stopping = self.is_stopped = True
        for task in (self._replacement_task, self._staging_task, self._notify_task):
            if task is not None:
                task.cancel()
        self.definitions.close()
        self.ingest.kill()
        if self.relayer is not None:
            self.relayer.kill()
        if self.worker is not None:
            self.worker.kill()
        self.services.sessions.kill()
        self.storage.kill()
        self.services.threads.close()

    # The worker

    def _new_worker(self) -> Worker:
        info = WorkerInfo(self.services.ids.worker(), self.services.service, host_name(), os.getpid())
        return Worker(info, self)

    async def _replace_worker(self, lost: Worker) -> None:
        log_line("worker_lost", worker=lost.info.id)
        failure, lost.failure = lost.failure, None
        pause = 0.0 if failure is None else self._failures.record(failure, "starting a new one")
        try:
            await lost.abandon()
        except Exception as error:  # the rest of the old worker must not keep the new one from starting
            logger.error("leaving worker %s failed: %r", lost.info.id, error, exc_info=error)
        await asyncio.sleep(pause)
        self.worker = await retry_transient(self._start_worker, "starting a new worker")
        self._replacement_task = None
        self._log_started(self.worker)

    async def _start_worker(self) -> Worker:
        worker = self._new_worker()
        try:
            await worker.start()
        except TRANSIENT_ERRORS:
            await worker.abandon()
            raise
        except BaseException:
            worker.kill()
            raise
        return worker

    def _log_started(self, worker: Worker) -> None:
        services = self.services
        log_line(
            "worker_started",
            worker=worker.info.id,
            service=services.service,
            database=services.database,
            workflows=", ".join(sorted(services.registry.names())) or "no workflows",
        )

    # What the worker, event ingest and callers report

    def worker_lost(self, worker: Worker) -> None:
        if self.worker is not worker:
            return
        if self._stopping:
            worker.kill()  # no worker follows it in this process: others take its runs over
        elif self._replacement_task is None:
            self._replacement_task = supervision.start(
                "starting a new worker", lambda: self._replace_worker(worker), name="edda-replace-worker"
            )

    def events_staged(self) -> None:
        if self._staging_task is None:
            self._staging_task = supervision.start("moving staged events", self.staging.run, name="edda-staging")
        self.staging.wake()

    def outbox_written(self) -> None:
        self.wake_relayer()
        self.notify_other_processes()

    def wake_relayer(self) -> None:
        if self.relayer is not None:
            self.relayer.wake()

    def notify_all(self) -> None:
        """A run is ready, or may be: wake this process's worker, then the others."""
        if self.worker is not None:
            self.worker.wake(sure=True)
        self.notify_other_processes()

    def notify_other_processes(self) -> None:
        """They need not wait for their next poll. One notification covers everything that was stored before it is
        sent."""
        self._must_notify = True
        if self._notify_task is None:
            self._notify_task = supervision.start_once("notifying processes", self._notify, name="edda-notify")

    async def _notify(self) -> None:
        try:
            while self._must_notify:
                self._must_notify = False
                with suppress(*RETRYABLE_ERRORS):  # only a hint: other processes poll every `poll` seconds
                    await self.storage.notify()
        finally:
            self._notify_task = None

    def _run_started_by_event(self, start: Start, event: CloudEvent) -> None:
        hooks = self.services.hooks
        if hooks is not None and hooks.watches_arrivals:
            arrival = EventReceived(start.run_id, start.workflow, event.type, event.extensions)
            hooks.call(lambda hooks: hooks.watch_arrival(arrival))
