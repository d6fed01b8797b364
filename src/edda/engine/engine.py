"""The engine of one app: starts runs, waits for results, and keeps a worker alive whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from asyncio import _get_running_loop
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext, suppress
from datetime import datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core.channels import Message, pack_message
from edda.core.codec import Codec
from edda.core.exceptions import decode_failure
from edda.core.model import (
    CancelOutcome,
    End,
    Entry,
    RunFilter,
    RunId,
    RunRecord,
    RunValue,
    StagedEvent,
    StagedKind,
    Start,
    WorkerId,
    WorkerInfo,
)
from edda.core.queries import ReopenOutcome
from edda.core.retry import RetryPolicy
from edda.core.states import ENDED, RunStatus
from edda.engine.events.ingest import EventIngest
from edda.engine.events.match_paths import MatchPathCache
from edda.engine.events.staging import StagedEventMover
from edda.engine.outbox.relayer import Relayer
from edda.engine.outbox.sinks import Sink
from edda.engine.run.concurrency import ConcurrencyLimiter
from edda.engine.run.outcome_policy import ActivityThreads
from edda.engine.worker.host import host_name
from edda.engine.worker.worker import RETRYABLE_ERRORS, Worker
from edda.errors import (
    ActionRefusedError,
    AppError,
    EddaError,
    InstanceConflictError,
    InstanceNotFoundError,
    LeaseLostError,
    NotInWorkflowError,
    StorageConflictError,
    StorageUnavailableError,
    ValueNotSetError,
    WorkflowCancelledError,
)
from edda.storage.ports import Storage
from edda.storage.shared.step_commit import ExistingRun
from edda.workflow.client import current_context
from edda.workflow.context import ActivityContext, WorkflowContext, as_datetime
from edda.workflow.loop import WorkflowLoop
from edda.workflow.workflow import StartOptions, Workflow

from .caller_transactions import CallerTransactions
from .calls import Call, CallLimit
from .clock import Clock
from .definitions import DefinitionPublisher, Describe
from .hooks import EventReceived, HookCaller, WorkflowHooks
from .ids import Ids
from .log import write as log_line
from .open_runs import explain
from .retry_plan import plan_retry
from .settings import Settings
from .tasks import Backoff, cancel_and_wait
from .worker import supervision

if TYPE_CHECKING:
    from edda.storage.sqlalchemy_sessions import Sessions

logger = logging.getLogger(__name__)

WARN_AGAIN = 60.0
"""Seconds."""
HINT_SECONDS = 1.0
"""How long a call waits for telling other processes of what it has changed: they also find it by looking."""
CLOCK_AGE = 1.0
"""Seconds for which a process without a worker trusts its last look at the database's clock."""


