"""The program of each process of the demo: start the order, or find it if it exists, and run it until it is done.

It prints what happens, one JSON object per line, so that the demo can show it and decide when to kill.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from demo_order import Order, fulfil
from edda import EddaApp, HooksBase, RunStatus, WorkflowHandle

ORDER = Order("order-1001", "a lute", 349.0)


def say(what: str, about: str = "") -> None:
    print(json.dumps({"what": what, "about": about}), flush=True)


class Reporter(HooksBase):
    """Edda calls hooks after the commit: a step that is reported as recorded is on the disk."""

    async def on_activity_start(
        self, instance_id: str, activity_id: str, activity_name: str, is_replaying: bool
    ) -> None:
        if not is_replaying:
            say("runs", activity_id)

    async def on_activity_complete(
        self, instance_id: str, activity_id: str, activity_name: str, result: Any, cache_hit: bool
    ) -> None:
        say("replayed" if cache_hit else "recorded", activity_id)

    async def on_workflow_complete(self, instance_id: str, workflow_name: str, result: Any) -> None:
        say("completed", str(result))


class Voice(logging.Handler):
    """Shows warnings too, for example of a take-over."""

    def emit(self, record: logging.LogRecord) -> None:
        say("warning", record.getMessage())


async def watch(handle: WorkflowHandle[Any]) -> None:
    """Report each change of the run's status."""
    before: RunStatus | None = None
    while True:
        status = await handle.status()
        if status is not before:
            say("status", status)
        before = status
        await asyncio.sleep(0.05)


async def main(url: str) -> None:
    async with EddaApp("demo", url, hooks=Reporter()):
        await fulfil.options(id=ORDER.id).start(ORDER)  # the same id is the same run: it is started once
        handle = fulfil.handle(ORDER.id)
        watching = asyncio.create_task(watch(handle))
        await handle.result()
        watching.cancel()


if __name__ == "__main__":
    logging.getLogger("edda").addHandler(Voice())
    asyncio.run(main(sys.argv[1]))
