"""Records with the boring fields filled in, so that a test names only what it is about."""

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
"""A lease that was over before it began: no test has to wait for one."""
LATER = 4_000_000_000 * MICROSECONDS
"""A due time that no test lives to see (the year 2096)."""
WORKFLOW = "checkout"
SOURCE = "/shop"
TYPE = "order.paid"

ASLEEP = Suspend(0, None, RunStatus.WAITING_FOR_EVENT, TYPE)
"""Until an event comes, with an inbox where nothing ever was."""


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
        n=n,
        event=event,
    )


def bundle(
    run_id: str,
    *entries: Entry,
    move: Transition | None = None,
    start: Start | None = None,
    epoch: int = 1,
    waits: Sequence[Wait] = (),
    drops: Sequence[str] = (),
    frees: Sequence[int] = (),
    gen: int = 0,
    children: Sequence[Start] = (),
    letters: Sequence[RunSignal] = (),
    undoing: bool = False,
    dispatches: Sequence[StagedEvent] = (),
    outgoing: Sequence[OutboxEvent] = (),
    facts: Sequence[RunValue] = (),
    recorded: Sequence[str] = (),
) -> RunWrite:
    return RunWrite(
        RunId(run_id),
        epoch,
        gen,
        entries,
        start,
        move,
        tuple(waits),
        tuple(drops),
        tuple(frees),
        tuple(children),
        tuple(letters),
        undoing,
        tuple(dispatches),
        tuple(outgoing),
        tuple(facts),
        tuple(recorded),
    )


def born(
    run_id: str,
    *entries: Entry,
    move: Transition | None = None,
    workflow: str = WORKFLOW,
    waits: Sequence[Wait] = (),
    children: Sequence[Start] = (),
    letters: Sequence[RunSignal] = (),
    undoing: bool = False,
) -> RunWrite:
    """A run started by the worker that writes it."""
    return bundle(
        run_id,
        *entries,
        move=move,
        start=start(run_id, workflow=workflow),
        waits=waits,
        children=children,
        letters=letters,
        undoing=undoing,
    )


def child(run_id: str, parent: str, step: str | None = "child:1", depth: int = 1) -> Start:
    return replace(start(run_id), parent=RunId(parent), parent_step=step, depth=depth)


def letter(run_id: str, value: bytes = b"its end", step: str = "child:1") -> RunSignal:
    return RunSignal(RunId(run_id), EntryKind.CHILD, step, value)


def stop(run_id: str, value: bytes = b"stop") -> RunSignal:
    return RunSignal(RunId(run_id), EntryKind.CANCEL, value=value)


def done(value: bytes = b"result", watchers: int = 0) -> End:
    return End(RunStatus.COMPLETED, value, 9_000, watchers)


def ended(status: RunStatus, at: int = 9_000) -> End:
    return End(status, b"result", at)


def parked(reason: str = "the code changed", ready_at: int | None = LATER) -> Suspend:
    return Suspend(0, ready_at, RunStatus.PARKED, reason)


def asleep(reason: str | None = TYPE, status: RunStatus = RunStatus.WAITING_FOR_EVENT) -> Suspend:
    return Suspend(0, None, status, reason)


def again(absorbed: int = 0, at: int = 5_000) -> Recur:
    """The next generation, which begins with what the one before leaves to it."""
    return Recur(absorbed, b"input again", at, Entry(1, EntryKind.RECUR, "", "", ok=True, at=at, value=b"left over"))


def key(name: str, target: str | None = None) -> bytes:
    return blake2b(f"{name} for {target}".encode(), digest_size=16).digest()


def wait(
    run_id: str, step: str, name: str, *, floor: int | None = None, due: int | None = None, once: bool = False
) -> Wait:
    return Wait(step, key(name), key(name, run_id), TYPE, name.encode(), due, floor, once)


def incoming(
    id: str,
    *names: str,
    source: str = SOURCE,
    type: str = TYPE,
    target: str | None = None,
    starts: Sequence[Start] = (),
    once: Sequence[str] = (),
) -> NewEvent:
    """An event that fits waits for these names, and one wait of all under each name of `once`; its body is its id."""
    event = Event(source, id, type, None if target is None else RunId(target), id.encode())
    shared = [EventKey(key(name), key(name, target)) for name in names]
    single = [EventKey(key(name), key(name, target), once=True) for name in once]
    return NewEvent(event, (*shared, *single), tuple(starts))


def dispatch(name: str, kind: StagedKind = StagedKind.MESSAGE) -> StagedEvent:
    return StagedEvent(kind, b"body of " + name.encode())


def outgoing(id: str, key: str = "orders", *, run_id: str | None = None) -> OutboxEvent:
    body = b"body of " + id.encode()
    return OutboxEvent(id, key, TYPE, SOURCE, body, 3_000, None if run_id is None else RunId(run_id))
