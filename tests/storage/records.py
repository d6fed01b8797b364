"""Records with default values, so that a test names only the fields it is about."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from msgspec.structs import replace

from edda.core.model import (
    MICROSECONDS,
    End,
    Entry,
    EntryKind,
    Event,
    EventKey,
    NewEvent,
    OutboxEvent,
    Recur,
    RunId,
    RunSignal,
    RunValue,
    RunWrite,
    StagedEvent,
    StagedKind,
    Start,
    Suspend,
    Transition,
    Wait,
)
from edda.core.states import RunStatus

HOUR = 3600 * MICROSECONDS
LAPSED = -HOUR
"""A lease that is over at once: no test has to wait for one."""
LATER = 4_000_000_000 * MICROSECONDS
"""A due time that no test reaches (the year 2096)."""
WORKFLOW = "checkout"
SOURCE = "/shop"
TYPE = "order.paid"

SUSPENDED = Suspend(0, None, RunStatus.WAITING_FOR_EVENT, TYPE)
"""Until an event arrives, with an empty inbox."""


def start(run_id: str, *, ready_at: int | None = None, workflow: str = WORKFLOW, created_at: int = 1_000) -> Start:
    return Start(RunId(run_id), workflow, b"input of " + run_id.encode(), created_at, ready_at)


def entry(seq: int, value: bytes = b"", n: int | None = None, event: int | None = None) -> Entry:
    return Entry(
        seq,
        EntryKind.STEP,
        f"step{seq}",
        "pay",
        ok=True,
        at=2_000 + seq,
        input=b"in",
        value=value,
        attempt=1,
        inbox_no=n,
        event=event,
    )


def run_write(
    run_id: str,
    *entries: Entry,
    transition: Transition | None = None,
    start: Start | None = None,
    epoch: int = 1,
    waits: Sequence[Wait] = (),
    cancelled_waits: Sequence[str] = (),
    released_items: Sequence[int] = (),
    generation: int = 0,
    children: Sequence[Start] = (),
    signals: Sequence[RunSignal] = (),
    compensating: bool = False,
    staged_events: Sequence[StagedEvent] = (),
    outbox_events: Sequence[OutboxEvent] = (),
    values: Sequence[RunValue] = (),
    recorded_steps: Sequence[str] = (),
) -> RunWrite:
    return RunWrite(
        RunId(run_id),
        epoch,
        generation,
        entries,
        start,
        transition,
        tuple(waits),
        tuple(cancelled_waits),
        tuple(released_items),
        tuple(children),
        tuple(signals),
        compensating,
        tuple(staged_events),
        tuple(outbox_events),
        tuple(values),
        tuple(recorded_steps),
    )


def new_run(
    run_id: str,
    *entries: Entry,
    transition: Transition | None = None,
    workflow: str = WORKFLOW,
    waits: Sequence[Wait] = (),
    children: Sequence[Start] = (),
    signals: Sequence[RunSignal] = (),
    compensating: bool = False,
) -> RunWrite:
    """A run started by the worker that writes it."""
    return run_write(
        run_id,
        *entries,
        transition=transition,
        start=start(run_id, workflow=workflow),
        waits=waits,
        children=children,
        signals=signals,
        compensating=compensating,
    )


def child(run_id: str, parent: str, step: str | None = "child:1", depth: int = 1) -> Start:
    return replace(start(run_id), parent=RunId(parent), parent_step=step, depth=depth)


def end_signal(run_id: str, value: bytes = b"its end", step: str = "child:1") -> RunSignal:
    return RunSignal(RunId(run_id), EntryKind.CHILD, step, value)


def cancel_signal(run_id: str, value: bytes = b"stop") -> RunSignal:
    return RunSignal(RunId(run_id), EntryKind.CANCEL, value=value)


def done(value: bytes = b"result", watchers: int = 0) -> End:
    return End(RunStatus.COMPLETED, value, 9_000, watchers)


def ended(status: RunStatus, at: int = 9_000) -> End:
    return End(status, b"result", at)


def parked(reason: str = "the code changed", ready_at: int | None = LATER) -> Suspend:
    return Suspend(0, ready_at, RunStatus.PARKED, reason)


def suspended(reason: str | None = TYPE, status: RunStatus = RunStatus.WAITING_FOR_EVENT) -> Suspend:
    return Suspend(0, None, status, reason)


def next_generation(inbox_read: int = 0, at: int = 5_000) -> Recur:
    """The next generation, whose first entry has what the one before leaves to it."""
    return Recur(inbox_read, b"input again", at, Entry(1, EntryKind.RECUR, "", "", ok=True, at=at, value=b"left over"))


def key(name: str, target: str | None = None) -> bytes:
    return blake2b(f"{name} for {target}".encode(), digest_size=16).digest()


def wait(
    run_id: str, step: str, name: str, *, cursor: int | None = None, due: int | None = None, exclusive: bool = False
) -> Wait:
    return Wait(step, key(name), key(name, run_id), TYPE, name.encode(), due, cursor, exclusive)


def incoming(
    id: str,
    *names: str,
    source: str = SOURCE,
    type: str = TYPE,
    target: str | None = None,
    starts: Sequence[Start] = (),
    exclusive: Sequence[str] = (),
) -> NewEvent:
    """An event for all waits under `names`, and for one wait under each name of `exclusive`; its body is its id."""
    event = Event(source, id, type, None if target is None else RunId(target), id.encode())
    shared = [EventKey(key(name), key(name, target)) for name in names]
    single = [EventKey(key(name), key(name, target), exclusive=True) for name in exclusive]
    return NewEvent(event, (*shared, *single), tuple(starts))


def staged_event(name: str, kind: StagedKind = StagedKind.MESSAGE) -> StagedEvent:
    return StagedEvent(kind, b"body of " + name.encode())


def outbox_event(id: str, key: str = "orders", *, run_id: str | None = None) -> OutboxEvent:
    body = b"body of " + id.encode()
    return OutboxEvent(id, key, TYPE, SOURCE, body, 3_000, None if run_id is None else RunId(run_id))
