"""What Edda writes into a transaction that is not its own: a step's record, new runs, dispatches, outgoing events.

The same few statements for every database and driver, so that `ctx.session`, `ctx.transaction()` and a web handler's
own session all go one way. They come last, just before the COMMIT: the rows they lock are locked for as long as a
commit takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from edda.core.model import OutboxEvent, RunId, StagedEvent, Start, StepCommit, WorkerId
from edda.errors import LeaseLostError, StorageConflictError
from edda.storage.ports import Dialect, SharedTransaction


class StepCommitWrite(Struct, frozen=True):
    """What goes in with a step's own writes."""

    worker: WorkerId
    run_id: RunId
    epoch: int
    gen: int
    done: StepCommit
    dispatches: tuple[StagedEvent, ...] = ()
    outgoing: tuple[OutboxEvent, ...] = ()
    taken: tuple[int, ...] = ()
    """Offers of messages that the step has used: they must not be offered again."""


class ExistingRun(Struct, frozen=True):
    """A run whose id was asked for again."""

    workflow: str
    gen: int
    input: bytes


# A process that is stopped between the record and the commit must not hold the row for ever: all runs of its worker
# would wait for it. From the record on the server is patient no longer, also with a user's own connections.
_SHORT_IDLE_TIMEOUT = " AND set_config('idle_in_transaction_session_timeout', '5s', true) IS NOT NULL"
_LOCK_SHARED = {"postgresql": f"{_SHORT_IDLE_TIMEOUT} FOR SHARE", "mysql": " LOCK IN SHARE MODE", "sqlite": ""}

# The row that says whose run it is stays as it is until the commit, and it is read afresh when it is locked. So
# nobody can take the run away in between, and whoever has taken it before is seen.
_RECORD = """
INSERT INTO edda_done (run_id, gen, step, attempt, value, at)
SELECT run_id, gen, :step, :attempt, :value, :at FROM edda_sched
 WHERE run_id = :run_id AND owner = :worker AND epoch = :epoch AND gen = :gen"""

# For a cluster, where whoever takes the run away on another node does not see the lock: both write the row.
_CERTIFY_RECORD = """
UPDATE edda_sched SET records = records + 1
 WHERE run_id = :run_id AND owner = :worker AND epoch = :epoch AND gen = :gen"""
_CERTIFY_LOOK = "UPDATE edda_sched SET records = records + 1 WHERE run_id = :run_id"

_LOCK = "SELECT 1 FROM edda_sched WHERE run_id = :run_id"
_LOCK_EXCLUSIVE = {"postgresql": " FOR UPDATE", "mysql": " FOR UPDATE", "sqlite": ""}

_FIRST = """
SELECT k.seq, e.body FROM edda_event_key k JOIN edda_event e ON e.seq = k.seq
 WHERE k.key = :key ORDER BY k.seq LIMIT 1"""

_DISPATCH = "INSERT INTO edda_dispatch (kind, body) VALUES (:kind, :body)"

_SEND = """
INSERT INTO edda_outbox (id, order_key, type, source, body, run_id, created_at, due, attempts, state)
VALUES (:id, :key, :type, :source, :body, :run_id, :created_at, 0, 0, 'pending')"""

_EXISTS = "SELECT 1 FROM edda_run WHERE id = :run_id LIMIT 1"
# On MySQL only a locking read sees what was committed after the transaction began.
_KNOWN = "SELECT workflow, gen, input FROM edda_run WHERE id = :run_id ORDER BY gen DESC LIMIT 1"
_LOCKING_READ = {"postgresql": "", "mysql": " LOCK IN SHARE MODE", "sqlite": ""}
# A statement of its own: on MySQL a subquery in an INSERT would lock the end of the log against who stores an event.
_NEWEST = {
    "postgresql": "SELECT last_value FROM edda_event_seq",
    "mysql": "SELECT coalesce(max(seq), 0) FROM edda_event",
    "sqlite": "SELECT coalesce(max(seq), 0) FROM edda_event",
}
_RUN = """
INSERT{ignore} INTO edda_run (id, gen, workflow, input, created_at, deadline, parent, parent_step, depth)
VALUES (:run_id, 0, :workflow, :input, :created_at, :deadline, :parent, :parent_step, :depth){skip}"""
_SCHED = """
INSERT INTO edda_sched (run_id, workflow, status, owner, epoch, gen, start_seq, ready_at)
VALUES (:run_id, :workflow, 'running', NULL, 0, 0, :newest, :ready_at)"""


