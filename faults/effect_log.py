"""The ledger: one file per process, one write per line, so that nothing but the machine's end can lose a line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from msgspec import Struct, field

from edda import WorkflowContext
from edda.core.model import WorkerId
from edda.workflow.context import as_microseconds


class Holder(Struct, frozen=True):
    """Under whose claim a body runs."""

    worker: WorkerId
    epoch: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.epoch}"


class Effect(Struct, frozen=True):
    """An activity's body began."""

    run_id: str
    generation: int
    step: str
    attempt: int
    epoch: int
    worker: str
    link: str
    """What the workflow had seen when it asked for this."""
    at: int
    not_before: int


class Ledger:
    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, *fields: object) -> None:
        os.write(self._descriptor, ("\t".join(map(str, fields)) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


class WorkerLedger(Ledger):
    """The witness of one worker process."""

    def __init__(self, file: Path, holder_of: Callable[[str], Holder]) -> None:
        super().__init__(file)
        self._holder_of = holder_of

    def claim(self, ctx: WorkflowContext) -> str:
        return str(self._holder_of(ctx.instance_id))

    def effect(self, ctx: WorkflowContext, link: str, not_before: datetime | None) -> None:
        holder = self._holder_of(ctx.instance_id)
        due = 0 if not_before is None else as_microseconds(not_before)
        now = time.time_ns() // 1000
        generation = ctx.idempotency_key.removeprefix(f"{ctx.instance_id}/").partition("/")[0]
        place = (ctx.instance_id, generation, ctx.activity_id, ctx.attempt, holder.epoch, holder.worker)
        self.note("effect", *place, link, now, due)


class Testimony(Struct):
    """All that the processes wrote down."""

    __test__ = False

    effects: list[Effect]
    acked: set[str]
    """Runs whose start() returned."""
    cancelled: set[str]
    """Runs that somebody tried to cancel."""
    failures: list[str]
    """Starts that raised."""
    posted: set[tuple[str, str]]
    """Events whose sender was told that they are stored, by source and id."""
    refused: int = 0
    """Events whose sender was told that they are not."""
    cuts: int = 0
    hosted: set[str] = field(default_factory=set)
    """Runs whose handler was told that its transaction is committed."""
    shunned: set[str] = field(default_factory=set)
    """Runs whose handler rolled back."""


def read_ledgers(folder: Path) -> Testimony:
    told = Testimony([], set(), set(), [], set())
    runs = {"acked": told.acked, "cancel": told.cancelled, "hosted": told.hosted, "shunned": told.shunned}
    for kind, *fields in _lines(folder):
        match kind:
            case "effect":
                told.effects.append(_effect(*fields))
            case "acked" | "cancel" | "hosted" | "shunned":
                runs[kind].add(fields[0])
            case "failed":
                told.failures.append(fields[0])
            case "posted":
                told.posted.add((fields[0], fields[1]))
            case "refused":
                told.refused += int(fields[0])
            case "cut":
                told.cuts += 1
            case _:
                raise ValueError(f"the ledger has a line {kind!r}")
    return told


def _effect(
    run_id: str, generation: str, step: str, attempt: str, epoch: str, worker: str, link: str, at: str, due: str
) -> Effect:
    return Effect(run_id, int(generation), step, int(attempt), int(epoch), worker, link, int(at), int(due))


def _lines(folder: Path) -> Iterator[list[str]]:
    for file in sorted(folder.glob("*.ledger")):
        for line in file.read_text().splitlines():
            yield line.split("\t")
