"""Edda's statements in a transaction that the user's code controls: step commits, new runs, staged and outbox events.

`ctx.session`, `ctx.transaction()` and a web handler's own session send the same statements on every database and
driver. A step commit comes last, just before the COMMIT, so that its row locks are held for the COMMIT only.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from edda.core.model import OutboxEvent, RunId, StagedEvent, Start, StepCommit, WorkerId
from edda.errors import LeaseLostError, StorageConflictError
from edda.storage.ports import SharedTransaction

from .rows import to_text


class StepCommitWrite(Struct, frozen=True):
    """A step commit, and the events that its activity sent."""

    worker: WorkerId
    run_id: RunId
    epoch: int
    generation: int
    commit: StepCommit
    staged_events: tuple[StagedEvent, ...] = ()
    outbox_events: tuple[OutboxEvent, ...] = ()
    redeliveries: tuple[int, ...] = ()
    """Numbers of the redeliveries of messages that the activity received: they are deleted with the step commit."""


class ExistingRun(Struct, frozen=True):
    """The run that has the id of a new start."""

    workflow: str
    generation: int
    input: bytes


# A process that is stopped between the step commit and the COMMIT must not hold the row's lock for ever: all runs of
# its worker would wait for it. From here on the server ends an idle transaction after 5 s, on a user's connection as
# well.
_SHORT_IDLE_TIMEOUT = " AND set_config('idle_in_transaction_session_timeout', '5s', true) IS NOT NULL"
_LOCK_SHARED = {"postgresql": f"{_SHORT_IDLE_TIMEOUT} FOR SHARE", "mysql": " LOCK IN SHARE MODE", "sqlite": ""}

# FOR SHARE reads the newest version of the row that names the run's owner, and keeps it until the COMMIT. So a worker
# that took the run before is seen, and none can take it before the COMMIT.
_STEP_COMMIT = """
INSERT INTO edda_step_commit (run_id, generation, step, attempt, value, at)
SELECT run_id, generation, :step, :attempt, :value, :at FROM edda_open_run
 WHERE run_id = :run_id AND owner = :worker AND epoch = :epoch AND generation = :generation"""

# On a cluster a worker that takes the run on another node does not see the lock, so both transactions write the row.
_CERTIFY_STEP_COMMIT = """
UPDATE edda_open_run SET records = records + 1
 WHERE run_id = :run_id AND owner = :worker AND epoch = :epoch AND generation = :generation"""
_CERTIFY_LOCK = "UPDATE edda_open_run SET records = records + 1 WHERE run_id = :run_id"

_LOCK = "SELECT 1 FROM edda_open_run WHERE run_id = :run_id"
_LOCK_EXCLUSIVE = {"postgresql": " FOR UPDATE", "mysql": " FOR UPDATE", "sqlite": ""}

_FIRST_MESSAGE = """
SELECT k.seq, e.body FROM edda_event_key k JOIN edda_event e ON e.seq = k.seq
 WHERE k.key = :key ORDER BY k.seq LIMIT 1"""

_STAGE = "INSERT INTO edda_staged_event (kind, body) VALUES (:kind, :body)"

_OUTBOX = """
INSERT INTO edda_outbox (id, order_key, type, source, body, run_id, created_at, due, attempts, state)
VALUES (:id, :key, :type, :source, :body, :run_id, :created_at, 0, 0, 'pending')"""

_EXISTS = "SELECT 1 FROM edda_run WHERE id = :run_id LIMIT 1"
# On MySQL only a locking read sees what was committed after the transaction began.
_FIND_RUN = "SELECT workflow, generation, input FROM edda_run WHERE id = :run_id ORDER BY generation DESC LIMIT 1"
_LOCKING_READ = {"postgresql": "", "mysql": " LOCK IN SHARE MODE", "sqlite": ""}
# A statement of its own: on MySQL a subquery in an INSERT would lock the end of the event log against acceptors.
_LAST_EVENT = {
    "postgresql": "SELECT last_value FROM edda_event_seq",
    "mysql": "SELECT coalesce(max(seq), 0) FROM edda_event",
    "sqlite": "SELECT coalesce(max(seq), 0) FROM edda_event",
}
_INSERT_RUN = """
INSERT INTO edda_run (id, generation, workflow, input, created_at, deadline, parent, parent_step, depth)
VALUES (:run_id, 0, :workflow, :input, :created_at, :deadline, :parent, :parent_step, :depth)"""
_RUN = dict.fromkeys(("postgresql", "sqlite"), f"{_INSERT_RUN} ON CONFLICT DO NOTHING")
_RUN["mysql"] = _INSERT_RUN.replace("INSERT INTO", "INSERT IGNORE INTO")
_OPEN_RUN = """
INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor, ready_at)
VALUES (:run_id, :workflow, 'running', NULL, 0, 0, :last_event, :ready_at)"""


class NoWriteLock:
    """The write lock of a database on which any number of transactions may write at a time."""

    async def end(self) -> None:
        pass


async def write_step_commit(transaction: SharedTransaction, step: StepCommitWrite) -> None:
    """Raises `LeaseLostError` if the run is another worker's now, the driver's error if the step is committed
    already."""
    commit = step.commit
    values = {
        "run_id": step.run_id,
        "generation": step.generation,
        "worker": step.worker,
        "epoch": step.epoch,
        "step": commit.step,
        "attempt": commit.attempt,
        "value": commit.value,
        "at": commit.at,
    }
    is_ours = not transaction.is_certified or await transaction.execute(_CERTIFY_STEP_COMMIT, values) == 1
    if not is_ours or await transaction.execute(_STEP_COMMIT + _LOCK_SHARED[transaction.dialect], values) != 1:
        raise LeaseLostError(f"run {step.run_id} is no longer this worker's: {commit.step} is not recorded")
    for seq in step.redeliveries:
        if await transaction.execute("DELETE FROM edda_staged_event WHERE seq = :seq", {"seq": seq}) != 1:
            raise StorageConflictError(f"{commit.step} took so long that a message it received was redelivered")
    await stage_events(transaction, step.staged_events)
    await insert_outbox(transaction, step.outbox_events)


async def lock_run(transaction: SharedTransaction, run_id: RunId) -> None:
    """Wait until no other transaction holds the run's row: one that writes a step commit has then committed or rolled
    back. On a cluster this holds once this transaction has committed: of two that write the row one is refused."""
    if transaction.is_certified:
        await transaction.execute(_CERTIFY_LOCK, {"run_id": run_id})
        return
    await transaction.fetch(_LOCK + _LOCK_EXCLUSIVE[transaction.dialect], {"run_id": run_id})


async def take_message(transaction: SharedTransaction, key: bytes) -> bytes | None:
    """The first message under an exclusive key; the COMMIT removes it. For databases with one writer at a time."""
    rows = await transaction.fetch(_FIRST_MESSAGE, {"key": key})
    if not rows:
        return None
    ((seq, body),) = rows
    await transaction.execute("DELETE FROM edda_event_key WHERE key = :key AND seq = :seq", {"key": key, "seq": seq})
    return bytes(body)


async def redeliver(transaction: SharedTransaction, redeliveries: Sequence[int]) -> None:
    """Redeliver messages that were taken and not used now, not at the end of their leases."""
    for seq in redeliveries:
        await transaction.execute("UPDATE edda_staged_event SET due = 0 WHERE seq = :seq", {"seq": seq})


async def stage_events(transaction: SharedTransaction, events: Sequence[StagedEvent]) -> None:
    for event in events:
        await transaction.execute(_STAGE, {"kind": str(event.kind), "body": event.body})


async def insert_outbox(transaction: SharedTransaction, events: Sequence[OutboxEvent]) -> None:
    for event in events:
        await transaction.execute(
            _OUTBOX,
            {
                "id": event.id,
                "key": event.key,
                "type": event.type,
                "source": event.source,
                "body": event.body,
                "run_id": event.run_id,
                "created_at": event.created_at,
            },
        )


async def start(transaction: SharedTransaction, run: Start) -> bool:
    """False if a run with this id exists."""
    values = {
        "run_id": run.run_id,
        "workflow": run.workflow,
        "input": run.input,
        "created_at": run.created_at,
        "deadline": run.deadline,
        "parent": run.parent,
        "parent_step": run.parent_step,
        "depth": run.depth,
    }
    # Of any generation: the first ones of an open run may be pruned.
    if await transaction.fetch(_EXISTS, {"run_id": run.run_id}):
        return False
    if await transaction.execute(_RUN[transaction.dialect], values) != 1:
        return False
    ((last_event,),) = await transaction.fetch(_LAST_EVENT[transaction.dialect], {})
    open_run = {"run_id": run.run_id, "workflow": run.workflow, "ready_at": run.ready_at, "last_event": int(last_event)}
    await transaction.execute(_OPEN_RUN, open_run)
    return True


async def find_run(transaction: SharedTransaction, run_id: RunId) -> ExistingRun | None:
    """An existing run, also one that this transaction has started."""
    rows = await transaction.fetch(_FIND_RUN + _LOCKING_READ[transaction.dialect], {"run_id": run_id})
    if not rows:
        return None
    ((workflow, generation, input),) = rows
    return ExistingRun(to_text(workflow), generation, bytes(input))