async def write_step_commit(joint: SharedTransaction, step: StepCommitWrite) -> None:
    """`LeaseLostError` if the run is another worker's now; the driver's own error if the step is done already."""
    done = step.done
    values = {
        "run_id": step.run_id,
        "gen": step.gen,
        "worker": step.worker,
        "epoch": step.epoch,
        "step": done.step,
        "attempt": done.attempt,
        "value": done.value,
        "at": done.at,
    }
    is_ours = not joint.is_certified or await joint.execute(_CERTIFY_RECORD, values) == 1
    if not is_ours or await joint.execute(_RECORD + _LOCK_SHARED[joint.dialect], values) != 1:
        raise LeaseLostError(f"run {step.run_id} is no longer this worker's: {done.step} is not recorded")
    for seq in step.taken:
        if await joint.execute("DELETE FROM edda_dispatch WHERE seq = :seq", {"seq": seq}) != 1:
            raise StorageConflictError(f"{done.step} took so long that a message it received was offered again")
    await dispatch(joint, step.dispatches)
    await insert_outbox(joint, step.outgoing)


async def lock_run(joint: SharedTransaction, run_id: RunId) -> None:
    """Until no other transaction is about to record a step of the run: who was is committed or rolled back then. On a
    cluster that holds once this one is committed: the other's COMMIT came first and refuses this one, or is refused."""
    if joint.is_certified:
        await joint.execute(_CERTIFY_LOOK, {"run_id": run_id})
        return
    await joint.fetch(_LOCK + _LOCK_EXCLUSIVE[joint.dialect], {"run_id": run_id})


async def take_message(joint: SharedTransaction, key: bytes) -> bytes | None:
    """The first message under a `once` key, where nobody else can write meanwhile: it is gone with the commit."""
    rows = await joint.fetch(_FIRST, {"key": key})
    if not rows:
        return None
    ((seq, body),) = rows
    await joint.execute("DELETE FROM edda_event_key WHERE key = :key AND seq = :seq", {"key": key, "seq": seq})
    return bytes(body)


async def redeliver(joint: SharedTransaction, offers: Sequence[int]) -> None:
    """Messages that were taken and not used: they are offered again now, not when the lease is over."""
    for seq in offers:
        await joint.execute("UPDATE edda_dispatch SET due = 0 WHERE seq = :seq", {"seq": seq})


async def dispatch(joint: SharedTransaction, dispatches: Sequence[StagedEvent]) -> None:
    for one in dispatches:
        await joint.execute(_DISPATCH, {"kind": str(one.kind), "body": one.body})


async def insert_outbox(joint: SharedTransaction, events: Sequence[OutboxEvent]) -> None:
    for event in events:
        await joint.execute(
            _SEND,
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


async def start(joint: SharedTransaction, run: Start) -> bool:
    """False if there is a run with this id."""
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
    if await joint.fetch(_EXISTS, {"run_id": run.run_id}):
        return False
    if await joint.execute(_run_statement(joint.dialect), values) != 1:
        return False
    ((newest,),) = await joint.fetch(_NEWEST[joint.dialect], {})
    moment = {"run_id": run.run_id, "workflow": run.workflow, "ready_at": run.ready_at, "newest": int(newest)}
    await joint.execute(_SCHED, moment)
    return True


async def find_run(joint: SharedTransaction, run_id: RunId) -> ExistingRun | None:
    """A run that is there, maybe since a moment ago in the same transaction."""
    rows = await joint.fetch(_KNOWN + _LOCKING_READ[joint.dialect], {"run_id": run_id})
    if not rows:
        return None
    ((workflow, gen, input),) = rows  # MySQL keeps the name as bytes, which no collation compares
    return ExistingRun(workflow.decode() if isinstance(workflow, bytes) else workflow, gen, bytes(input))


def _run_statement(dialect: Dialect) -> str:
    if dialect == "mysql":
        return _RUN.replace("{ignore}", " IGNORE").replace("{skip}", "")
    return _RUN.replace("{ignore}", "").replace("{skip}", " ON CONFLICT DO NOTHING")
