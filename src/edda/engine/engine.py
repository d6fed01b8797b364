"""The engine of one app: starts runs, waits for results, and keeps a worker alive whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
import os
from asyncio import _get_running_loop
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any

from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core.codec import Codec
from edda.core.failure import decode_failure
from edda.core.model import CancelOutcome, End, Entry, RunFilter, RunId, RunRecord, Start, WorkerInfo
from edda.core.retry import RetryPolicy
from edda.core.states import ENDED, RunStatus
from edda.errors import (
    AppError,
    InstanceConflictError,
    InstanceNotFoundError,
    LeaseLostError,
    NotInWorkflowError,
    StorageConflictError,
    StorageUnavailableError,
    WorkflowCancelledError,
)
from edda.storage.ports import Storage
from edda.workflow.context import ActivityContext, as_datetime
from edda.workflow.current import here
from edda.workflow.loop import WorkflowLoop
from edda.workflow.workflow import StartOptions, Workflow

from .backoff import Backoff
from .clock import Clock
from .hooks import HookCaller, WorkflowHooks
from .host import host_name
from .ids import Ids
from .intake import Intake
from .settings import Settings
from .shapes import ShapeBook
from .slots import Slots
from .steps import Threads
from .worker import Transient, Worker

logger = logging.getLogger(__name__)

_PATIENCE = 8
"""How often a call is tried again while the database does not answer: about five seconds in all."""


class Engine:
    def __init__(
        self,
        storage: Storage,
        *,
        service: str,
        clock: Clock,
        codec: Codec,
        ids: Ids,
        settings: Settings,
        retry_policy: RetryPolicy,
        hooks: WorkflowHooks | None,
        find: Callable[[str], Workflow[Any, Any]],
        names: Callable[[], Sequence[str]],
        handlers: Callable[[str], Sequence[Workflow[Any, Any]]] = lambda type: (),
    ) -> None:
        self.storage = storage
        self.clock = clock
        self.codec = codec
        self.settings = settings
        self._book = ShapeBook(storage, codec)
        self.intake = Intake(storage, self._book, codec, clock, handlers, self._tell_everybody)
        self._telling: asyncio.Task[None] | None = None
        self.worker: Worker | None = None
        self._service = service
        self._ids = ids
        self._retry_policy = retry_policy
        self._hooks = hooks
        self._caller: HookCaller | None = None
        self._find = find
        self._names = names
        self._threads = Threads(settings.threads)
        self._slots = Slots()
        self._waiters: dict[RunId, set[asyncio.Future[End]]] = {}
        self._rebirth: asyncio.Task[None] | None = None
        self._stopping = False
        self._stopped = False

    # Life

    async def start(self, with_worker: bool) -> None:
        if self._hooks is not None:
            self._caller = HookCaller(self._hooks)
        if with_worker:
            self.worker = self._new_worker()
            await self.worker.start()

    async def stop(self, grace: float) -> None:
        self._stopping = True
        if self._rebirth is not None:
            self._rebirth.cancel()
            await asyncio.gather(self._rebirth, return_exceptions=True)
        await self.intake.close()
        if self.worker is not None:
            await self.worker.drain(grace)
            await self.worker.retire()
            self.worker = None
        if self._caller is not None:
            await self._caller.close()
        self._threads.close()
        self._stopped = True

    def kill(self) -> None:
        """Die as a process does: nothing more is written, nobody is told."""
        self._stopping = self._stopped = True
        if self._rebirth is not None:
            self._rebirth.cancel()
        self.intake.kill()
        if self.worker is not None:
            self.worker.kill()
        self.storage.kill()
        self._threads.close()

    def _new_worker(self) -> Worker:
        info = WorkerInfo(self._ids.worker(), self._service, host_name(), os.getpid())
        return Worker(
            info,
            self.storage,
            client=self,
            clock=self.clock,
            codec=self.codec,
            threads=self._threads,
            slots=self._slots,
            hooks=self._caller,
            settings=self.settings,
            retry_policy=self._retry_policy,
            book=self._book,
            find=self._find,
            names=self._names,
            on_end=self._run_ended,
            on_lost=self._worker_lost,
        )

    def _worker_lost(self, lost: Worker) -> None:
        if self.worker is lost and not self._stopping and self._rebirth is None:
            self._rebirth = asyncio.create_task(self._replace(lost), name="edda-rebirth")

    async def _replace(self, lost: Worker) -> None:
        logger.warning("worker %s lost its lease; its runs go on elsewhere, a new worker begins", lost.info.id)
        await lost.abandon()
        backoff = Backoff()
        while True:
            worker = self._new_worker()
            try:
                await worker.start()
            except Transient as error:
                backoff.warn(logger, "no new worker yet: %s", error)
                await backoff.pause()
                continue
            self.worker, self._rebirth = worker, None
            return

    # Starting

    async def launch(
        self, workflow: Workflow[Any, Any], options: StartOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        if isinstance(_get_running_loop(), WorkflowLoop):
            raise NotInWorkflowError(
                f"{workflow.name} was started through an app in the body of a workflow, which would start it again at "
                f"every replay: use {workflow.name}.start(...) or {workflow.name}.run(...), which make it a child."
            )
        bound = workflow.signature.bind(args, dict(kwargs))
        data = workflow.signature.encode(self.codec, bound)
        now = self.clock.now()
        effect = _effect_id() if options.id is None else None
        run_id = options.id or effect
        start = Start(
            run_id=RunId(run_id) if run_id is not None else self._ids.run(),
            workflow=workflow.name,
            input=data,
            created_at=now,
            ready_at=None if run_id is None and options.delay == 0 else now + options.delay,
            deadline=None if options.timeout is None else now + options.delay + options.timeout,
        )
        if start.ready_at is None and await self._begin_here(start):
            return start.run_id
        await self.store(start, is_effect=effect is not None)
        return start.run_id

    async def _begin_here(self, start: Start) -> bool:
        """The quick way: the run is ours from its first record on. False: it must be stored for anybody."""
        worker = self.worker
        if worker is None:
            return False
        if start.workflow not in self._names():
            logger.warning("this app does not run %s: the run is stored for a worker that does", start.workflow)
            return False
        await worker.journal.wait_for_room()
        if not worker.has_room:
            return False
        run = worker.begin(start)
        try:
            await run.stored
        except LeaseLostError:
            return False  # it may be in or not: storing it again under the same id is right in both cases
        return True

    async def store(self, start: Start, *, is_effect: bool = False) -> None:
        """For anybody to claim. With an effect's id it may be there with other arguments: the first ones count."""
        if not await self._patiently(self.storage.start, [start]) and not is_effect:
            await self._check_same(start)  # there already, maybe by our own call whose answer was lost
        await self._patiently(self.storage.announce)
        if self.worker is not None:
            self.worker.nudge()

    async def _check_same(self, start: Start) -> None:
        known = await self.read_run(start.run_id)
        # Of a run that has begun anew the first arguments may be gone.
        if known.workflow == start.workflow and (known.gen > 0 or self.codec.same(known.input, start.input)):
            return
        differs = f"workflow {known.workflow}" if known.workflow != start.workflow else "other arguments"
        raise InstanceConflictError(
            f"the id {start.run_id!r} belongs to a run of {differs}; nothing was started. Use another id, or the "
            "same arguments to get the same run."
        )

    async def _patiently(self, call: Callable[..., Any], *args: Any) -> Any:
        """Idempotent calls only: without an answer they are made again."""
        backoff = Backoff()
        for _ in range(_PATIENCE):
            try:
                return await call(*args)
            except Transient:
                await backoff.pause()
        return await call(*args)

    # Looking

    async def read_run(self, instance_id: str) -> RunRecord:
        record: RunRecord | None = await self._patiently(self.storage.get, RunId(instance_id))
        if record is None:
            raise InstanceNotFoundError(f"no run has the id {instance_id!r}")
        return record

    async def read_history(self, instance_id: str, generation: int | None = None) -> tuple[Entry, ...]:
        history: tuple[Entry, ...] = await self._patiently(self.storage.history, RunId(instance_id), generation)
        if not history:
            await self.read_run(instance_id)
        return history

    async def find_runs(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        records: tuple[RunRecord, ...] = await self._patiently(self.storage.find, filter)
        return records

    async def request_cancel(self, instance_id: str, reason: str) -> CancelOutcome:
        value = self.codec.encode(reason)
        outcome: CancelOutcome = await self._patiently(self.storage.cancel, RunId(instance_id), value)
        if outcome is CancelOutcome.MISSING:
            raise InstanceNotFoundError(f"no run has the id {instance_id!r}; nothing was cancelled")
        if outcome is not CancelOutcome.ENDED:
            await self._patiently(self.storage.announce)
        return outcome

    # Events

    async def send(self, event: CloudEvent) -> None:
        if isinstance(_get_running_loop(), WorkflowLoop):
            raise NotInWorkflowError("app.send_event() in the body of a workflow: use send_event(), which is recorded.")
        await self._patiently(self.receive, (event,))
        if self._caller is not None:
            sent = (event.type, event.source, json_format.value_of(event))
            self._caller.call(lambda hooks: hooks.on_event_sent(*sent))

    def new_id(self) -> str:
        return self._ids.event()

    def now(self) -> datetime:
        return as_datetime(self.clock.now())

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        """Store what came from outside, all or nothing."""
        await self.intake.accept(events)

    def _tell_everybody(self) -> None:
        """Our own worker first; one call speaks for all that was stored before it."""
        if self.worker is not None:
            self.worker.nudge(sure=True)
        if self._telling is None:
            self._telling = asyncio.create_task(self._announce(), name="edda-announce")

    async def _announce(self) -> None:
        self._telling = None
        with suppress(StorageUnavailableError, StorageConflictError):
            await self.storage.announce()

    # Results

    async def await_result(self, instance_id: str, returns: Any, timeout: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout) if timeout is not None else nullcontext():
                status, value = await self._await_end(RunId(instance_id))
        except TimeoutError:
            raise TimeoutError(f"run {instance_id} did not end within {timeout} seconds; it goes on") from None
        if status is RunStatus.COMPLETED:
            return self.codec.decode(value, returns)
        if status is RunStatus.CANCELLED:
            raise WorkflowCancelledError(f"run {instance_id} was cancelled: {self.codec.decode(value)}")
        raise decode_failure(self.codec, value)

    async def await_end(self, run_id: RunId) -> RunStatus:
        return (await self._await_end(run_id))[0]

    async def _await_end(self, run_id: RunId) -> tuple[RunStatus, bytes]:
        """Runs of this process tell us; for others we look, less and less often."""
        ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(run_id, set()).add(ended)
        pause = 0.02
        try:
            while True:
                if self._stopped:
                    raise AppError(f"the app is shut down; run {run_id} goes on elsewhere")
                is_here = self.worker is not None and run_id in self.worker.live
                if not is_here:
                    record = await self._look(run_id)
                    if record is not None and record.status in ENDED and record.value is not None:
                        return record.status, record.value
                await asyncio.wait([ended], timeout=self.settings.poll if is_here else pause)
                if ended.done():
                    return ended.result().status, ended.result().value
                pause = min(pause * 1.5, self.settings.poll / 2)
        finally:
            self._forget_waiter(run_id, ended)

    async def _look(self, run_id: RunId) -> RunRecord | None:
        try:
            return await self.read_run(run_id)
        except StorageUnavailableError:
            return None  # whoever waits for a result says for how long

    def _forget_waiter(self, run_id: RunId, waiter: asyncio.Future[End]) -> None:
        waiters = self._waiters.get(run_id)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[run_id]

    def _run_ended(self, run_id: RunId, end: End) -> None:
        for waiter in self._waiters.get(run_id, ()):
            if not waiter.done():
                waiter.set_result(end)


def _effect_id() -> str | None:
    """Of a run that is started in an activity: the same at every attempt, so that it is started once."""
    context = here.get()
    if not isinstance(context, ActivityContext):
        return None
    return f"call-{blake2b(context.next_effect_id().encode(), digest_size=16).hexdigest()}"
