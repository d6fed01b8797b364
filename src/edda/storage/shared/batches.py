"""Decisions about a batch of run writes that are the same on every database."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from edda.core.model import End, Recur, RunId, RunWrite, Start, Transition


def children_of(batch: Sequence[RunWrite], existing: Collection[RunId] = ()) -> list[Start]:
    """The children to insert, sorted by id, which is the lock order; of two with one id the first, and none that the
    batch starts on its own."""
    children = {child.run_id: child for write in reversed(batch) for child in reversed(write.children)}
    started = {write.run_id for write in batch if write.start} if children else ()
    return [children[run] for run in sorted(children) if run not in started and run not in existing]


def is_refused(transition: Transition | None, watchers: int, inbox_count: int) -> bool:
    """An End that does not know all watchers of the run, and an End or a Recur that would leave an inbox item
    unread."""
    match transition:
        case End(watchers=known, expected_inbox_count=expected):
            return known != watchers or expected not in (None, inbox_count)
        case Recur(inbox_read):
            return inbox_read != inbox_count
    return False


def receivers_of(found: Mapping[str, int]) -> dict[int, str]:
    """The step that gets each event, in the order of the events, of the steps that `found` one: the lowest of those
    that found the same; the others register their waits again."""
    steps = {seq: step for step, seq in sorted(found.items(), reverse=True)}
    return dict(sorted(steps.items()))
