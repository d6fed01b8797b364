"""What must hold of scripts that were played to their end, whatever happened to those who played them.

Where chance decides (a time-out against a step, a cancel against the end) every way is allowed, but each has to be
consistent in itself: history, result, what was done and what was undone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from edda.core.codec import Codec
from edda.core.exceptions import decode_failure
from edda.core.model import EntryKind
from edda.errors import CompensationError
from edda.workflow.children import ChildStarted

from .scripts import (
    CAUGHT,
    LATE,
    NAPPED,
    STARTED,
    Child,
    ChildKind,
    Done,
    Gather,
    Line,
    Nap,
    Piece,
    Script,
    Step,
    StepKind,
    Try,
    Within,
    act,
    deed,
    heavy,
    play,
)
from .sql_client import Line as Sql
from .sql_client import text

RUNS = "SELECT id, generation, input, parent FROM edda_run WHERE workflow = 'faults_script' ORDER BY id, generation"
HISTORY = """SELECT run_id, generation, seq, kind, step, name, ok, input, value FROM edda_history
    ORDER BY run_id, generation, seq"""
RESULTS = "SELECT run_id, status, value, ended_at FROM edda_result"
TOLD_TO_STOP = "SELECT run_id FROM edda_inbox WHERE kind = 'cancel'"
LEFT_OVER = ("SELECT run_id FROM edda_open_run", "SELECT run_id FROM edda_wait", "SELECT run_id FROM edda_watcher")
CODEC = Codec()
DEEDS = (deed.name, heavy.name)
SLACK = 500_000
"""Microseconds between the end of a run and the last moment at which its children hear of it."""
COMPENSATION = CompensationError.__name__

_STOPS = (EntryKind.CANCEL, EntryKind.TIMEOUT)
_OUTCOMES = (EntryKind.STEP, EntryKind.TIMER, EntryKind.CHILD)


class Record(Struct, frozen=True):
    generation: int
    seq: int
    kind: str
    step: str
    name: str
    ok: bool
    input: bytes
    value: bytes

    @property
    def is_done(self) -> bool:
        return self.ok and self.kind in (EntryKind.STEP, EntryKind.LATE) and self.name in (act.name, *DEEDS)

    @property
    def is_undo(self) -> bool:
        return self.kind == EntryKind.STEP and self.step.startswith("undo:")


class Played(Struct):
    """One run, a program's own or a child's."""

    id: str
    script: Script
    parent: str | None
    gens: int = 0
    history: list[Record] = []
    status: str = "open"
    value: bytes = b""
    ended_at: int = 0
    is_told_to_stop: bool = False

    @property
    def last(self) -> list[Record]:
        """The history of the generation that ended it."""
        return [record for record in self.history if record.generation == self.gens - 1]

    def key_of(self, record: Record) -> str:
        return f"{self.id}/{record.generation}/{record.step}"

    @property
    def error(self) -> str | None:
        return type(decode_failure(CODEC, self.value)).__name__ if self.status == "failed" else None


async def read_played(sql: Sql) -> dict[str, Played]:
    played: dict[str, Played] = {}
    for id, generation, input, parent in await sql.rows(RUNS):
        (packed, *_), _ = play.signature.decode(CODEC, input)
        run = played.setdefault(text(id), Played(text(id), Script.unpack(packed), text(parent)))
        run.gens = max(run.gens, generation + 1)
    for run_id, generation, seq, kind, step, name, ok, *rest in await sql.rows(HISTORY):
        played[text(run_id)].history.append(Record(generation, seq, kind, text(step), text(name), bool(ok), *rest))
    for run_id, status, value, ended_at in await sql.rows(RESULTS):
        run = played[text(run_id)]
        run.status, run.value, run.ended_at = status, value, ended_at
    for (run_id,) in await sql.rows(TOLD_TO_STOP):
        played[text(run_id)].is_told_to_stop = True
    return played


async def read_leftovers(sql: Sql) -> list[str]:
    return [f"{text(row[0])} is left over: {query}" for query in LEFT_OVER for row in await sql.rows(query)]


def violations(played: dict[str, Played], lines: list[Line]) -> Iterator[str]:
    told = Told(lines)
    for run in played.values():
        for wrong in _wrong_with(run, played, told):
            yield f"run {run.id} ({run.status}): {wrong}"
    for key in told.did.keys() | told.undid.keys():
        if key.split("/")[0] not in played:
            yield f"{key} was done by a run that is not stored"


class Told:
    """What was done and undone, by the key of the step that did it."""

    def __init__(self, lines: list[Line]) -> None:
        self.did: dict[str, set[str]] = defaultdict(set)
        self.undid: dict[str, set[str]] = defaultdict(set)
        for line in lines:
            (self.did if line.what == "did" else self.undid)[line.key].add(line.by)


def _wrong_with(run: Played, played: dict[str, Played], told: Told) -> Iterator[str]:
    if run.status == "open":
        yield f"did not end; its last entries: {run.history[-3:]}"
        return
    yield from _broken_history(run)
    yield from _wrong_end(run, played)
    yield from _wrong_effects(run, told)
    yield from _wrong_undos(run, told)
    yield from _wrong_children(run, played)
    yield from _spared_children(run, played)


# Histories


def _broken_history(run: Played) -> Iterator[str]:
    for generation in range(run.gens):
        rows = [record for record in run.history if record.generation == generation]
        if [row.seq for row in rows] != list(range(1, len(rows) + 1)):
            yield f"generation {generation} has gaps: {[row.seq for row in rows]}"
        if generation > 0 and (not rows or rows[0].kind != EntryKind.RECUR):
            yield f"generation {generation} does not begin with what it takes over"
        for step, times in Counter(row.step for row in rows if row.kind in _OUTCOMES).items():
            if times > 1:
                yield f"{step} of generation {generation} has {times} outcomes"


# Ends


class Expected(Struct, frozen=True):
    """How a piece can go."""

    may_return: bool = True
    errors: frozenset[str] = frozenset()

    def then(self, other: Expected) -> Expected:
        if not self.may_return:
            return self
        return Expected(other.may_return, self.errors | other.errors)


def expect(piece: Piece) -> Expected:
    match piece:
        case Step(StepKind.HOPELESS):
            return Expected(False, frozenset({"HopelessError"}))
        case Step(StepKind.EXHAUSTED):
            return Expected(False, frozenset({"RetryExhaustedError"}))
        case Gather(parts):
            each = [expect(part) for part in parts]
            return Expected(all(e.may_return for e in each), frozenset().union(*(e.errors for e in each)))
        case Within(_, part):
            return Expected(True, expect(part).errors)
        case Child(kind, script) if kind is not ChildKind.START:
            return expect_script(script)
        case _:
            return Expected()


def expect_script(script: Script) -> Expected:
    expected = Expected()
    for part in script.parts:
        expected = expected.then(expect(part))
    if script.fails:
        expected = expected.then(Expected(False, frozenset({"Boom"})))
    errors = set(expected.errors)
    if script.timeout is not None:
        errors.add("WorkflowTimeoutError")
    if script.may_stay_done:
        errors.add(COMPENSATION)
    return Expected(expected.may_return, frozenset(errors))


def fits(piece: Piece, value: Any) -> bool:
    """Whether the piece can have returned this."""
    match piece:
        case Step():
            return bool(value == piece.name)
        case Nap():
            return bool(value == NAPPED)
        case Gather(parts):
            return _each_fits(parts, value)
        case Within(_, part):
            return value == LATE or fits(part, value)
        case Try(part):
            return _is_caught(value, expect(part)) or fits(part, value)
        case Child(ChildKind.START):
            return bool(value == STARTED)
        case Child(ChildKind.TWICE, script):
            return isinstance(value, list) and all(_each_fits(script.parts, one) for one in value)
        case Child(_, script):
            return _each_fits(script.parts, value)


def _each_fits(parts: tuple[Piece, ...], value: Any) -> bool:
    return isinstance(value, list) and len(value) == len(parts) and all(map(fits, parts, value))


def _is_caught(value: Any, expected: Expected) -> bool:
    return isinstance(value, list) and len(value) == 2 and value[0] == CAUGHT and value[1] in expected.errors


def _wrong_end(run: Played, played: dict[str, Played]) -> Iterator[str]:
    expected = expect_script(run.script)
    match run.status:
        case "completed":
            value = CODEC.decode(run.value)
            if not expected.may_return or not _each_fits(run.script.parts, value):
                yield f"it cannot have returned {value}: {run.script}"
        case "failed":
            if run.error not in expected.errors:
                yield f"it cannot have failed with {decode_failure(CODEC, run.value)!r}: {run.script}"
        case "cancelled":
            yield from _wrong_cancel(run, played)
    if run.gens > run.script.generations or (run.status == "completed" and run.gens != run.script.generations):
        yield f"it ended in generation {run.gens - 1}: {run.script}"
    if run.status == "completed" and not run.script.leaves and _goes_on_when_stopped(run):
        yield "it was asked to stop and went on all the same"


def _wrong_cancel(run: Played, played: dict[str, Played]) -> Iterator[str]:
    if not any(record.kind == EntryKind.CANCEL for record in run.last):
        yield "it was cancelled, but nothing in its history says so"
    parent = played.get(run.parent or "")
    if parent is None:
        if run.script.cancel_after is None:
            yield "nobody asked it to stop"
    elif parent.status == "completed" and not run.script.may_be_left and not _was_stopped(parent):
        yield f"nobody asked it to stop: its parent {parent.id} completed"


def _was_stopped(run: Played) -> bool:
    return any(record.kind in _STOPS for record in run.history)


def _goes_on_when_stopped(run: Played) -> bool:
    """A stop that comes when the code is done moves nothing, and then nothing else does."""
    kinds = [record.kind for record in run.last]
    first = next((i for i, kind in enumerate(kinds) if kind in _STOPS), len(kinds))
    return any(kind not in (*_STOPS, EntryKind.LATE) for kind in kinds[first:])


# What was done, and undone


def _wrong_effects(run: Played, told: Told) -> Iterator[str]:
    for record in run.history:
        if record.is_done and not told.did.get(run.key_of(record)):
            yield f"{record.step} has a {record.kind} entry, but was never done"
    undone = {key: by for key, by in told.undid.items() if key.startswith(f"{run.id}/")}
    for key, by in undone.items():
        if len(by) > 1:
            yield f"{key} was undone more than once: by {sorted(by)}"
        if key not in told.did:
            yield f"{key} was undone, and never done"
    recorded = {run.key_of(record) for record in run.history if record.is_undo and record.ok}
    if unknown := recorded ^ set().union(*undone.values()):
        yield f"recorded as undone, or undone, but not both: {sorted(unknown)}"


def _wrong_undos(run: Played, told: Told) -> Iterator[str]:
    undos = [_target(record) for record in run.history if record.is_undo]
    if run.status == "completed":
        if undos:
            yield f"it completed, and yet was undone: {undos}"
        return
    has_failed = any(record.is_undo and not record.ok for record in run.last)
    if has_failed != (run.error == COMPENSATION) and not (run.error == COMPENSATION and _may_inherit_it(run)):
        yield f"an undo failed: {has_failed}, and its error is {run.error}"
    if _ended_between_generations(run):
        return
    done = [_done(run, record) for record in run.last if _has_a_way_back(run, record)]
    if undos != done[::-1]:
        yield f"it did {done}, and undid {undos}"
    unknown = {key for key in told.did if _is_deed(key, run)} - {one.key for one in done}
    if unknown:
        yield f"it did {sorted(unknown)}, and did not learn of it before it undid the rest"


def _may_inherit_it(run: Played) -> bool:
    """An undo of a child may have failed."""
    return any(COMPENSATION in expect(part).errors for part in run.script.parts)


def _ended_between_generations(run: Played) -> bool:
    """A cancel that came when the generation was over: there is nothing left to undo."""
    return run.status == "cancelled" and run.gens < run.script.generations and run.last[-1].kind == EntryKind.CANCEL


def _has_a_way_back(run: Played, record: Record) -> bool:
    if not record.is_done or record.name in DEEDS:
        return record.is_done
    return record.kind == EntryKind.STEP and CODEC.decode(record.input)["name"] in run.script.pledges


def _is_deed(key: str, run: Played) -> bool:
    run_id, generation, step = key.split("/", 2)
    return run_id == run.id and int(generation) == run.gens - 1 and step.rsplit("/", 1)[-1].partition(":")[0] in DEEDS


def _done(run: Played, record: Record) -> Done:
    return Done(run.key_of(record), CODEC.decode(record.value, Done).token)


def _target(undo: Record) -> Done:
    """What it was told to undo."""
    told = CODEC.decode(undo.input)
    return Done(told["key"], told["token"])


# Children


def _wrong_children(run: Played, played: dict[str, Played]) -> Iterator[str]:
    born: dict[tuple[int, str], str] = {}
    for record in run.history:
        if record.kind == EntryKind.START and record.ok:
            run_id = born[record.generation, record.step] = CODEC.decode(record.value, ChildStarted).run_id
            if run_id not in played:
                yield f"{record.step} started {run_id}, which is not stored"
        elif record.kind == EntryKind.CHILD and (record.generation, record.step) in born:
            yield from _wrong_news(record, played.get(born[record.generation, record.step]))


def _spared_children(run: Played, played: dict[str, Played]) -> Iterator[str]:
    """Who follows a run that was stopped is told to stop, unless it ended at about the same time."""
    if not any(record.kind in _STOPS for record in run.last):
        return
    born = [record for record in run.last if record.kind == EntryKind.START and record.ok]
    for started in (CODEC.decode(record.value, ChildStarted) for record in born):
        child = played.get(started.run_id)
        if child is None or not started.cancel_with_parent or child.is_told_to_stop:
            continue
        if child.ended_at > run.ended_at + SLACK:
            yield f"it was stopped, and its child {child.id} went on"


def _wrong_news(record: Record, child: Played | None) -> Iterator[str]:
    if child is None:
        return
    is_true = record.value == child.value if record.ok else child.status in ("failed", "cancelled")
    if not is_true or record.ok != (child.status == "completed"):
        yield f"{record.step} was told ok={record.ok} {record.value[:100]!r} of {child.id}, which is {child.status}"
