"""What one attempt of a step does through Edda: it is committed together with the step's outcome, or not at all.

Without a transaction, messages and outbox events wait in memory, and the journal writes them in one commit with the
step's entry. With a transaction, the step commit is written into it: the user's rows, the step commit, messages and
events are one commit. The entry follows; after a crash the run's next owner finds the step commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from edda.core.model import MICROSECONDS, OutboxEvent, StagedEvent, Start, StepCommit
from edda.engine.tasks import Backoff
from edda.errors import NotInWorkflowError
from edda.storage.ports import Dialect, SharedTransaction
from edda.storage.shared import step_commit
from edda.storage.shared.step_commit import ExistingRun
from edda.storage.shared.step_faults import Fault, find_fault

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from edda.storage.sqlalchemy_sessions import StepSession

    from .run import LiveRun

MESSAGE_LEASE = 60 * MICROSECONDS
"""How long a message that an activity received is kept from other receivers, until it is delivered again."""
_FIRST_POLL = 0.05
_MAX_POLL = 1.0


class DrainingError(Exception):
    """The worker drains, and it is unknown whether a commit went through."""


class StepEffects:
    def __init__(self, run: LiveRun, step: str, attempt: int) -> None:
        self.staged: list[StagedEvent] = []
        self.outbox: list[OutboxEvent] = []
        self._run = run
        self._worker = run.worker
        self._step = step
        self._attempt = attempt
        self._transaction: SharedTransaction | None = None
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

    # What the activity does

    @property
    def holder(self) -> str:
        return f"step {self._step} of run {self._run.run_id}"

    @property
    def is_open(self) -> bool:
        return self._transaction is not None and (self._session is None or self._session.in_transaction())

    @property
    def session(self) -> AsyncSession:
        self._check_usable("ctx.session")
        if self._session is None:
            if self._transaction is not None:
                raise NotInWorkflowError(f"{self._step} uses ctx.transaction() already: use one of the two")
            self._session, self._transaction = self._worker.services.sessions.get().make(self)
        return self._session

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        self._check_usable("ctx.transaction()")
        if self._session is not None:
            raise NotInWorkflowError(f"{self._step} uses ctx.session already: use its begin_nested()")
        return self._transaction_block()

    @asynccontextmanager
    async def _transaction_block(self) -> AsyncIterator[Any]:
        """The first block needs no savepoint: nothing precedes it in the transaction."""
        is_first, position = self._transaction is None, self.savepoint()
        if is_first:
            self._transaction, self._blocks = await self._worker.services.storage.begin(self.holder), 0
        transaction = self._transaction
        assert transaction is not None
        self._blocks += 1
        savepoint = f"edda_{self._blocks}"
        if not is_first:
            await transaction.execute(f"SAVEPOINT {savepoint}", {})
        try:
            yield transaction.connection
        except BaseException:
            self.rollback_to(position)
            if is_first:
                await self._rollback()
            elif self._transaction is transaction:
                await transaction.execute(f"ROLLBACK TO SAVEPOINT {savepoint}", {})
            raise
        if not is_first:
            await transaction.execute(f"RELEASE SAVEPOINT {savepoint}", {})

    def savepoint(self) -> tuple[int, int, int]:
        """How much was sent and received so far."""
        return len(self.staged), len(self.outbox), len(self._received)

    def rollback_to(self, mark: tuple[int, int, int]) -> None:
        """Everything after the savepoint was rolled back. Messages that were received are delivered again."""
        staged, outbox, received = mark
        self._to_redeliver += self._received[received:]
        del self.staged[staged:], self.outbox[outbox:], self._received[received:]

    def dispatch(self, event: StagedEvent) -> None:
        self.staged.append(event)

    def send(self, event: OutboxEvent) -> None:
        self.outbox.append(event)

    async def start(self, run: Start) -> ExistingRun | None:
        assert self._transaction is not None
        self._starts += 1
        is_new = await step_commit.start(self._transaction, run)
        return None if is_new else await step_commit.find_run(self._transaction, run.run_id)

    async def receive_message(self, key: bytes, timeout: int) -> bytes | None:
        self._check_usable("receive()")
        if self._transaction is not None and self._transaction.dialect == "sqlite" and self.is_open:
            # No other connection can write before the commit.
            return await step_commit.take_message(self._transaction, key)
        pause, until = _FIRST_POLL, self._worker.loop.time() + timeout / MICROSECONDS
        while True:
            message = await self._worker.services.storage.take_message(key, MESSAGE_LEASE)
            if message is not None:
                self._received.append(message.seq)
                return message.body
            rest = until - self._worker.loop.time()
            if rest <= 0:
                return None
            await asyncio.sleep(min(pause, rest))
            pause = min(pause * 1.5, _MAX_POLL)

    def _check_usable(self, what: str) -> None:
        if self._is_over:
            raise NotInWorkflowError(f"{what} was used after {self._step} was over: nothing would commit it")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._worker.loop:
            raise NotInWorkflowError(f"{what} needs an `async def` activity: {self._step} runs in a thread")

    # Ending

    @property
    def needs_commit(self) -> bool:
        return self.is_open or bool(self._received)

    async def commit(self, value: bytes) -> None:
        """The user's writes and the step commit, or neither. After an error that leaves the outcome unknown, call
        `find_step_commit`."""
        self._is_over = True
        if self._session is not None:
            await self._session.flush_pending()
        transaction = self._transaction
        if transaction is None or not self.is_open:
            transaction = self._transaction = await self._worker.services.storage.begin(self.holder)
        run = self._run
        record = step_commit.StepCommitWrite(
            self._worker.worker_id,
            run.run_id,
            run.epoch,
            run.generation,
            StepCommit(self._step, self._attempt, value, self._worker.services.clock.now()),
            tuple(self.staged),
            tuple(self.outbox),
            tuple(self._received),
        )
        self._is_recording = True
        await step_commit.write_step_commit(transaction, record)
        self._is_recording = False
        await transaction.commit()
        self._transaction = self._session = None
        self._received.clear()
        self._worker.on_step_committed(staged=bool(self.staged), outbox=bool(self.outbox), starts=bool(self._starts))

    async def find_step_commit(self) -> StepCommit | None:
        """Whether any attempt's step commit is stored. A COMMIT whose answer was lost may still be under way: wait for
        it, or the step would fail, or be tried again, while it goes through."""
        backoff, run = Backoff(), self._run
        while True:
            try:
                async with self._own_transaction() as transaction:
                    await step_commit.lock_run(transaction, run.run_id)
                return await self._worker.services.storage.find_step_commit(run.run_id, run.generation, self._step)
            except Exception as error:  # the driver's own errors: without an answer the outcome is unknown
                if self._worker.draining:  # the run's next owner finds the step commit
                    raise DrainingError from error
                with self._worker.outage.wait(run.run_id, self._step, error):
                    await backoff.pause()

    @asynccontextmanager
    async def _own_transaction(self) -> AsyncIterator[SharedTransaction]:
        transaction = await self._worker.services.storage.begin()
        try:
            yield transaction
            await transaction.commit()
        except BaseException:
            await transaction.rollback()
            raise

    async def roll_back(self) -> None:
        """Roll back what is open, for good."""
        self._is_over = True
        await self._rollback()
        unused, self._to_redeliver, self._received = [*self._to_redeliver, *self._received], [], []
        if not unused:
            return
        with suppress(Exception):  # if the database does not answer, they are delivered at the end of MESSAGE_LEASE
            async with self._own_transaction() as transaction:
                await step_commit.redeliver(transaction, unused)
            self._worker.on_step_committed(staged=True, outbox=False, starts=False)

    async def _rollback(self) -> None:
        """The storage drops a connection that fails here, and its transaction with it."""
        transaction, self._transaction, self._session = self._transaction, None, None
        if transaction is not None:
            self._ended = (transaction.dialect, transaction.is_lost)
            with suppress(Exception):
                await transaction.rollback()

    def fault_of(self, error: BaseException) -> Fault | None:
        """The fault of the database that ended the attempt; None if it was an error of its own."""
        transaction = self._transaction
        if transaction is None:
            dialect, is_lost = self._ended or (None, False)
            return find_fault(error, dialect, is_lost=is_lost, is_ours=self._is_recording)
        return find_fault(
            error,
            transaction.dialect,
            is_lost=transaction.is_lost or getattr(error, "connection_invalidated", False),
            is_unopened=not transaction.has_begun,
            is_ours=self._is_recording,
        )
