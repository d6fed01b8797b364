"""What callers of an app do with runs: start, read, cancel, retry and resume them, wait for their results and values,
send events and publish messages, in their own transaction if they have one.

`Settings.call_timeout` bounds every such call as a whole, however many statements it needs and however often they are
sent again. When the time is over the statement under way is cancelled, which drops its connection: the server may or
may not have committed it. So the error of a call that changes something says that its outcome is unknown, unless no
statement was ever sent.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import time
from asyncio import _get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from datetime import datetime
from functools import wraps
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from uuid import UUID

from msgspec import Struct

from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core.channels import Message, pack_message
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
)
from edda.core.queries import ReopenOutcome
from edda.core.states import ENDED, RunStatus
from edda.errors import (
    ActionRefusedError,
    AppError,
    EddaError,
    InstanceConflictError,
    InstanceNotFoundError,
    LeaseLostError,
    NotConnectedError,
    NotInWorkflowError,
    OutcomeUnknownError,
    StorageConflictError,
    StorageUnavailableError,
    UnknownWorkflowError,
    ValueNotSetError,
    WorkflowCancelledError,
)
from edda.storage.ports import Storage
from edda.storage.shared import step_commit
from edda.storage.shared.step_commit import ExistingRun
from edda.workflow.client import current_context
from edda.workflow.context import ActivityContext, as_datetime
from edda.workflow.loop import WorkflowLoop
from edda.workflow.workflow import StartOptions, Workflow

from .open_runs import explain
from .retry_plan import plan_retry
from .tasks import RETRYABLE_ERRORS, Backoff

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

WARNING_INTERVAL = 60.0
"""Seconds between two warnings that this app does not run a workflow."""
NOTIFY_TIMEOUT = 1.0
"""Seconds that a call spends on notifying other processes of its change: they also poll."""
CLOCK_AGE = 1.0
"""Seconds for which a process without a worker trusts its last reading of the database's clock."""


class Ids:
    """UUIDs of version 7, which sort by time, so that new rows are at the end of a database's index."""

    def uuid(self) -> str:
        value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
        value = value & ~(0xF << 76) | 7 << 76  # version
        value = value & ~(0x3 << 62) | 2 << 62  # variant
        return str(UUID(int=value))

    def worker(self) -> WorkerId:
        return WorkerId(f"w{self.uuid().replace('-', '')}")