def _no_sessions() -> Sessions:
    raise AppError("ctx.session needs a database of its own: memory:// has none")


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
        open_sessions: Callable[[], Sessions] = _no_sessions,
        sink: Sink | None = None,
        describe: Describe | None = None,
        database: str = "",
    ) -> None:
        self.storage = storage
        self.clock = clock
        self.codec = codec
        self.settings = settings
        self.calls = CallLimit(settings.call_timeout)
        self._match_paths = MatchPathCache(storage, codec)
        self.intake = EventIngest(
            storage,
            self._match_paths,
            codec,
            clock,
            handlers,
            self._notify_all,
            self._notify_started_by_event,
            call_timeout=settings.call_timeout,
        )
        self.forwarder = StagedEventMover(storage, self.intake, codec, settings.poll)
        self._forwarding: asyncio.Task[None] | None = None
        self._caller_transactions = CallerTransactions(self._notify_all, self._wake_staging)
        self._open_sessions = open_sessions
        self._sessions: Sessions | None = None
        self._sink = sink
        self.relayer: Relayer | None = None
        self._notify_task: asyncio.Task[None] | None = None
        self.worker: Worker | None = None
        self._service = service
        self._database = database
        """For people, without a password."""
        self._ids = ids
        self._retry_policy = retry_policy
        self._hooks = hooks
        self._caller: HookCaller | None = None
        self._find = find
        self._names = names
        self._definitions = DefinitionPublisher(storage, clock, service, find, names, describe)
        self._threads = ActivityThreads(settings.threads)
        self._slots = ConcurrencyLimiter()
        self._waiters: dict[RunId, set[asyncio.Future[End]]] = {}
        self._replacement_task: asyncio.Task[None] | None = None
        self._clock_seen = -math.inf
        self._failures = supervision.Failures(f"worker of {service}")
        self._stopping = False
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warned: dict[str, float] = {}
        """Workflows that this app does not run, and when it last warned that it was asked to start one."""

    # Life

    def check_loop(self) -> None:
        """Raises `AppError` on another event loop than the one it was started on: nothing there would ever answer."""
        running = _get_running_loop()
        if running is None or running is self._loop or self._loop is None or isinstance(running, WorkflowLoop):
            return
        raise AppError(
            f"the app {self._service!r} was started on another event loop, and each asyncio.run() makes a new one: "
            "start and use the app in the same loop, with `async with app:`"
        )

    async def start(self, with_worker: bool) -> None:
        self._loop = asyncio.get_running_loop()
        if self._hooks is not None:
            self._caller = HookCaller(self._hooks)
        if with_worker:
            if not self._names():
                logger.warning(
                    "worker of %s: no workflow is registered in this app, so it runs none; import the modules that "
                    "define workflows before initialize()",
                    self._service,
                )
            self.worker = self._new_worker()
            await self.worker.start()
            self._tell_worker(self.worker)
            self._wake_staging()
            self._definitions.start()
        if self._sink is not None:
            self.relayer = Relayer(
                self.storage, self._sink, clock=self.clock, codec=self.codec, listens=self.worker is None
            )
            self.relayer.start()

    async def stop(self, grace: float) -> None:
        self._stopping = True
        if self._replacement_task is not None:
            await cancel_and_wait(self._replacement_task)
        await self._definitions.stop()
        await self.intake.close()
        if self.worker is not None:
            await self.worker.drain(grace)
            await self.worker.retire()
            log_line("worker_stopped", worker=self.worker.info.id, service=self._service)
            self.worker = None
        await self._stop_forwarding()
        if self.relayer is not None and self._sink is not None:  # last: the steps that were finishing may have sent
            await self.relayer.stop(grace)
            await self._sink.close()
        if self._sessions is not None:
            await self._sessions.close()
            self._sessions = None
        if self._caller is not None:
            await self._caller.close()
        self._threads.close()
        self._stopped = True

    async def _stop_forwarding(self) -> None:
        await cancel_and_wait(self._forwarding)
        self._forwarding = None

    def kill(self) -> None:
        """Die as a process does: nothing more is written, nobody is told."""
        self._stopping = self._stopped = True
        if self._replacement_task is not None:
            self._replacement_task.cancel()
        self._definitions.close()
        self.intake.kill()
        if self._forwarding is not None:
            self._forwarding.cancel()
        if self.relayer is not None:
            self.relayer.kill()
        if self.worker is not None:
            self.worker.kill()
        if self._sessions is not None:
            self._sessions.kill()
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
            book=self._match_paths,
            find=self._find,
            names=self._names,
            on_end=self._run_ended,
            on_lost=self.on_worker_lost,
            on_dispatch=self._wake_staging,
            on_outgoing=self._wake_all_relayers,
            on_news=self._wake_relayer,
            find_sessions=self._find_sessions,
        )

    def _find_sessions(self) -> Sessions:
        if self._sessions is None:
            self._sessions = self._open_sessions()
        return self._sessions

    def _wake_staging(self) -> None:
        """There is, or may be, something to take into the log."""
        if self._forwarding is None:
            self._forwarding = supervision.start("forwarding messages", self.forwarder.run, name="edda-forward")
        self.forwarder.wake()

    def _wake_all_relayers(self) -> None:
        self._wake_relayer()
        self._notify_other_processes()

    def _wake_relayer(self) -> None:
        if self.relayer is not None:
            self.relayer.wake()

    def on_worker_lost(self, lost: Worker) -> None:
        if self.worker is not lost:
            return
        if self._stopping:
            lost.kill()  # nobody follows it: what it held goes on elsewhere
        elif self._replacement_task is None:
            self._replacement_task = supervision.start(
                "starting a new worker", lambda: self._replace_worker(lost), name="edda-rebirth"
            )

    async def _replace_worker(self, lost: Worker) -> None:
        log_line("worker_lost", worker=lost.info.id)
        failure, lost.failure = lost.failure, None
        pause = 0.0 if failure is None else self._failures.record(failure, "starting a new one")
        try:
            await lost.abandon()
        except Exception as error:  # what is left of it must not keep the new one from beginning
            logger.error("leaving worker %s failed: %r", lost.info.id, error, exc_info=error)
        await asyncio.sleep(pause)
        backoff = Backoff()
        while True:
            worker = self._new_worker()
            try:
                await worker.start()
            except RETRYABLE_ERRORS as error:
                await worker.abandon()
                backoff.warn(logger, "no new worker yet: %s", error)
                await backoff.pause()
                continue
            except BaseException:  # begun anew by the supervision if it is an error
                worker.kill()
                raise
            self.worker, self._replacement_task = worker, None
            self._tell_worker(worker)
            return

    def _tell_worker(self, worker: Worker) -> None:
        told = {"worker": worker.info.id, "service": self._service, "database": self._database}
        log_line("worker_started", **told, workflows=", ".join(sorted(self._names())) or "no workflows")

    # Starting

    async def start_workflow(
        self, workflow: Workflow[Any, Any], options: StartOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        if isinstance(_get_running_loop(), WorkflowLoop):
            raise NotInWorkflowError(
                f"{workflow.name} was started through an app in the body of a workflow, which would start it again at "
                f"every replay: use {workflow.name}.start(...) or {workflow.name}.run(...), which make it a child."
            )
        self.check_loop()
        bound = workflow.signature.bind(args, dict(kwargs))
        data = workflow.signature.encode_input(self.codec, bound)
        await self._look_at_clock()
        now = self.clock.now()
        context = current_context.get()
        effect = _effect_id(context) if options.id is None else None
        run_id = options.id or effect
        start = Start(
            run_id=RunId(run_id) if run_id is not None else self._ids.run(),
            workflow=workflow.name,
            input=data,
            created_at=now,
            ready_at=None if run_id is None and options.delay == 0 and options.session is None else now + options.delay,
            deadline=None if options.timeout is None else now + options.delay + options.timeout,
        )
        if options.session is not None:
            await self._start_in_transaction(
                start, self._caller_transactions.start(options.session, start), effect is not None
            )
            return start.run_id
        if isinstance(context, ActivityContext) and context.has_transaction:
            await self._start_in_transaction(start, context.work.start(start), effect is not None)
            return start.run_id
        async with self._starting(start) as call:
            if start.ready_at is None and await self._start_locally(start, call):
                return start.run_id
            await self._store(start, call, is_effect=effect is not None)
        await self._wake_workers()
        return start.run_id

    async def _look_at_clock(self) -> None:
        """A worker's heartbeats tell the database's time; a process without one asks, now and then, or the times of its
        runs would be those of a host whose clock may differ."""
        sent = time.monotonic()
        if self.worker is None and sent - self._clock_seen > CLOCK_AGE:
            self._clock_seen = sent
            with suppress(*RETRYABLE_ERRORS, TimeoutError):  # what is started next will tell
                async with asyncio.timeout(HINT_SECONDS):
                    self.clock.observe(await self.storage.now(), sent, time.monotonic())

    def _starting(self, start: Start) -> AbstractAsyncContextManager[Call]:
        id = start.run_id
        return self.calls.call(
            f"starting {start.workflow} as run {id!r}",
            f"start it again with options(id={id!r}) and the same arguments, which starts it once, or look with "
            f"app.handle({id!r}).status()",
        )

    async def _start_locally(self, start: Start, call: Call) -> bool:
        """The quick way: the run is ours from its first record on. False: it must be stored for anybody."""
        worker = self.worker
        if worker is None:
            return False
        if start.workflow not in self._names():
            self._warn_unregistered(start.workflow)
            return False
        await worker.journal.wait_for_capacity()
        if not worker.has_capacity:
            return False
        run = worker.begin(start)
        try:
            await run.stored
        except LeaseLostError:
            call.may_have_happened = True
            return False  # it may be in or not: storing it again under the same id is right in both cases
        except asyncio.CancelledError:
            # The journal goes on sending a batch until it has an answer; what is in none yet is not sent at all.
            call.may_have_happened = not worker.withdraw(run)
            call.last = worker.journal.trouble
            raise
        return True

    def _warn_unregistered(self, workflow: str) -> None:
        """Once a minute for each name: a program may start thousands of them for another service."""
        now = time.monotonic()
        if now - self._warned.get(workflow, -WARN_AGAIN) >= WARN_AGAIN:
            self._warned[workflow] = now
            logger.warning("this app does not run %s: the run is stored for a worker that does", workflow)

    async def insert_run(self, start: Start) -> None:
        """For anybody to claim."""
        async with self._starting(start) as call:
            await self._store(start, call, is_effect=False)
        await self._wake_workers()

    async def _store(self, start: Start, call: Call, *, is_effect: bool) -> None:
        """With an effect's id it may be there with other arguments: the first ones count."""
        if not await call.order(self.storage.start, [start]) and not is_effect:
            # There already, maybe by our own call whose answer was lost.
            known: RunRecord | None = await call.ask(self.storage.get, start.run_id)
            if known is None:
                raise InstanceNotFoundError(f"run {start.run_id!r} was there, and has just been deleted")
            self._check_same(start, known)

    async def _start_in_transaction(
        self, start: Start, starting: Awaitable[ExistingRun | None], is_effect: bool
    ) -> None:
        """In somebody's transaction: it exists if and when that commits."""
        known = await starting
        if known is not None and not is_effect:
            self._check_same(start, known)

    def _check_same(self, start: Start, known: RunRecord | ExistingRun) -> None:
        # Of a run that has begun anew the first arguments may be gone.
        if known.workflow == start.workflow and (known.gen > 0 or self.codec.equal(known.input, start.input)):
            return
        differs = f"workflow {known.workflow}" if known.workflow != start.workflow else "other arguments"
        raise InstanceConflictError(
            f"the id {start.run_id!r} belongs to a run of {differs}; nothing was started. Use another id, or the "
            "same arguments to get the same run."
        )

    # Looking

    async def read_run(self, instance_id: str) -> RunRecord:
        async with self.calls.call(f"reading run {instance_id!r}") as call:
            record: RunRecord | None = await call.ask(self.storage.get, RunId(instance_id))
        if record is None:
            raise InstanceNotFoundError(f"no run has the id {instance_id!r}")
        return record

    async def read_history(self, instance_id: str, generation: int | None = None) -> tuple[Entry, ...]:
        async with self.calls.call(f"reading the history of run {instance_id!r}") as call:
            history: tuple[Entry, ...] = await call.ask(self.storage.history, RunId(instance_id), generation)
            if not history:
                await self.read_run(instance_id)
        return history

    async def find_runs(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        async with self.calls.call("finding runs") as call:
            records: tuple[RunRecord, ...] = await call.ask(self.storage.find, filter)
        return records

    async def request_cancel(self, instance_id: str, reason: str) -> CancelOutcome:
        _refuse_in_transaction("to cancel a run")
        value = self.codec.encode(reason)
        async with self.calls.call(f"cancelling run {instance_id!r}", "cancel it again, which does no harm") as call:
            outcome: CancelOutcome = await call.order(self.storage.cancel, RunId(instance_id), value)
        if outcome is CancelOutcome.MISSING:
            raise InstanceNotFoundError(f"no run has the id {instance_id!r}; nothing was cancelled")
        if outcome is not CancelOutcome.ENDED:
            await self._announce_shortly()
        return outcome

    async def retry_run(self, instance_id: str, from_start: bool) -> None:
        """Without an answer it is asked for again; that the run is open in its next generation is what was wanted,
        whoever opened it."""
        _refuse_in_transaction("to retry a run")
        async with self.calls.call(
            f"retrying run {instance_id!r}", f"look with app.handle({instance_id!r}).status() before you retry it again"
        ) as call:
            record = await self.read_run(instance_id)
            history = await self.read_history(instance_id, record.gen)
            keep = plan_retry(self.codec, record, history, from_start=from_start)
            outcome: ReopenOutcome = await call.order(self.storage.reopen, record.run_id, record.gen, keep)
            if outcome is not ReopenOutcome.DONE and (await self.read_run(instance_id)).gen == record.gen:
                raise ActionRefusedError(f"run {instance_id} cannot be tried again: its state has just changed")
        await self._wake_workers()

    async def resume_run(self, instance_id: str) -> None:
        """It is replayed with the code of whoever claims it, and then waits for what that code asks for."""
        _refuse_in_transaction("to resume a run")
        async with self.calls.call(f"resuming run {instance_id!r}", "resume it again, which does no harm") as call:
            resumed: bool = await call.order(self.storage.resume, RunId(instance_id))
        if not resumed:
            status = (await self.read_run(instance_id)).status
            state = f"has ended as {status.value}" if status in ENDED else f"is {status.value}, not suspended"
            raise ActionRefusedError(f"run {instance_id} {state}: there is nothing to resume")
        await self._wake_workers()

    async def _wake_workers(self) -> None:
        await self._announce_shortly()
        if self.worker is not None:
            self.worker.wake()

    async def _announce_shortly(self) -> None:
        """After a change that is committed: a call must neither fail nor take long because others cannot be told."""
        with suppress(TimeoutError, StorageUnavailableError, StorageConflictError):
            async with asyncio.timeout(min(HINT_SECONDS, self.calls.seconds)):
                await self.storage.notify()

    # Events

    async def send(self, event: CloudEvent, session: Any = None) -> None:
        if isinstance(_get_running_loop(), WorkflowLoop):
            raise NotInWorkflowError("app.send_event() in the body of a workflow: use send_event(), which is recorded.")
        if not await self._dispatch(StagedKind.EVENT, lambda: self._encode_event(event), session):
            await self.receive((event,))
        if self._caller is not None:
            sent = (event.type, event.source, json_format.value_of(event))
            self._caller.call(lambda hooks: hooks.on_event_sent(*sent))

    def _notify_started_by_event(self, start: Start, event: CloudEvent) -> None:
        if self._caller is not None and self._caller.watches_arrivals:
            arrival = EventReceived(start.run_id, start.workflow, event.type, event.extensions)
            self._caller.call(lambda hooks: hooks.watch_arrival(arrival))

    def _encode_event(self, event: CloudEvent) -> bytes:
        return self.codec.encrypt(json_format.emit_stored(event))

    async def publish(self, message: Message, session: Any = None) -> None:
        if not await self._dispatch(StagedKind.MESSAGE, lambda: pack_message(self.codec, message), session):
            await self.intake.submit((self.intake.message_item(message),))

    async def _dispatch(self, kind: StagedKind, pack: Callable[[], bytes], session: Any) -> bool:
        """In the caller's transaction, if there is one."""
        context = current_context.get()
        if session is not None:
            await self._caller_transactions.dispatch(session, StagedEvent(kind, pack()))
        elif isinstance(context, ActivityContext) and context.has_transaction:
            context.work.dispatch(StagedEvent(kind, pack()))
        else:
            return False
        return True

    async def last_event(self) -> int:
        async with self.calls.call("reading the newest number of the event log") as call:
            newest: int = await call.ask(self.storage.last_event)
        return newest

    @property
    def microseconds(self) -> int:
        return self.clock.now()

    def new_id(self) -> str:
        return self._ids.event()

    def now(self) -> datetime:
        return as_datetime(self.clock.now())

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        """Store what came from outside, all or nothing."""
        await self.intake.ingest(events)

    def _notify_all(self) -> None:
        """Our own worker first; one call speaks for all that was stored before it."""
        if self.worker is not None:
            self.worker.wake(sure=True)
        self._notify_other_processes()

    def _notify_other_processes(self) -> None:
        if self._notify_task is None:
            self._notify_task = supervision.start_once("announcing runs", self._announce, name="edda-announce")

    async def _announce(self) -> None:
        self._notify_task = None
        with suppress(StorageUnavailableError, StorageConflictError):
            await self.storage.notify()

    # What runs and their code say of themselves

    def register_event_schema(self, workflow: str, type: str, model: Any) -> None:
        self._definitions.add_event_schema(workflow, type, model)

    async def get_value(self, instance_id: str, name: str) -> RunValue | None:
        async with self.calls.call(f"reading what run {instance_id!r} set as {name!r}") as call:
            found: tuple[RunValue, ...] = await call.ask(self.storage.run_values, RunId(instance_id), name)
            if not found:
                await self.read_run(instance_id)
        return found[0] if found else None

    async def wait_value(self, instance_id: str, name: str, timeout: float | None) -> RunValue:
        _refuse_in_transaction("to wait for what another run says")
        try:
            async with asyncio.timeout(timeout) if timeout is not None else nullcontext():
                with self._awaiting():
                    return await self._poll_value(instance_id, name)
        except TimeoutError:
            raise TimeoutError(f"run {instance_id} did not set {name!r} within {timeout} seconds") from None

    async def _poll_value(self, instance_id: str, name: str) -> RunValue:
        pause = 0.02
        while True:
            # While the database is away it is looked for again: the caller says for how long with `timeout`.
            with suppress(StorageUnavailableError):
                record = await self.read_run(instance_id)
                fact = await self.get_value(instance_id, name)
                if fact is not None:
                    return fact
                if record.status in ENDED:
                    raise ValueNotSetError(f"run {instance_id} has ended, and never set {name!r}")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, self.settings.poll / 2)

    # Results

    async def await_result(self, instance_id: str, returns: Any, timeout: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout) if timeout is not None else nullcontext():
                status, value = await self._await_end(RunId(instance_id))
        except TimeoutError:
            why = await self._why_open(RunId(instance_id))
            raise TimeoutError(f"run {instance_id} did not end within {timeout} seconds; {why}") from None
        if status is RunStatus.COMPLETED:
            return self.codec.decode(value, returns)
        if status is RunStatus.CANCELLED:
            raise WorkflowCancelledError(f"run {instance_id} was cancelled: {self.codec.decode(value)}")
        raise decode_failure(self.codec, value)

    async def _why_open(self, run_id: RunId) -> str:
        """One try: whoever waited has waited long enough."""
        try:
            async with asyncio.timeout(self.settings.poll):
                record, now = await self.storage.get(run_id), await self.storage.now()
                if record is None:
                    return "there is no such run"
                if (trouble := self._why_unwritten(record.owner)) is not None:
                    return f"its worker cannot write to the database, and goes on when it can: {trouble}"
                return explain(record, now, await self.storage.list_workers())
        except (TimeoutError, StorageUnavailableError, StorageConflictError):
            return "the database does not answer, so nobody can say whether it goes on"

    def _why_unwritten(self, owner: WorkerId | None) -> EddaError | None:
        """Of a run of this process: why its last batch is not in the database yet."""
        worker = self.worker
        return None if worker is None or worker.worker_id != owner else worker.journal.trouble

    async def await_end(self, run_id: RunId) -> RunStatus:
        return (await self._await_end(run_id))[0]

    def _awaiting(self) -> AbstractContextManager[None]:
        """In an activity: its run gives its place in memory away for as long as it waits for another run."""
        context, worker = current_context.get(), self.worker
        if worker is None or not isinstance(context, ActivityContext):
            return nullcontext()
        return worker.awaiting(RunId(context.instance_id))

    async def _await_end(self, run_id: RunId) -> tuple[RunStatus, bytes]:
        _refuse_in_transaction("to wait for another run")
        with self._awaiting():
            return await self._look_for_end(run_id)

    async def _look_for_end(self, run_id: RunId) -> tuple[RunStatus, bytes]:
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
                    record = await self._try_read_run(run_id)
                    if record is not None and record.status in ENDED and record.value is not None:
                        return record.status, record.value
                await asyncio.wait([ended], timeout=self.settings.poll if is_here else pause)
                if ended.done():
                    return ended.result().status, ended.result().value
                pause = min(pause * 1.5, self.settings.poll / 2)
        finally:
            self._forget_waiter(run_id, ended)

    async def _try_read_run(self, run_id: RunId) -> RunRecord | None:
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


def _refuse_in_transaction(what: str) -> None:
    """It would be no part of it, and on SQLite wait for the very transaction that waits for it."""
    context = current_context.get()
    if isinstance(context, ActivityContext) and context.has_transaction:
        raise NotInWorkflowError(
            f"{context.activity_id} has an open transaction, which is no place {what}: do it before, or in another step"
        )


def _effect_id(context: WorkflowContext | None) -> str | None:
    """Of a run that is started in an activity: the same at every attempt, so that it is started once."""
    if not isinstance(context, ActivityContext):
        return None
    return f"call-{blake2b(context.next_effect_id().encode(), digest_size=16).hexdigest()}"
