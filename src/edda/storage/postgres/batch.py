"""A batch as one statement: the fence first, and everything else joined to it.

Parts of one statement do not see each other's rows, so a run that starts and waits, ends or recurs in the same batch
is folded into one row here.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from edda.core.model import AckInbox, End, Entry, Recur, RunId, RunWrite, Start, Suspend, Transition, Wait, WorkerId
from edda.core.states import RunStatus

from .batch_sql import SECTIONS, SINGLE, Row, batch_statement, outgoing_row, start_row

_NO_MOVE = (None,) * 7
_NO_WAIT = (None,) * 8


class _BatchRows(Struct):
    """The rows of each section."""

    run: list[Row] = field(default_factory=list)
    sched: list[Row] = field(default_factory=list)
    expected: list[Row] = field(default_factory=list)
    hist: list[Row] = field(default_factory=list)
    children: list[Row] = field(default_factory=list)
    locked: list[Row] = field(default_factory=list)
    asked: list[Row] = field(default_factory=list)
    dropped: list[Row] = field(default_factory=list)
    freed: list[Row] = field(default_factory=list)
    result: list[Row] = field(default_factory=list)
    ended: list[Row] = field(default_factory=list)
    next: list[Row] = field(default_factory=list)
    opening: list[Row] = field(default_factory=list)
    posted: list[Row] = field(default_factory=list)
    recorded: list[Row] = field(default_factory=list)
    dispatched: list[Row] = field(default_factory=list)
    outgoing: list[Row] = field(default_factory=list)
    stated: list[Row] = field(default_factory=list)
    implied_sections: set[str] = field(default_factory=set)
    """The sections without rows of their own that follow from others."""

    def add(self, bundle: RunWrite, worker: WorkerId) -> None:
        self.hist.extend([_history(bundle, bundle.gen, entry) for entry in bundle.entries])
        if isinstance(bundle.move, End):
            move = bundle.move
            self.result.append((bundle.run_id, bundle.gen, move.status, move.value, move.at))
        if bundle.start is not None:
            self._add_start(bundle, bundle.start, worker)
        elif bundle.move is not None:
            self._add_move(bundle, bundle.move)
        if bundle.letters:
            self._add_letters(bundle)
        self._add_side_effects(bundle)

    def _add_side_effects(self, bundle: RunWrite) -> None:
        if bundle.recorded:
            self.recorded.extend((bundle.run_id, bundle.gen, step) for step in bundle.recorded)
        if bundle.dispatches:
            self.dispatched.extend((one.kind, one.body) for one in bundle.dispatches)
        if bundle.outgoing:
            self.outgoing.extend(map(outgoing_row, bundle.outgoing))
        if bundle.facts:
            self.stated.extend((bundle.run_id, fact.name, fact.value) for fact in bundle.facts)

    def _add_start(self, bundle: RunWrite, start: Start, worker: WorkerId) -> None:
        gen, move = bundle.gen, bundle.move
        self._add_run(start, gen, start.input, start.created_at)
        if isinstance(move, End):
            return  # over before anybody could see it open
        if isinstance(move, Recur):
            gen += 1
            self._add_run(start, gen, move.input, move.at)
            self.hist.append(_history(bundle, gen, move.entry))
        self.sched.append((start.run_id, start.workflow, gen, bundle.epoch, *_initial_state(bundle, start, worker)))
        self.expected.extend((start.run_id, *_wait_columns(wait)) for wait in bundle.waits)

    def _add_run(self, start: Start, gen: int, input: bytes, at: int) -> None:
        family = (start.parent, start.parent_step, start.depth)
        self.run.append((start.run_id, gen, start.workflow, input, at, start.deadline, *family))

    def _add_move(self, bundle: RunWrite, move: Transition) -> None:
        self.dropped.extend((bundle.run_id, step) for step in bundle.drops)
        self.freed.extend((bundle.run_id, n) for n in bundle.frees)
        match move:
            case AckInbox(absorbed):
                self._lock(bundle, ("absorb", absorbed, None, None, None))
                self.implied_sections.add("absorbed")
            case Suspend(absorbed, ready_at, status, reason):
                self._lock(bundle, ("release", absorbed, ready_at, status, reason))
                self.implied_sections.add("released")
            case End(watchers=watchers, absorbed=absorbed, settled=settled):
                known = (bundle.undoing, watchers, settled)
                self.locked.append((bundle.run_id, "end", absorbed, None, None, None, *known))
                self.implied_sections |= {"gone", "unheard"}
                if watchers:
                    self.implied_sections.add("unwatched")
                if bundle.undoing or absorbed is not None:  # the run may stay
                    self.implied_sections.add("absorbed")
            case Recur(absorbed, input, at, entry):
                self._lock(bundle, ("recur", absorbed, None, None, None))
                self.next.append((bundle.run_id, bundle.gen, input, at))
                self.opening.append(_history(bundle, bundle.gen + 1, entry))
                self.implied_sections |= {"followed", "unheard", "absorbed"}

    def _lock(self, bundle: RunWrite, move: Row) -> None:
        row = (bundle.run_id, *move, bundle.undoing, None, None)
        if not bundle.waits:
            self.locked.append(row)
            return
        self.asked.extend((*row, *_wait_columns(wait), wait.floor) for wait in bundle.waits)
        self.implied_sections |= {"judged", "registered", "letters", "over", "absorbed"}
        if any(wait.once for wait in bundle.waits):
            self.implied_sections |= {"sought", "taken"}
        else:
            self.implied_sections.add("found")

    def _add_letters(self, bundle: RunWrite) -> None:
        self.posted.extend(
            (place, bundle.run_id, letter.run_id, letter.kind, letter.step, letter.value)
            for place, letter in enumerate(bundle.letters, len(self.posted) + 1)
        )
        self.implied_sections |= {"sent", "told"}

    def finish(self) -> dict[str, list[Row]]:
        self.locked.extend((target, "mail", *_NO_MOVE) for target in {row[2] for row in self.posted})
        if self.asked:  # one statement locks all
            self.asked.extend((*row, *_NO_WAIT) for row in self.locked)
            self.locked = []
        if "sought" in self.implied_sections:
            self.implied_sections.discard("found")
        if "gone" in self.implied_sections:
            self.ended, self.result = self.result, []
        return {name: rows for name in SECTIONS if (rows := getattr(self, name, None))}


def _history(bundle: RunWrite, gen: int, e: Entry) -> Row:
    return (
        bundle.run_id,
        gen,
        bundle.epoch,
        e.seq,
        e.kind,
        e.step,
        e.name,
        e.ok,
        e.at,
        e.attempt,
        e.n,
        e.event,
        e.input,
        e.value,
    )


def _initial_state(bundle: RunWrite, start: Start, worker: WorkerId) -> Row:
    """Where a new run stands after its first batch: the columns from `owner` to `undoing`."""
    match bundle.move:
        case Suspend(absorbed, ready_at, status, reason):
            return (None, status, reason, ready_at, absorbed, int(status is RunStatus.PARKED), bundle.undoing)
        case AckInbox(absorbed) | Recur(absorbed):
            pass
        case _:
            absorbed = 0
    owner = worker if start.ready_at is None else None
    undoing = bundle.undoing and not isinstance(bundle.move, Recur)
    return (owner, RunStatus.RUNNING, None, start.ready_at, absorbed, 0, undoing)


def _wait_columns(wait: Wait) -> Row:
    return (wait.step, wait.key, wait.own_key, wait.type, wait.match, wait.due, wait.once)


def _children(batch: Sequence[RunWrite]) -> list[Row]:
    """Sorted, the first of each id, and none that starts in the same batch anyway."""
    children: dict[RunId, Start] = {}
    for bundle in batch:
        for child in bundle.children:
            children.setdefault(child.run_id, child)
    if children:
        for bundle in batch:
            if bundle.start is not None:
                children.pop(bundle.run_id, None)
    return [start_row(child) for _, child in sorted(children.items())]


def build_batch(worker: WorkerId, batch: Sequence[RunWrite]) -> tuple[str, list[object]]:
    """The statement for this batch and its values, behind $1 to $6 of the fence."""
    rows = _BatchRows(children=_children(batch))
    for bundle in batch:
        rows.add(bundle, worker)
    filled = rows.finish()
    names = tuple(name for name in SECTIONS if name in filled or name in rows.implied_sections)
    if names == ("hist",) and len(rows.hist) == 1:
        return SINGLE, list(rows.hist[0])
    values: list[object] = list(filled.values())
    return batch_statement(names), values
