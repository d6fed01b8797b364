"""`python -m benchmarks.walks`: the calls and files that everyday paths pass through, traced on a real database.

A short path is easy to follow in the source. Only calls of functions in `src/edda` count. Of a page the statements are
counted too: one that is sent twice with the same values reads the same fact twice.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from dis import opmap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import asyncpg
import click

import edda
from edda import EddaApp, WorkflowContext, activity, wait_event, workflow
from edda.core.states import RunStatus
from edda.engine.settings import Settings
from tests.databases import postgres
from tests.engine.conditions import until_status

ROOT = Path(edda.__file__).parent
QUIET = Settings(poll=60.0, sweep=60.0, orphan_sweep=60.0)
"""No background query falls into a traced path."""
WARM_UP = 1.0
"""Seconds after the first run: connections, codecs, statements and definitions are made once per process."""
TIMEOUT = 10.0


@activity
async def double(ctx: WorkflowContext, value: int) -> int:
    return value * 2


@workflow
async def one_step(ctx: WorkflowContext, value: int) -> int:
    return await double(ctx, value)


@workflow
async def one_wait(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "order.paid")).data


@dataclass
class Walk:
    calls: list[str] = field(default_factory=list)
    statements: list[tuple[str, ...]] | None = None
    """The text and the values of each statement, if they are counted."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _last: tuple[str, int] = ("", 0)
    _paths: dict[CodeType, str | None] = field(default_factory=dict)

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or self.has_ended.is_set() or _is_resumed(frame):
            return
        code = frame.f_code
        if code not in self._paths:
            path = Path(code.co_filename)
            is_module = path.is_relative_to(ROOT) and path.suffix == ".py"  # not a compiled template
            self._paths[code] = str(path.relative_to(ROOT)) if is_module else None
        path_in_edda = self._paths[code]
        if path_in_edda is not None and not code.co_name.startswith("<"):
            self.calls.append(f"{path_in_edda}:{code.co_qualname}")
            self._stop_after_last(code.co_qualname)

    def _stop_after_last(self, called: str) -> None:
        last, times = self._last
        if called == last:
            self._last = last, times - 1
            if times == 1:
                self.has_ended.set()

    @property
    def files(self) -> Counter[str]:
        return Counter(call.partition(":")[0] for call in self.calls)

    @contextmanager
    def recording(self) -> Iterator[None]:
        sys.setprofile(self.trace)
        threading.setprofile(self.trace)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @asynccontextmanager
    async def recording_until(self, last: str, times: int) -> AsyncIterator[None]:
        """Record until the `times`-th call of `last`, and wait for it without a call of the library."""
        self._last = last, times
        with self.recording():
            yield
            async with asyncio.timeout(TIMEOUT):
                await self.has_ended.wait()


def _is_resumed(frame: FrameType) -> bool:
    """Whether a coroutine goes on that was called before: the operand of RESUME is 0 in a call only."""
    instruction, operand = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return instruction == opmap["RESUME"] and operand & 3 != 0


async def trace_start(app: EddaApp, walk: Walk) -> None:
    """The first commit has the run's own rows, the second one the entry of its step."""
    await app.handle(await one_step.start(1)).result()
    await asyncio.sleep(WARM_UP)
    async with walk.recording_until("LiveRun.on_committed", 2):
        await one_step.start(2)


async def trace_wait(app: EddaApp, walk: Walk) -> None:
    await until_status(app, await one_wait.start(), RunStatus.WAITING_FOR_EVENT)
    await asyncio.sleep(WARM_UP)
    async with walk.recording_until("Worker.run_suspended", 1):
        await one_wait.start()


async def trace_page(app: EddaApp, walk: Walk) -> None:
    run_id = await one_step.start(1)
    await app.handle(run_id).result()
    await request_page(app, f"/_edda/runs/{run_id}")
    await asyncio.sleep(WARM_UP)
    with walk.recording(), recorded_statements() as walk.statements:
        await request_page(app, f"/_edda/runs/{run_id}")


async def request_page(app: EddaApp, path: str) -> None:
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"host", b"localhost")]
    await app({"type": "http", "method": "GET", "path": path, "headers": headers}, receive, send)
    assert statuses == [200], f"{path}: {statuses}"


@contextmanager
def recorded_statements() -> Iterator[list[tuple[str, ...]]]:
    """Those that asyncpg's connections send, whichever module of the storage calls them."""
    sent: list[tuple[str, ...]] = []
    driver: Any = asyncpg.Connection
    execute = driver._execute

    async def record(connection: Any, query: str, args: Sequence[Any], *more: Any, **options: Any) -> Any:
        sent.append((query, *map(repr, args)))
        return await execute(connection, query, args, *more, **options)

    driver._execute = record
    try:
        yield sent
    finally:
        driver._execute = execute


WALKS: dict[str, Callable[[EddaApp, Walk], Awaitable[None]]] = {
    "start() to the first recorded step": trace_start,
    "a wait that leaves memory": trace_wait,
    "a request for the page of a run": trace_page,
}


async def trace_all(url: str, show: bool) -> None:
    for title, trace in WALKS.items():
        async with EddaApp("walks", url, settings=QUIET) as app:
            walk = Walk()
            await trace(app, walk)
            print(f"{title}: {len(walk.calls)} calls in {len(walk.files)} files")
            for path, count in walk.files.most_common():
                print(f"  {count:4} {path}")
            if walk.statements is not None:
                print_statements(walk.statements, show)
            if show:
                print(*(f"    {call}" for call in walk.calls), sep="\n")


def print_statements(statements: list[tuple[str, ...]], show: bool) -> None:
    print(f"  {len(statements)} statements")
    for (text, *values), count in Counter(statements).items():
        if count > 1:
            print(f"  WARNING: sent {count} times with the same values: {' '.join(text.split())} {values}")
        elif show:
            print(f"    {' '.join(text.split())} {values}")


@click.command()
@click.option("--calls", is_flag=True, help="Print each call.")
def main(calls: bool) -> None:
    server = postgres()
    if server is None:
        raise click.ClickException("there is no PostgreSQL: give its URL, or install it")
    url = server.create()
    try:
        asyncio.run(trace_all(url, calls))
    finally:
        server.drop(url)


if __name__ == "__main__":
    main()
