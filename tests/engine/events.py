"""Events as tests send them, and what the database has of them."""

from __future__ import annotations

from typing import Any

from edda import EddaApp, RunStatus
from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core.model import RunId

from .conditions import until, until_status

SOURCE = "/tests"
_FOR_EVER = (1 << 63) - 1


REPLAY = "replay"


async def send(app: EddaApp, event_type: str, data: Any = None, **attributes: Any) -> str:
    return await app.send_event(event_type, SOURCE, data, **attributes)


async def start_waiting(app: EddaApp, workflow: Any, *args: Any) -> str:
    """Started, and in the database as waiting for an event."""
    run_id: str = await app.start(workflow, *args)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    return run_id


async def run_with_replay(app: EddaApp, workflow: Any, *args: Any) -> Any:
    """The result of a workflow that waits for the event REPLAY: it leaves memory there, and is replayed afterwards."""
    known = workflow.options(id=REPLAY)
    await start_waiting(app, known, *args)
    await send(app, REPLAY)
    return await app.run(known, *args)  # the same run: `run` knows the type of its result


async def result_of(app: EddaApp, run_id: str) -> Any:
    return await app.handle(run_id).result(timeout=30)


async def stored(app: EddaApp, event_type: str) -> list[CloudEvent]:
    """All events of a type, in the order they were accepted."""
    found = await app.engine.storage.events_of_type(event_type, 0, _FOR_EVER, 1000)
    return [json_format.parse_stored(app.engine.codec.decrypt(one.event.body)) for one in found]


async def registered(app: EddaApp, run_id: str) -> list[str]:
    """The steps for which a run's waits are in the database."""
    return [wait.step for wait in await app.engine.storage.waits(RunId(run_id))]


async def until_waiting_for(app: EddaApp, run_id: str, *steps: str) -> None:
    async def are_registered() -> bool:
        return await registered(app, run_id) == list(steps)

    await until(are_registered, f"run {run_id} waits for {', '.join(steps)}")
