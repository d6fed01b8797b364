"""What is known of a run: its history, its generations, and of a child that it is there at all."""

from __future__ import annotations

from edda import EddaApp, RunStatus
from edda.core.model import Entry, EntryKind, RunId
from edda.errors import InstanceNotFoundError

from .conditions import until


async def kinds_in(app: EddaApp, run_id: str) -> list[EntryKind]:
    return [entry.kind for entry in await app.handle(run_id).history()]


async def entries_of(app: EddaApp, run_id: str, kind: EntryKind) -> list[Entry]:
    return [entry for entry in await app.handle(run_id).history() if entry.kind is kind]


async def undos_of(app: EddaApp, run_id: str) -> list[str]:
    """The ids of what was done to undo, in order."""
    return [entry.step for entry in await entries_of(app, run_id, EntryKind.STEP) if entry.step.startswith("undo:")]


async def until_recorded(app: EddaApp, run_id: str, kind: EntryKind) -> None:
    async def is_recorded() -> bool:
        return kind in await kinds_in(app, run_id)

    await until(is_recorded, f"the history of run {run_id} has an entry {kind}")


async def generation_of(app: EddaApp, run_id: str) -> int:
    return (await app.client.read_run(run_id)).generation


async def entries_by_generation(app: EddaApp, run_id: str) -> list[list[EntryKind]]:
    generations = range(await generation_of(app, run_id) + 1)
    return [
        [entry.kind for entry in await app.engine.storage.history(RunId(run_id), generation)]
        for generation in generations
    ]


async def until_born(app: EddaApp, run_id: str, status: RunStatus) -> None:
    """Somebody else starts it, some time."""

    async def reached() -> bool:
        try:
            return await app.handle(run_id).status() is status
        except InstanceNotFoundError:
            return False

    await until(reached, f"run {run_id} is there and {status}")
