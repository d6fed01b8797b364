"""What one attempt of a step does through Edda: it counts only together with the attempt's outcome.

Without a transaction, messages and outgoing events wait in memory and go in with the step's entry, in the journal's own
commit. With one, the step's record is written into it: business rows, record, messages and events are one commit. The
entry of the history follows, and whoever goes on with the run after a crash finds the record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from edda.core.model import MICROSECONDS, OutboxEvent, RunId, StagedEvent, Start, StepCommit, WorkerId
from edda.engine.tasks import Backoff
from edda.errors import NotInWorkflowError
from edda.storage.ports import Dialect, SharedTransaction, Transactions
from edda.storage.shared import step_commit as joints
from edda.storage.shared.step_commit import ExistingRun
from edda.storage.shared.step_faults import Fault, find_fault

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from edda.engine.clock import Clock
    from edda.engine.tasks import Outage
    from edda.storage.sqlalchemy_sessions import Sessions, StepSession

MESSAGE_LEASE = 60 * MICROSECONDS
"""How long a message that an activity took is kept from the others, until it is offered again."""
_FIRST_LOOK = 0.05
_LAST_LOOK = 1.0


class EffectServices(Protocol):
    """What work needs of the worker."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    worker_id: WorkerId
    transactions: Transactions
    draining: bool
    outage: Outage

    @property
    def sessions(self) -> Sessions: ...

    def on_step_committed(self, *, dispatches: bool, outgoing: bool, starts: bool) -> None:
        """A step's own transaction has left something for others to do."""
        ...


class DrainingError(Exception):
    """The worker stops before the database has said what became of a commit."""


class StepKey(Struct, frozen=True):
    run_id: RunId
    epoch: int
    gen: int
    step: str
    attempt: int


class LazyEffects:
    """Where an attempt's work lies, once it does any: few do."""

    __slots__ = ("_registrar", "_step", "work")

    def __init__(self, registrar: EffectServices, run_id: RunId, epoch: int, gen: int, step: str, attempt: int) -> None:
        self._registrar = registrar
        self._step = (run_id, epoch, gen, step, attempt)
        self.work: StepEffects | None = None

    def __call__(self) -> StepEffects:
        if self.work is None:
            self.work = StepEffects(self._registrar, StepKey(*self._step))
        return self.work


