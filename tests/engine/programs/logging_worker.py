"""A worker whose log is JSON lines in a file: `python -m tests.engine.programs.logging_worker URL FILE`.

It says "failed" on its standard output once its first attempt has failed, and is killed there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from edda import EddaApp, RetryPolicy, WorkflowContext, activity, workflow
from edda.engine.settings import Settings

MORTAL = Settings(lease=1.5, heartbeat=0.3, sweep=0.1, takeover_grace=0.0, linger=0.0)


class ToFile(logging.Handler):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: value for name, value in vars(record).items() if name.startswith("edda_")}
        if fields:
            with open(self.path, "a") as file:
                file.write(json.dumps({"level": record.levelname, "message": record.getMessage(), **fields}) + "\n")
            if fields["edda_line"] in {"step_retry", "compensation_begun"}:
                print(fields["edda_line"], flush=True)


@activity(retry_policy=RetryPolicy(initial_interval=0.2, max_attempts=3, jitter=0.0))
async def flaky(ctx: WorkflowContext) -> None:
    raise ConnectionError("no answer from the bank")


@workflow(name="logged_order")
async def order(ctx: WorkflowContext) -> None:
    await flaky(ctx)


async def main(url: str, path: str) -> None:
    logger = logging.getLogger("edda")
    logger.addHandler(ToFile(path))
    logger.setLevel(logging.INFO)
    async with EddaApp("shop", url, workflows=[order], settings=MORTAL):
        print("serving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
