"""DBOS: async workflows and steps, called directly, which is its quickest way."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from typing import Any

from .driver import LEDGER, PATIENCE, REST_SECONDS, Probe, until, until_told
from .ledger import line
from .session import serve

# Not installed where this file is type-checked.
dbos: Any = importlib.import_module("dbos")
probe = Probe()

# By default it is SERIALIZABLE: PostgreSQL turns some away, and it tries them again. This is what the others have.
TRANSACTION = {"name": "book", "isolation_level": "READ COMMITTED"}


async def _step(number: int) -> int:
    probe.step()
    return number


async def _gate(number: int) -> None:
    await probe.pass_gate(number)


async def _mark(number: int) -> None:
    probe.mark(number)


step, gate, mark = (dbos.DBOS.step()(body) for body in (_step, _gate, _mark))


async def _run_steps(steps: int) -> int:
    for number in range(steps):
        await step(number)
    return steps


async def _book(ledger: Any, number: int) -> int:
    ledger.sql_session().add(line(number))
    return number


async def _book_lines(steps: int) -> int:
    for number in range(steps):
        await driver.ledger.run_tx_step_async(TRANSACTION, _book, driver.ledger, number)
    return steps


async def _be_interrupted(number: int) -> None:
    await gate(number)
    await mark(number)


async def _rest(steps: int) -> None:
    probe.begin()
    for number in range(steps):
        await step(number)
    await dbos.DBOS.sleep_async(REST_SECONDS)
    await mark(0)


async def _expect(number: int, act: bool) -> None:
    probe.begin()
    await dbos.DBOS.recv_async("wake", timeout_seconds=PATIENCE)
    if act:
        await mark(number)
    else:
        probe.mark(number)


async def _doze(number: int, due: float) -> None:
    probe.begin()
    await dbos.DBOS.sleep_async(due - time.time())
    await mark(number)


run_steps, book_lines, be_interrupted, rest, expect, doze = (
    dbos.DBOS.workflow()(body) for body in (_run_steps, _book_lines, _be_interrupted, _rest, _expect, _doze)
)


class DbosDriver:
    statements: int | None = None

    def __init__(self, url: str, *flags: str) -> None:
        self.config = {
            "name": "bench",
            "system_database_url": url.replace("postgresql://", "postgresql+psycopg://"),
            "log_level": "WARNING",
        }
        self.books = LEDGER in flags
        self.client: Any = None
        self.ledger: Any = None

    async def open(self, worker: bool) -> None:
        if not worker:
            self.client = dbos.DBOSClient(system_database_url=self.config["system_database_url"])
            return
        dbos.DBOS(config=self.config)
        if self.books:  # not possible once it is launched
            self.ledger = await dbos.AsyncSQLAlchemyDatasource.create(self.config["system_database_url"])
        # Blocking by design; its own examples launch before the loop starts.
        await asyncio.to_thread(dbos.DBOS.launch)

    async def close(self) -> None:
        await asyncio.to_thread(self.client.destroy if self.client else dbos.DBOS.destroy)

    async def run(self, steps: int) -> None:
        await run_steps(steps)

    async def book(self, steps: int) -> None:
        await book_lines(steps)

    async def hold(self, number: int) -> None:
        await dbos.DBOS.start_workflow_async(be_interrupted, number)

    async def suspend(self, steps: int) -> str:
        handle = await dbos.DBOS.start_workflow_async(rest, steps)
        run_id = str(handle.get_workflow_id())

        async def sleep_is_recorded() -> bool:
            return len(await dbos.DBOS.list_workflow_steps_async(run_id)) > steps

        await until(lambda: len(probe.steps) >= steps, PATIENCE)
        # Before that a fresh process would sleep anew.
        await until_told(sleep_is_recorded, PATIENCE)
        return run_id

    async def resume(self, run_id: str) -> None:
        """Launching recovers it."""

    async def expect(self, number: int, act: bool) -> None:
        with dbos.SetWorkflowID(f"expect-{number}"):
            await dbos.DBOS.start_workflow_async(expect, number, act)

    async def send(self, number: int) -> None:
        await (self.client or dbos.DBOS).send_async(f"expect-{number}", {}, "wake")

    async def doze(self, number: int, due: float) -> None:
        await dbos.DBOS.start_workflow_async(doze, number, due)

    async def is_quiet(self) -> bool:
        """Those that wait are pending too."""
        pending = await dbos.DBOS.list_workflows_async(status="PENDING", load_input=False, load_output=False)
        return len(pending) <= len(probe.bodies) - len(probe.marks)


if __name__ == "__main__":
    driver = DbosDriver(*sys.argv[1:])
    serve(driver, probe, uvloop=False)
