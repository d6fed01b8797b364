"""The driver's end of the pipe: one JSON object per line, `{"op", "args"}` in, `{"result"}` or `{"error"}` out."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, TextIO

Operation = Callable[..., Awaitable[Any]]
Close = Callable[[], Awaitable[None]]


def serve_pipe(operations: Mapping[str, Operation], close: Close, *, uvloop: bool) -> None:
    """Serve until the other end closes stdin."""
    loop_factory = importlib.import_module("uvloop").new_event_loop if uvloop else None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve(operations, close, _take_stdout()))


def _take_stdout() -> TextIO:
    """The pipe is ours alone: whatever a library prints goes to stderr."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


async def _serve(operations: Mapping[str, Operation], close: Close, out: TextIO) -> None:
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            out.write(json.dumps(await _answer(operations, line)) + "\n")
            out.flush()
    finally:
        await close()


async def _answer(operations: Mapping[str, Operation], line: str) -> dict[str, Any]:
    request = json.loads(line)
    # Whatever goes wrong in a system under test is told to the bench, which decides.
    try:
        return {"result": asdict(await operations[request["op"]](**request["args"]))}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