class StepEffects:
    def __init__(self, registrar: EffectServices, key: StepKey) -> None:
        self.dispatches: list[StagedEvent] = []
        self.outgoing: list[OutboxEvent] = []
        self._registrar = registrar
        self._key = key
        self._joint: SharedTransaction | None = None
        self._session: StepSession | None = None
        self._blocks = 0
        self._received: list[int] = []
        self._to_redeliver: list[int] = []
        self._starts = 0
        self._is_over = False
        self._is_recording = False
        """A statement of Edda's own is under way in the transaction."""
        self._ended: tuple[Dialect, bool] | None = None
        """Of the transaction that was rolled back last: its dialect, and whether its connection was lost."""

    # What the body does

    @property
    def holder(self) -> str:
        return f"step {self._key.step} of run {self._key.run_id}"

    @property
    def is_open(self) -> bool:
        return self._joint is not None and (self._session is None or self._session.in_transaction())

    @property
    def session(self) -> AsyncSession:
        self._check_usable("ctx.session")
        if self._session is None:
            if self._joint is not None:
                raise NotInWorkflowError(f"{self._key.step} uses ctx.transaction() already: use one of the two")
            self._session, self._joint = self._registrar.sessions.make(self)
        return self._session

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        self._check_usable("ctx.transaction()")
        if self._session is not None:
            raise NotInWorkflowError(f"{self._key.step} uses ctx.session already: use its begin_nested()")
        return self._transaction_block()

    @asynccontextmanager
    async def _transaction_block(self) -> AsyncIterator[Any]:
        """The first block needs no savepoint: there is nothing before it that could be kept."""
        is_first, position = self._joint is None, self.savepoint()
        if is_first:
            self._joint, self._blocks = await self._registrar.transactions.begin(self.holder), 0
        joint = self._joint
        assert joint is not None
        self._blocks += 1
        savepoint = f"edda_{self._blocks}"
        if not is_first:
            await joint.execute(f"SAVEPOINT {savepoint}", {})
        try:
            yield joint.connection
        except BaseException:
            self.rollback_to(position)
            if is_first:
                await self._rollback()
            elif self._joint is joint:
                await joint.execute(f"ROLLBACK TO SAVEPOINT {savepoint}", {})
            raise
        if not is_first:
            await joint.execute(f"RELEASE SAVEPOINT {savepoint}", {})

    def savepoint(self) -> tuple[int, int, int]:
        """How much it has sent and taken so far."""
        return len(self.dispatches), len(self.outgoing), len(self._received)

    def rollback_to(self, mark: tuple[int, int, int]) -> None:
        """What came after the mark was rolled back. Messages that were taken are offered again."""
        dispatches, outgoing, taken = mark
        self._to_redeliver += self._received[taken:]
        del self.dispatches[dispatches:], self.outgoing[outgoing:], self._received[taken:]

    def dispatch(self, dispatch: StagedEvent) -> None:
        self.dispatches.append(dispatch)

    def send(self, event: OutboxEvent) -> None:
        self.outgoing.append(event)

    async def start(self, run: Start) -> ExistingRun | None:
        assert self._joint is not None
        self._starts += 1
        is_new = await joints.start(self._joint, run)
        return None if is_new else await joints.find_run(self._joint, run.run_id)

    async def receive_message(self, key: bytes, patience: int) -> bytes | None:
        self._check_usable("receive()")
        if self._joint is not None and self._joint.dialect == "sqlite" and self.is_open:
            return await joints.take_message(self._joint, key)  # nobody else can write before the commit
        pause, until = _FIRST_LOOK, self._registrar.loop.time() + patience / MICROSECONDS
        while True:
            offer = await self._registrar.transactions.take_message(key, MESSAGE_LEASE)
            if offer is not None:
                self._received.append(offer.seq)
                return offer.body
            rest = until - self._registrar.loop.time()
            if rest <= 0:
                return None
            await asyncio.sleep(min(pause, rest))
            pause = min(pause * 1.5, _LAST_LOOK)

    def _check_usable(self, what: str) -> None:
        if self._is_over:
            raise NotInWorkflowError(f"{what} was used after {self._key.step} was over: nobody would commit it")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._registrar.loop:
            raise NotInWorkflowError(f"{what} needs an `async def` activity: {self._key.step} runs in a thread")

    # Its end

    @property
    def needs_commit(self) -> bool:
        return self.is_open or bool(self._received)

    async def commit(self, value: bytes) -> None:
        """The user's writes and the step's record, or neither. After an error that leaves it open what happened, ask
        `find_done`."""
        self._is_over = True
        if self._session is not None:
            await self._session.flush_pending()
        joint = self._joint
        if joint is None or not self.is_open:
            joint = self._joint = await self._registrar.transactions.begin(self.holder)
        key = self._key
        record = joints.StepCommitWrite(
            self._registrar.worker_id,
            key.run_id,
            key.epoch,
            key.gen,
            StepCommit(key.step, key.attempt, value, self._registrar.clock.now()),
            tuple(self.dispatches),
            tuple(self.outgoing),
            tuple(self._received),
        )
        self._is_recording = True
        await joints.write_step_commit(joint, record)
        self._is_recording = False
        await joint.commit()
        self._clear()
        self._received.clear()
        self._registrar.on_step_committed(
            dispatches=bool(self.dispatches), outgoing=bool(self.outgoing), starts=bool(self._starts)
        )

    async def find_step_commit(self) -> StepCommit | None:
        """Whether the record is in, whoever wrote it. A commit whose answer was lost may still be on its way: it is
        waited for, or the step would fail, or be tried again, while it goes through."""
        backoff, key = Backoff(), self._key
        while True:
            try:
                await self._wait_for_concurrent_commit()
                return await self._registrar.transactions.find_step_commit(key.run_id, key.gen, key.step)
            except Exception as error:  # the joint's are the driver's own: without an answer nobody knows
                if self._registrar.draining:  # whoever goes on with the run finds the record
                    raise DrainingError from error
                with self._registrar.outage.wait(key.run_id, key.step, error):
                    await backoff.pause()

    async def _wait_for_concurrent_commit(self) -> None:
        joint = await self._registrar.transactions.begin()
        try:
            await joints.lock_run(joint, self._key.run_id)
            await joint.commit()
        except BaseException:
            await joint.rollback()
            raise

    async def roll_back(self) -> None:
        """Whatever is left, for good."""
        self._is_over = True
        await self._rollback()
        unused, self._to_redeliver, self._received = [*self._to_redeliver, *self._received], [], []
        if unused:
            await self._redeliver(unused)

    async def _redeliver(self, offers: Sequence[int]) -> None:
        """At once, if that can be done; else the lease sees to it."""
        with suppress(Exception):
            joint = await self._registrar.transactions.begin()
            try:
                await joints.redeliver(joint, offers)
                await joint.commit()
            except BaseException:
                await joint.rollback()
                raise
            self._registrar.on_step_committed(dispatches=True, outgoing=False, starts=False)

    async def _rollback(self) -> None:
        """A connection that fails at it is dropped by its owner, and its transaction with it."""
        joint = self._joint
        self._clear()
        if joint is not None:
            self._ended = (joint.dialect, joint.is_lost)
            with suppress(Exception):
                await joint.rollback()

    def fault_of(self, error: BaseException) -> Fault | None:
        """Whether the attempt ended by a fault of the database; None if by an error of its own."""
        joint = self._joint
        if joint is None:
            dialect, is_lost = self._ended or (None, False)
            return find_fault(error, dialect, is_lost=is_lost, is_ours=self._is_recording)
        return find_fault(
            error,
            joint.dialect,
            is_lost=joint.is_lost or getattr(error, "connection_invalidated", False),
            is_unopened=not joint.has_begun,
            is_ours=self._is_recording,
        )

    def _clear(self) -> None:
        self._joint = self._session = None