class Call(Struct):
    """One call of the user's, while its statements are sent."""

    may_have_happened: bool = False
    """Whether a statement that changes something was sent and not refused."""
    last: EddaError | None = None
    """Why there was no answer so far."""

    async def read(self, query: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        """Sent until there is an answer."""
        return await self._repeat(lambda: query(*args, **options), changes=False)

    async def write(self, statement: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        """For a change that may be sent twice: sent until there is an answer."""
        return await self._repeat(lambda: statement(*args, **options), changes=True)

    async def _repeat(self, send: Callable[[], Awaitable[T]], *, changes: bool) -> T:
        backoff, before = Backoff(), self.may_have_happened
        while True:
            self.may_have_happened = before or changes
            try:
                return await send()
            except (NotConnectedError, StorageConflictError) as error:  # not sent, or rolled back
                self.may_have_happened, self.last = before, error
            except StorageUnavailableError as error:
                before, self.last = self.may_have_happened, error
            await backoff.pause()


class CallLimit(Struct, frozen=True):
    seconds: float

    @asynccontextmanager
    async def call(self, doing: str, advice: str = "look before you do it again") -> AsyncIterator[Call]:
        """After `seconds` the statement under way is cancelled. `advice`: what to do when it is unknown whether a
        change happened."""
        call = Call()
        try:
            async with asyncio.timeout(self.seconds) as timeout:
                yield call
        except TimeoutError:
            if not timeout.expired():
                raise
            why = f"{doing}: the database did not answer within {self.seconds:g} seconds"
            if call.last is not None:
                why += f" ({call.last})"
            if call.may_have_happened:
                raise OutcomeUnknownError(f"{why}, so it is unknown whether it happened: {advice}") from call.last
            raise StorageUnavailableError(f"{why}; nothing was changed, try again") from call.last

    async def read(self, doing: str, query: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        async with self.call(doing) as call:
            return await call.read(query, *args, **options)

    def bound(self, storage: Storage, changes: frozenset[str]) -> Storage:
        """The same storage, with this limit on each of its methods. Nothing is sent twice; `changes` names the methods
        that change something."""
        return cast(Storage, _BoundedStorage(storage, self, changes))


class _BoundedStorage(Struct, frozen=True):
    storage: Storage
    limit: CallLimit
    changes: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.storage, name)
        if not inspect.iscoroutinefunction(method):
            return method

        @wraps(method)
        async def within_limit(*args: Any, **options: Any) -> Any:
            async with self.limit.call(name.replace("_", " ")) as call:
                call.may_have_happened = name in self.changes
                return await method(*args, **options)

        return within_limit


class EngineClient:
    def __init__(self, engine: Engine) -> None:
        services = engine.services
        self.codec = services.codec
        self.loop: asyncio.AbstractEventLoop | None = None
        """On which the engine was started: its futures are never set on another one."""
        self._engine = engine
        self._services = services
        self._storage = services.storage
        self._clock = services.clock
        self._calls = engine.calls
        self._poll = services.settings.poll
        self._end_waiters: dict[RunId, set[asyncio.Future[End]]] = {}
        self._clock_read = -math.inf
        self._warned: dict[str, float] = {}
        """Workflows that this app does not run, and when it last warned that it was asked to start one."""

    def check_loop(self) -> None:
        running = _get_running_loop()
        if running is None or running is self.loop or self.loop is None or isinstance(running, WorkflowLoop):
            return
        raise AppError(
            f"the app {self._services.service!r} was started on another event loop, and each asyncio.run() makes a new "
            "one: start and use the app in the same loop, with `async with app:`"
        )

    # Starting

    async def start_workflow(
        self, workflow: Workflow[Any, Any], options: StartOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        running = _get_running_loop()
        if isinstance(running, WorkflowLoop):
            raise NotInWorkflowError(
                f"{workflow.name} was started through an app in the body of a workflow, which would start it again at "
                f"every replay: use {workflow.name}.start(...) or {workflow.name}.run(...), which make it a child."
            )
        if running is not self.loop:
            self.check_loop()
        bound = workflow.signature.bind(args, dict(kwargs))
        data = workflow.signature.encode_input(self.codec, bound)
        if self._engine.worker is None:
            await self._read_clock()
        now = self._clock.now()
        context = current_context.get()
        effect = _effect_id(context) if options.id is None and isinstance(context, ActivityContext) else None
        run_id = options.id or effect
        start = Start(
            run_id=RunId(run_id if run_id is not None else self._services.ids.uuid()),
            workflow=workflow.name,
            input=data,
            created_at=now,
            ready_at=None if run_id is None and options.delay == 0 and options.session is None else now + options.delay,
            deadline=None if options.timeout is None else now + options.delay + options.timeout,
        )
        if options.session is not None:
            known = await self._insert_with(options.session, start)
        elif isinstance(context, ActivityContext) and context.has_transaction:
            known = await context.work.start(start)
        else:
            await self.insert_run(start, is_effect=effect is not None)
            return start.run_id
        # The run exists if and when that transaction commits.
        if known is not None and effect is None:
            self._check_same(start, known)
        return start.run_id

    async def _read_clock(self) -> None:
        """A worker's heartbeats bring the database's time. A process without a worker reads it now and then: the host's
        own clock may differ, and the run's times are made of it."""
        sent = time.monotonic()
        if sent - self._clock_read > CLOCK_AGE:
            self._clock_read = sent
            with suppress(*RETRYABLE_ERRORS, TimeoutError):  # the start itself then fails with the database's error
                async with asyncio.timeout(NOTIFY_TIMEOUT):
                    self._clock.observe(await self._storage.now(), sent, time.monotonic())

    async def insert_run(self, start: Start, *, is_effect: bool = False) -> None:
        """For this process's worker if there is no `ready_at`, or else for any worker to claim. The id of an effect may
        exist with other arguments, those of the first attempt: these count."""
        id = start.run_id
        advice = (
            f"start it again with options(id={id!r}) and the same arguments, which starts it once, or look with "
            f"app.handle({id!r}).status()"
        )
        async with self._calls.call(f"starting {start.workflow} as run {id!r}", advice) as call:
            if start.ready_at is None and await self._start_locally(start, call):
                return
            if not await call.write(self._storage.start, [start]) and not is_effect:
                # The run exists, maybe by this very call, whose answer was lost.
                known = await call.read(self._storage.get, id)
                if known is None:
                    raise InstanceNotFoundError(f"run {id!r} was there, and has just been deleted")
                self._check_same(start, known)
        await self._wake_workers()

    async def _start_locally(self, start: Start, call: Call) -> bool:
        """Make the run this worker's own from its first record on. False if it has to be inserted for any worker."""
        worker = self._engine.worker
        if worker is None:
            return False
        try:
            workflow = self._services.registry.find(start.workflow)
        except UnknownWorkflowError:
            self._warn_unregistered(start.workflow)
            return False
        await worker.journal.wait_for_capacity()
        if not worker.has_capacity:
            return False
        run = worker.begin(start, workflow)
        try:
            await run.stored
        except LeaseLostError:
            call.may_have_happened = True
            return False  # its rows may be stored or not: inserting them again under the same id is right in both cases
        except asyncio.CancelledError:
            # The journal sends a batch until it has an answer; a run that is in no batch yet is withdrawn.
            call.may_have_happened = not worker.withdraw(run)
            call.last = worker.journal.trouble
            raise
        return True

    def _warn_unregistered(self, workflow: str) -> None:
        """Once a minute for each name: a program may start thousands of them for another service."""
        now = time.monotonic()
        if now - self._warned.get(workflow, -WARNING_INTERVAL) >= WARNING_INTERVAL:
            self._warned[workflow] = now
            logger.warning("this app does not run %s: the run is stored for a worker that does", workflow)

    async def _insert_with(self, session: Any, start: Start) -> ExistingRun | None:
        """In the transaction of the caller's session; returns the run that has the id already, if there is one."""
        from edda.storage.sqlalchemy_sessions import caller_transaction, on_commit

        transaction = caller_transaction(session)
        is_new = await step_commit.start(transaction, start)
        on_commit(session, self._engine.notify_all)
        return None if is_new else await step_commit.find_run(transaction, start.run_id)

    def _check_same(self, start: Start, known: RunRecord | ExistingRun) -> None:
        # Of a later generation the first arguments may be gone.
        if known.workflow == start.workflow and (known.generation > 0 or self.codec.equal(known.input, start.input)):
            return
        differs = f"workflow {known.workflow}" if known.workflow != start.workflow else "other arguments"
        raise InstanceConflictError(
            f"the id {start.run_id!r} belongs to a run of {differs}; nothing was started. Use another id, or the "
            "same arguments to get the same run."
        )

    # Reading

    async def read_run(self, instance_id: str) -> RunRecord:
        record = await self._calls.read(f"reading run {instance_id!r}", self._storage.get, RunId(instance_id))
        if record is None:
            raise InstanceNotFoundError(f"no run has the id {instance_id!r}")
        return record

    async def read_history(self, instance_id: str, generation: int | None = None) -> tuple[Entry, ...]:
        async with self._calls.call(f"reading the history of run {instance_id!r}") as call:
            history = await call.read(self._storage.history, RunId(instance_id), generation)
            if not history:
                await self.read_run(instance_id)
        return history

    async def find_runs(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        return await self._calls.read("finding runs", self._storage.find, filter)

    async def last_event(self) -> int:
        return await self._calls.read("reading the newest number of the event log", self._storage.last_event)

    @property
    def microseconds(self) -> int:
        return self._clock.now()

    def new_id(self) -> str:
        return self._services.ids.uuid()

    def now(self) -> datetime:
        return as_datetime(self._clock.now())

    def register_event_schema(self, workflow: str, type: str, model: Any) -> None:
        self._engine.definitions.add_event_schema(workflow, type, model)

    # Changing runs

    async def request_cancel(self, instance_id: str, reason: str) -> CancelOutcome:
        _refuse_in_transaction("to cancel a run")
        value = self.codec.encode(reason)
        async with self._calls.call(f"cancelling run {instance_id!r}", "cancel it again, which does no harm") as call:
            outcome = await call.write(self._storage.cancel, RunId(instance_id), value)
        if outcome is CancelOutcome.MISSING:
            raise InstanceNotFoundError(f"no run has the id {instance_id!r}; nothing was cancelled")
        if outcome is not CancelOutcome.ENDED:
            await self._notify_processes()
        return outcome

    async def retry_run(self, instance_id: str, from_start: bool) -> None:
        """Sent again if there is no answer: it succeeds if the run is open in its next generation, by this call or by
        another one."""
        _refuse_in_transaction("to retry a run")
        async with self._calls.call(
            f"retrying run {instance_id!r}", f"look with app.handle({instance_id!r}).status() before you retry it again"
        ) as call:
            record = await self.read_run(instance_id)
            history = await self.read_history(instance_id, record.generation)
            keep = plan_retry(self.codec, record, history, from_start=from_start)
            outcome = await call.write(self._storage.reopen, record.run_id, record.generation, keep)
            if outcome is not ReopenOutcome.DONE and (await self.read_run(instance_id)).generation == record.generation:
                raise ActionRefusedError(f"run {instance_id} cannot be tried again: its state has just changed")
        await self._wake_workers()

    async def resume_run(self, instance_id: str) -> None:
        """The worker that claims the run replays it with its code, and registers the waits that this code asks for."""
        _refuse_in_transaction("to resume a run")
        async with self._calls.call(f"resuming run {instance_id!r}", "resume it again, which does no harm") as call:
            resumed = await call.write(self._storage.resume, RunId(instance_id))
        if not resumed:
            status = (await self.read_run(instance_id)).status
            state = f"has ended as {status.value}" if status in ENDED else f"is {status.value}, not suspended"
            raise ActionRefusedError(f"run {instance_id} {state}: there is nothing to resume")
        await self._wake_workers()

    async def _wake_workers(self) -> None:
        await self._notify_processes()
        if self._engine.worker is not None:
            self._engine.worker.wake()

    async def _notify_processes(self) -> None:
        """After a change that is committed: a call neither fails nor takes long because the notification does."""
        with suppress(TimeoutError, StorageUnavailableError, StorageConflictError):
            async with asyncio.timeout(min(NOTIFY_TIMEOUT, self._calls.seconds)):
                await self._storage.notify()

    # Events and messages

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        """Store events from outside, all or none."""
        await self._engine.ingest.ingest(events)

    async def send(self, event: CloudEvent, session: Any = None) -> None:
        if isinstance(_get_running_loop(), WorkflowLoop):
            raise NotInWorkflowError("app.send_event() in the body of a workflow: use send_event(), which is recorded.")
        if not await self._stage(StagedKind.EVENT, lambda: self.codec.encrypt(json_format.emit_stored(event)), session):
            await self.receive((event,))
        if self._services.hooks is not None:
            sent = (event.type, event.source, json_format.value_of(event))
            self._services.hooks.call(lambda hooks: hooks.on_event_sent(*sent))

    async def publish(self, message: Message, session: Any = None) -> None:
        if not await self._stage(StagedKind.MESSAGE, lambda: pack_message(self.codec, message), session):
            ingest = self._engine.ingest
            await ingest.submit((ingest.message_item(message),))

    async def _stage(self, kind: StagedKind, pack: Callable[[], bytes], session: Any) -> bool:
        """In the transaction of the caller's session or of the step; False if there is none."""
        context = current_context.get()
        if session is not None:
            from edda.storage.sqlalchemy_sessions import caller_transaction, on_commit

            await step_commit.stage_events(caller_transaction(session), (StagedEvent(kind, pack()),))
            on_commit(session, self._engine.events_staged)
        elif isinstance(context, ActivityContext) and context.has_transaction:
            context.work.dispatch(StagedEvent(kind, pack()))
        else:
            return False
        return True

    # Values that runs set

    async def get_value(self, instance_id: str, name: str) -> RunValue | None:
        async with self._calls.call(f"reading what run {instance_id!r} set as {name!r}") as call:
            found = await call.read(self._storage.run_values, RunId(instance_id), name)
            if not found:
                await self.read_run(instance_id)
        return found[0] if found else None

    async def wait_value(self, instance_id: str, name: str, timeout: float | None) -> RunValue:
        pause = 0.02
        try:
            in_activity = isinstance(current_context.get(), ActivityContext)
            with self._waiting_in_activity("to wait for what another run says") if in_activity else nullcontext():
                async with asyncio.timeout(timeout):
                    while True:
                        # While the database is away the reads are repeated: the caller bounds them with `timeout`.
                        with suppress(StorageUnavailableError):
                            record = await self.read_run(instance_id)
                            value = await self.get_value(instance_id, name)
                            if value is not None:
                                return value
                            if record.status in ENDED:
                                raise ValueNotSetError(f"run {instance_id} has ended, and never set {name!r}")
                        await asyncio.sleep(pause)
                        pause = min(pause * 1.5, self._poll / 2)
        except TimeoutError:
            raise TimeoutError(f"run {instance_id} did not set {name!r} within {timeout} seconds") from None

    # Results

    async def await_result(self, instance_id: str, returns: Any, timeout: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout) if timeout is not None else nullcontext():
                status, value = await self.await_end(RunId(instance_id))
        except TimeoutError:
            why = await self._why_open(RunId(instance_id))
            raise TimeoutError(f"run {instance_id} did not end within {timeout} seconds; {why}") from None
        if status is RunStatus.COMPLETED:
            return self.codec.decode(value, returns)
        if status is RunStatus.CANCELLED:
            raise WorkflowCancelledError(f"run {instance_id} was cancelled: {self.codec.decode(value)}")
        raise decode_failure(self.codec, value)

    async def _why_open(self, run_id: RunId) -> str:
        """Reads once: the caller's time is over."""
        try:
            async with asyncio.timeout(self._poll):
                record, now = await self._storage.get(run_id), await self._storage.now()
                if record is None:
                    return "there is no such run"
                worker = self._engine.worker
                if worker is not None and worker.worker_id == record.owner and worker.journal.trouble is not None:
                    trouble = worker.journal.trouble
                    return f"its worker cannot write to the database, and goes on when it can: {trouble}"
                return explain(record, now, await self._storage.list_workers())
        except (TimeoutError, StorageUnavailableError, StorageConflictError):
            return "the database does not answer, so it is unknown whether it goes on"

    def _waiting_in_activity(self, what: str) -> AbstractContextManager[None]:
        """The activity's run gives its place in memory away for as long as it waits for another run."""
        _refuse_in_transaction(what)
        context, worker = current_context.get(), self._engine.worker
        return nullcontext() if context is None or worker is None else worker.awaiting(RunId(context.instance_id))

    async def await_end(self, run_id: RunId) -> tuple[RunStatus, bytes]:
        """The worker of this process reports the ends of its runs; for other runs the row is read, ever more rarely."""
        in_activity = isinstance(current_context.get(), ActivityContext)
        with self._waiting_in_activity("to wait for another run") if in_activity else nullcontext():
            ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
            waiters = self._end_waiters.setdefault(run_id, set())
            waiters.add(ended)
            pause = 0.02
            try:
                while True:
                    if self._engine.is_stopped:
                        raise AppError(f"the app is shut down; run {run_id} goes on elsewhere")
                    is_here = self._engine.worker is not None and run_id in self._engine.worker.live
                    if not is_here:
                        with suppress(StorageUnavailableError):  # the caller bounds the wait with `timeout`
                            record = await self.read_run(run_id)
                            if record.status in ENDED and record.value is not None:
                                return record.status, record.value
                    await asyncio.wait([ended], timeout=self._poll if is_here else pause)
                    if ended.done():
                        return ended.result().status, ended.result().value
                    pause = min(pause * 1.5, self._poll / 2)
            finally:
                waiters.discard(ended)
                if not waiters:
                    del self._end_waiters[run_id]

    def run_ended(self, run_id: RunId, end: End) -> None:
        """A run of this process ended, and its end is committed."""
        for waiter in self._end_waiters.get(run_id, ()):
            if not waiter.done():
                waiter.set_result(end)


def _refuse_in_transaction(what: str) -> None:
    """It would be no part of the transaction, and on SQLite wait for the write lock that this transaction holds."""
    context = current_context.get()
    if isinstance(context, ActivityContext) and context.has_transaction:
        raise NotInWorkflowError(
            f"{context.activity_id} has an open transaction, which is no place {what}: do it before, or in another step"
        )


def _effect_id(context: ActivityContext) -> str:
    """The id of a run that is started in an activity: the same at every attempt, so that it is started once."""
    return f"call-{blake2b(context.next_effect_id().encode(), digest_size=16).hexdigest()}"
