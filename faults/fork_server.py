"""A process that has imported everything and forks a worker per life: lives must be cheap, for many are taken.

It has no loop and no thread. It reads a request per line and answers with a line; at the end of its input it kills
what is left of its children and ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import uvicorn.lifespan.on
import uvicorn.protocols.http.auto  # noqa: F401 - what every life would import by itself is there before it
from msgspec import Struct

import edda.storage.mysql
import edda.storage.postgres
import edda.storage.sqlite  # noqa: F401 - the same

from .worker import Orders, live

ROOT = Path(__file__).parents[1]


class Fork(Struct, frozen=True, tag=True):
    orders: Orders


class Reap(Struct, frozen=True, tag=True):
    """Wait for the end of a child that was killed."""

    pid: int


class Look(Struct, frozen=True, tag=True):
    """Which children have ended, though nobody asked them to?"""


Request = Fork | Reap | Look


class ForkServer:
    """Seen from the process that gives the orders."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "faults.fork_server"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def fork(self, orders: Orders) -> int:
        return self._ask(Fork(orders))[0]

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self._ask(Reap(pid))

    def look(self) -> list[int]:
        return self._ask(Look())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, request: Request) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()
        answer: list[int] = msgspec.json.decode(self._process.stdout.readline(), type=list[int])
        return answer


class _Nursery:
    """Seen from within."""

    def __init__(self) -> None:
        self._children: set[int] = set()

    def answer(self, request: Request) -> list[int]:
        match request:
            case Fork(orders):
                return [self._fork(orders)]
            case Reap(pid):
                os.waitpid(pid, 0)
                self._children.discard(pid)
                return []
            case Look():
                return self._ended()

    def _fork(self, orders: Orders) -> int:
        pid = os.fork()
        if pid == 0:
            _become(orders)
        self._children.add(pid)
        return pid

    def _ended(self) -> list[int]:
        ended = [pid for pid in self._children if os.waitpid(pid, os.WNOHANG)[0]]
        self._children.difference_update(ended)
        return ended

    def end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _become(orders: Orders) -> None:
    """The child's whole life. It never returns into the parent's code."""
    code = 1
    try:
        output = os.open(orders.file("output"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        live(orders)
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    nursery = _Nursery()
    requests = msgspec.json.Decoder(Request)
    try:
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(msgspec.json.encode(nursery.answer(requests.decode(line))) + b"\n")
            sys.stdout.buffer.flush()
    finally:
        nursery.end()


if __name__ == "__main__":
    main()
